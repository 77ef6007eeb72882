"""How batches come from the loader to the trainer, and with each what is known of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_warn

from odb_lightning.batch import StepInfo
from odb_lightning.loader import ODBDataLoader
from odb_lightning.runtime.seeding import preserved_random_state
from odb_lightning.strategies.denominator import WindowCounts
from odb_lightning.strategies.idle import enough_for_batch_norm
from odb_lightning.strategies.logs import WeighsLogs
from odb_lightning.strategies.resume import ResumesExactly
from odb_lightning.strategies.unwrapping import UnwrappingLoader, unwrapping
from odb_lightning.strategies.windows import PlansWindows


class FeedsBatches(WeighsLogs, PlansWindows, ResumesExactly):
    """Puts a proxy before each loader, which takes batches and their infos apart, and tells an ODBDataLoader what the trainer
    knows; an epoch that ends before its limit ends for the trainer, too."""

    denominator: Literal["loader", "strategy"]
    _counts: WindowCounts
    _module: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step_info: StepInfo | None = None
        """What is known of the batch in training, from its transfer to the device to the end of `on_train_batch_end`."""
        self.val_step_info: StepInfo | None = None
        """The same for the batch in evaluation; None for a loader that is not ours."""
        # With the accumulation planned. Weakly: a loader that Lightning has replaced goes, and its processes with it.
        self._odb_loaders: weakref.WeakKeyDictionary[ODBDataLoader, int] = weakref.WeakKeyDictionary()

    def process_dataloader(self, dataloader: Any) -> Any:
        """The loader as the trainer iterates it. Raises ValueError for one whose loss can't be scaled."""
        loader = super().process_dataloader(dataloader)
        if not self._trainer.training:
            if isinstance(loader, ODBDataLoader):
                self._attach(loader, 1)
            return unwrapping(loader, lambda: self._evaluation_batches(loader))
        if isinstance(loader, ODBDataLoader):
            if self._counts.has_rule:
                rank_zero_warn("the strategy's num_supervised_fn is ignored: the ODBDataLoader counts, by its own")
            self._check_scheduled_accumulation(loader)
            self._attach(loader, self._accumulation(loader))
            self._resume(loader)
            self._warn_of_a_restarted_epoch()
        elif self.loss_scaling != "none" and self.denominator == "loader":
            raise ValueError(
                f"{type(self).__name__} scales the loss by counts that only an ODBDataLoader brings, but the training loader "
                f"is a {type(dataloader).__name__}: use ODBDataLoader.from_dataloader(loader, l_max=...), or ODBDataModule; or "
                f'let the strategy count, {type(self).__name__}(denominator="strategy"); or say loss_scaling="none"'
            )
        is_counted = isinstance(loader, ODBDataLoader) or self.denominator == "strategy"
        marks_last = is_counted and isinstance(self._trainer.limit_train_batches, int)
        proxy = unwrapping(loader, lambda: self._training_batches(loader), marks_last)
        proxy.on_request = self._begin_batch
        return proxy

    def _attach(self, loader: ODBDataLoader, accumulate: int) -> None:
        limit = self._limit_on_batches()
        loader.attach(
            rank=self.data_parallel_rank,
            world_size=self.data_parallel_size,
            accumulate=accumulate,
            max_steps=limit if isinstance(limit, int) else None,
        )
        self._odb_loaders[loader] = accumulate

    def _training_batches(self, loader: Any) -> Iterator[Any]:
        """Those of the epoch that begins."""
        epoch = self._epoch_in_training()
        if isinstance(loader, ODBDataLoader):
            accumulate = self._accumulation(loader)
            if accumulate != self._odb_loaders[loader]:
                self._attach(loader, accumulate)
            # Lightning tells nobody but samplers of the epoch, and those after the first batch was drawn.
            loader.set_epoch(epoch)
        elif self.denominator == "strategy":
            return self._counts.batches(
                loader,
                epoch=epoch,
                first_step=self._first_step(),
                accumulate=self._accumulation(loader),
                limit=self._steps_of_an_epoch(loader),
                timeout=getattr(self, "_timeout", None),
            )
        return enough_for_batch_norm(iter(loader), self._module)

    def _evaluation_batches(self, loader: Any) -> Iterator[Any]:
        if isinstance(loader, ODBDataLoader):
            loader.set_epoch(0)
        with preserved_random_state():  # of which a torch DataLoader draws
            batches = iter(loader)
        return enough_for_batch_norm(batches, self._module)

    def _limit_on_batches(self) -> int | float | None:
        trainer = self._trainer
        if trainer.training:
            return trainer.limit_train_batches
        if trainer.testing:
            return trainer.limit_test_batches
        return trainer.limit_predict_batches if trainer.predicting else trainer.limit_val_batches

    def _epoch_in_training(self) -> int:
        if self._trainer.overfit_batches > 0:
            return 0  # the same batches in each epoch
        # trainer.current_epoch is set only after the first batch of a resumed run was drawn.
        return int(self._trainer.fit_loop.epoch_progress.current.processed)

    def _warn_of_a_restarted_epoch(self) -> None:
        epochs = self._trainer.fit_loop.epoch_progress.current
        if epochs.started > epochs.processed and self._resumed is None:
            rank_zero_warn(
                f"the checkpoint lies inside epoch {epochs.processed}, and does not hold where in it: the epoch is trained "
                "from its beginning, so its first samples are trained once more. A checkpoint at the end of an epoch is exact."
            )

    @property
    def data_parallel_rank(self) -> int:
        """Position among the ranks that see different data."""
        return int(self._trainer.global_rank)

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that see different data."""
        return int(self._trainer.world_size)

    def _advance(self, position: int, dataloader_idx: int) -> None:
        """To what is known of the batch at `position` of those that the trainer has had."""
        if self._trainer.training:
            loaders = as_list(self._trainer.train_dataloader)
            if len(loaders) == 1 and isinstance(loaders[0], UnwrappingLoader):
                info = loaders[0].info_at(position)
                if info is not self.step_info:
                    self._take_info(info)
                if info is not None and info is loaders[0].last:
                    self._end_epoch()
        else:
            loader = as_list(self._evaluation_loaders())[dataloader_idx]
            self.val_step_info = loader.info_at(position) if isinstance(loader, UnwrappingLoader) else None

    def _end_epoch(self) -> None:
        """Tells the trainer of the last batch of an epoch that ends before its integer limit. It takes the limit for the number
        of batches, and would neither validate nor step the last window (PL#10290)."""
        trainer = self._trainer
        trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True
        if trainer.val_check_interval == 1.0:
            trainer.val_check_batch = float("inf")  # with the last batch, whichever that is

    def _evaluation_loaders(self) -> Any:
        trainer = self._trainer
        if trainer.testing:
            return trainer.test_dataloaders
        if trainer.predicting:
            return trainer.predict_dataloaders
        return trainer.val_dataloaders


def as_list(loaders: Any) -> list[Any]:
    """The loaders in a trainer's collection of them."""
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]
