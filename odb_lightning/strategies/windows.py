"""Which steps of an epoch make up an update."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import Strategy

from odb_lightning.batch import StepInfo
from odb_lightning.loader import ODBDataLoader
from odb_lightning.strategies.unwrapping import length_of


class PlansWindows(Strategy):
    """Says before an epoch how many micro-batches an update has in it: the trainer's `accumulate_grad_batches`, what a
    `GradientAccumulationScheduler` makes of it, or, under manual optimization, `accumulate` of the ODBDataLoader."""

    step_info: StepInfo | None
    _trainer: Any
    _module: Any

    def on_train_start(self) -> None:
        super().on_train_start()
        scheduler = self._accumulation_scheduler()
        if scheduler is not None:  # which acts where an epoch begins, and a resumed run may begin inside of one
            epoch = self._trainer.fit_loop.epoch_progress.current.processed
            self._trainer.accumulate_grad_batches = scheduler.get_accumulate_grad_batches(epoch)

    @property
    def _begins_window(self) -> bool:
        """Whether the batch in training is the first of its accumulation window."""
        info = self.step_info
        if info is not None:
            return info.step % info.accumulate == 0
        return int(self._trainer.fit_loop.epoch_loop.batch_idx) % int(self._trainer.accumulate_grad_batches) == 0

    @property
    def ends_window(self) -> bool:
        """Whether the batch in training is the last of its accumulation window, after which the optimizer is to step."""
        loop = self._trainer.fit_loop
        if self._module.automatic_optimization:
            return not loop._should_accumulate()
        info = self.step_info
        return info is None or (info.step + 1) % info.accumulate == 0 or loop.epoch_loop._num_ready_batches_reached()

    def _accumulation(self, loader: Any) -> int:
        """Micro-batches per update in the epoch that begins."""
        if not self._module.automatic_optimization:
            return (loader.accumulate or 1) if isinstance(loader, ODBDataLoader) else 1
        scheduler = self._accumulation_scheduler()
        if scheduler is not None:
            return scheduler.get_accumulate_grad_batches(self._trainer.fit_loop.epoch_progress.current.processed)
        return int(self._trainer.accumulate_grad_batches)

    def _accumulation_scheduler(self) -> GradientAccumulationScheduler | None:
        found = [callback for callback in self._trainer.callbacks if isinstance(callback, GradientAccumulationScheduler)]
        return found[0] if found else None

    def _check_scheduled_accumulation(self, loader: ODBDataLoader) -> None:
        scheduler = self._accumulation_scheduler()
        if scheduler is not None and loader.accumulate is not None:
            raise ValueError(
                f"the loader was given accumulate={loader.accumulate}, but a GradientAccumulationScheduler changes it between "
                "epochs: leave accumulate out, the strategy sets it"
            )

    def _first_step(self) -> int:
        """The step of the epoch to begin with, of a loader whose batches the trainer counts on after a resume."""
        loop = self._trainer.fit_loop
        epochs = loop.epoch_progress.current
        return int(loop.epoch_loop.batch_progress.current.ready) if epochs.started > epochs.processed else 0

    def _steps_of_an_epoch(self, loader: Any) -> float:
        limit, length = self._trainer.limit_train_batches, length_of(loader)
        if length is None:
            return limit if isinstance(limit, int) else float("inf")
        return min(limit, length) if isinstance(limit, int) else int(limit * length)
