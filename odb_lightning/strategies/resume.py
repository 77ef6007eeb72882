"""Checkpoints that hold where each rank was, and runs that go on from there.

Edits the progress of Lightning's loops in a checkpoint (`loops.fit_loop`), and begins the data fetcher anew
(`fit_loop._data_fetcher`), neither of which has a public counterpart; `tests/traps` holds what this relies on.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn

from odb_lightning.batch import StepInfo
from odb_lightning.callbacks.ranks import gather_objects
from odb_lightning.loader import ODBDataLoader
from odb_lightning.runtime.seeding import RandomState

CHECKPOINT_KEY = "odb_lightning"
_VERSION = 1


class ResumesExactly(Strategy):
    """A checkpoint holds, for every rank, the loader's state after the batch trained last and the random state; a run that goes
    on from it trains the batches that would have followed.

    Gradients are not in a checkpoint: inside an accumulation window it goes on at the window's first micro-batch. Validation
    leaves the random state as it was, so that it makes no difference whether one lies before a resume.
    """

    step_info: StepInfo | None
    _trainer: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forget_batches()
        self._resumed: dict[str, Any] | None = None
        """What the checkpoint of this run held."""
        self._has_resumed = False
        self._early_loader: weakref.ref[ODBDataLoader] | None = None
        """One that was asked for its first batch before the checkpoint was loaded."""
        self._random_to_resume: dict[str, Any] | None = None
        self._random_before_validation: RandomState | None = None
        self._batch_random: RandomState | None = None
        """At the beginning of the batch in training."""

    def _forget_batches(self) -> None:
        self.step_info: StepInfo | None = None
        self._info_epoch = -1
        """The trainer's epoch that `step_info` is of."""
        self._previous: tuple[StepInfo | None, int] = (None, -1)
        """The same of the batch before."""
        self._window_random: RandomState | None = None
        """At the beginning of the accumulation window in training."""

    def setup(self, trainer: Any) -> None:
        self._forget_batches()  # of another fit
        super().setup(trainer)

    def teardown(self) -> None:
        self._resumed = self._early_loader = self._random_to_resume = self._random_before_validation = None
        self._has_resumed = False
        super().teardown()

    # --- saving ---

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Every rank has to take part. After a failure, when the others may be anywhere, nothing is saved on several ranks."""
        if self._is_interrupted and self._trainer.world_size > 1:
            warnings.warn(
                "no checkpoint is made after a failure: the other ranks can't take part in it. The one before is to be used",
                stacklevel=2,
            )
            return
        if "optimizer_states" in checkpoint:  # else it is of weights only
            state = self._state_of_run(checkpoint["loops"]["fit_loop"])
            if state is not None:
                checkpoint[CHECKPOINT_KEY] = state
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Not after a failure, when the others may be anywhere."""
        if not self._is_interrupted:
            super().barrier(*args, **kwargs)  # type: ignore[safe-super]

    @property
    def _is_interrupted(self) -> bool:
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        return trainer is not None and bool(trainer.state.status == TrainerStatus.INTERRUPTED)

    def _state_of_run(self, loop: dict[str, Any]) -> dict[str, Any] | None:
        info, epoch, progress, epochs = (
            self.step_info,
            self._info_epoch,
            loop["epoch_loop.batch_progress"],
            loop["epoch_progress"],
        )
        num_trained = progress["current"]["processed"]
        is_at_hand = info is not None and epoch == epochs["current"]["processed"] and num_trained <= info.step
        if is_at_hand:  # the batch is still to be trained
            _set_back(progress, num_trained)
            info, epoch = self._previous
        if info is None or info.position is None:
            return self._resumed
        try:
            state = info.state_dict()
        except NotImplementedError:
            rank_zero_warn(
                "an iterable data set in non_join has no state: a run that goes on from a checkpoint inside an epoch begins "
                "that epoch again"
            )
            return None
        is_whole = state["step"] > info.step
        is_stopped = (
            not progress["is_last_batch"] and epochs["current"]["processed"] == epochs["current"]["started"] == epoch + 1
        )
        random_state = self._random_before_validation or RandomState()
        if is_at_hand or not is_whole:
            random_state = self._window_random or random_state
        if not is_whole:
            _set_back(progress, state["step"])
        elif progress["is_last_batch"]:
            _end_epoch(loop)
        if is_stopped:
            _go_on_with_epoch(epochs)
        return {
            "version": _VERSION,
            "epoch": epoch,
            "ranks": gather_objects({"loader": state, "random": random_state.to_dict()}),
        }

    # --- on the way ---

    def _begin_batch(self) -> None:
        """Before anything is done with a training batch."""
        if self._random_to_resume is not None:
            RandomState.put_back_dict(self._random_to_resume)
        self._batch_random = RandomState()

    def _take_info(self, info: StepInfo | None) -> None:
        """That of the batch in training from here on."""
        self._previous = self.step_info, self._info_epoch
        self.step_info, self._info_epoch = info, int(self._trainer.fit_loop.epoch_progress.current.processed)
        self._random_to_resume = None
        if info is not None and info.step % info.accumulate == 0:
            self._window_random = self._batch_random

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._random_before_validation = RandomState()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._random_before_validation is not None:
            self._random_before_validation.put_back()
            self._random_before_validation = None

    # --- going on ---

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._forget_batches()
            self._resumed, self._has_resumed = checkpoint.get(CHECKPOINT_KEY), False
        return checkpoint

    def _resume(self, loader: ODBDataLoader) -> None:
        """The training loader goes on where the checkpoint was, if there is one. One of a later epoch is left as it is."""
        if self._resumed is None:
            self._early_loader = weakref.ref(loader)
        elif not self._has_resumed:
            ranks = self._resumed["ranks"]
            if self._resumed["epoch"] == self._trainer.fit_loop.epoch_progress.current.processed:  # else it was at its end
                loader.load_state_dict([state["loader"] for state in ranks])
            self._has_resumed, self._early_loader = True, None
            if len(ranks) == self._trainer.world_size:
                self._random_to_resume = ranks[self._trainer.global_rank]["random"]

    def on_train_start(self) -> None:
        super().on_train_start()
        self._forget_batches()  # of a search for a learning rate, say
        loader = None if self._early_loader is None else self._early_loader()
        if self._resumed is not None and loader is not None:
            self._resume(loader)
            iter(self._trainer.fit_loop._data_fetcher)


