"""Checkpoints that hold where each rank was, and runs that go on from there.

Edits the progress of Lightning's loops in a checkpoint (`loops.fit_loop`), and begins the data fetcher anew
(`fit_loop._data_fetcher`), neither of which has a public counterpart; `tests/traps` holds what this relies on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from odb_lightning.batch import StepInfo
from odb_lightning.callbacks.ranks import gather_objects
from odb_lightning.loader import ODBDataLoader

CHECKPOINT_KEY = "odb_lightning"
_VERSION = 1


class ResumesExactly(Strategy):
    """A checkpoint holds, for every rank, the loader's state after the batch trained last and the random state; a run that goes
    on from it trains the batches that would have followed.

    Gradients are not in a checkpoint: inside an accumulation window it goes on at the window's first micro-batch.
    """

    step_info: StepInfo | None
    _trainer: Any
    _epoch_in_training: Callable[[], int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._previous_info: StepInfo | None = None
        self._window_random: dict[str, Any] | None = None
        """The random state at the beginning of the accumulation window in training."""
        self._resumed: dict[str, Any] | None = None
        """What the checkpoint of this run held."""
        self._has_resumed = False
        self._early_loader: ODBDataLoader | None = None
        """One that was asked for its first batch before the checkpoint was loaded."""
        self._random_to_resume: dict[str, Any] | None = None

    # --- saving ---

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Every rank has to take part."""
        if "loops" in checkpoint:  # else it is of weights only
            state = self._state_of_run(checkpoint["loops"]["fit_loop"])
            if state is not None:
                checkpoint[CHECKPOINT_KEY] = state
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def _state_of_run(self, loop: dict[str, Any]) -> dict[str, Any] | None:
        info, progress = self.step_info, loop["epoch_loop.batch_progress"]
        num_trained = progress["current"]["processed"]
        if info is not None and num_trained <= info.step:  # the batch at hand is still to be trained
            _set_back(progress, num_trained)
            info = self._previous_info
        if info is None or info.position is None:
            return self._resumed
        try:
            state = info.state_dict()
        except NotImplementedError:
            rank_zero_warn(
                "an iterable data set has no state: a run that goes on from a checkpoint inside an epoch begins that epoch "
                "again"
            )
            return None
        is_whole = state["step"] > info.step
        own = {"loader": state, "random": _random_state() if is_whole else self._window_random}
        if not is_whole:
            _set_back(progress, state["step"])
        elif progress["is_last_batch"]:
            _end_epoch(loop)
        return {"version": _VERSION, "ranks": gather_objects(own)}

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Before any hook on a batch: the random state of a run that goes on is put back."""
        info = self.step_info
        if self._trainer.training and info is not None:
            if self._random_to_resume is not None:
                _set_random_state(self._random_to_resume)
                self._random_to_resume = None
            if info.accumulate > 1 and info.step % info.accumulate == 0:
                self._window_random = _random_state()
        return super().batch_to_device(batch, *args, **kwargs)

    # --- going on ---

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._resumed, self._has_resumed = checkpoint.get(CHECKPOINT_KEY), False
        return checkpoint

    def _resume(self, loader: ODBDataLoader) -> None:
        """The training loader goes on where the checkpoint was, if there is one. One of a later epoch is left as it is."""
        if self._resumed is None:
            self._early_loader = loader
        elif not self._has_resumed:
            ranks = self._resumed["ranks"]
            states = [state["loader"] for state in ranks]
            if states[0]["epoch"] == self._epoch_in_training():  # else it was at that epoch's end
                loader.load_state_dict(states)
            self._has_resumed, self._early_loader = True, None
            if len(ranks) == self._trainer.world_size:
                self._random_to_resume = ranks[self._trainer.global_rank]["random"]

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._resumed is not None and self._early_loader is not None:
            self._resume(self._early_loader)
            iter(self._trainer.fit_loop._data_fetcher)

    def teardown(self) -> None:
        self._resumed = self._early_loader = self._random_to_resume = None
        super().teardown()


def _random_state() -> dict[str, Any]:
    """Of Python's, numpy's and torch's generators, in plain containers and tensors."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


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
    if is_in_last_batch or is_at_end:
        for span in ("current", "total"):
            _set_all(epochs[span], epochs[span]["started"])
        _set_all(progress["total"], progress["total"]["processed"])
        _set_all(progress["current"], 0)
        progress["is_last_batch"] = False