def _set_all(tracker: dict[str, int], number: int) -> None:
    for name in ("ready", "started", "processed", "completed"):
        tracker[name] = number


def _set_back(progress: dict[str, Any], num_trained: int) -> None:
    """Lightning's count of batches, as it is between two of them."""
    num_again = progress["current"]["processed"] - num_trained
    _set_all(progress["total"], progress["total"]["processed"] - num_again)
    _set_all(progress["current"], num_trained)
    progress["is_last_batch"] = False


def _end_epoch(loop: dict[str, Any]) -> None:
    """After the last batch of an epoch Lightning would go on with the number of that batch, and without an epoch to number it
    in, as the loader has no length: the epoch is over, and the next one begins."""
    epochs, progress = loop["epoch_progress"], loop["epoch_loop.batch_progress"]
    is_in_last_batch = progress["current"]["completed"] < progress["current"]["processed"]
    is_at_end = epochs["current"]["processed"] == epochs["current"]["started"]
    if is_in_last_batch:
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1  # which Lightning would do when it begins again there
    if is_in_last_batch or is_at_end:
        for span in ("current", "total"):
            _set_all(epochs[span], epochs[span]["started"])
        _set_all(progress["total"], progress["total"]["processed"])
        _set_all(progress["current"], 0)
        progress["is_last_batch"] = False


def _go_on_with_epoch(epochs: dict[str, Any]) -> None:
    """A run that is stopped inside an epoch counts it as done; gone on with, it has the rest of it."""
    for span in ("current", "total"):
        epochs[span]["processed"] -= 1
        epochs[span]["completed"] = min(epochs[span]["completed"], epochs[span]["processed"])
