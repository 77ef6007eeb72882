"""Counts what a run did on each rank and puts it together at the end."""

from __future__ import annotations

import resource
import sys
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.tensor import DTensor

from odb_lightning.batch import StepInfo
from odb_lightning.callbacks.figures import RankRecord, run_figures
from odb_lightning.callbacks.identities import IdentityAudit
from odb_lightning.callbacks.progress import dataset_size, step_loss
from odb_lightning.callbacks.ranks import gather_objects, reduce_array


class RunSummary(Callback):
    """After a fit, `figures` holds the figures of the run over all ranks, on every rank; `partial_figures()` gives those of
    this rank at any time, without a word to the others. Needs an ODB strategy, whose `step_info` it reads."""

    def __init__(self, l_max: int | None = None) -> None:
        self.l_max = l_max
        self.record = RankRecord()
        self.figures: dict[str, Any] = {}
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        """Called with what ended the fit early, before the Trainer cleans up."""
        self.val_loss_before: float | None = None
        self._padded = array("q")
        self._seconds = array("d")
        self._audit: IdentityAudit | None = None
        self._dropped_ids_seen = self._resumed_ids_seen = self._expected_before = 0
        self._facts: dict[str, Any] = {}
        self._loss_sum: torch.Tensor | float = 0.0
        self._loss_of_windows: tuple[torch.Tensor | float, float] = (0.0, 0.0)
        """Loss and weight of the accumulation windows of the epoch that have ended, which is what a checkpoint holds."""
        self._resumed_loss: tuple[float, float] | None = None
        self._clock_since: float | None = None
        self._batch_since = 0.0

    # -- clock: validation does not count

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock_since = time.perf_counter()
        self._audit = IdentityAudit(dataset_size(trainer))
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.strategy.root_device)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.val_loss_before = _metric(trainer, "val_loss")
        self.record.train_seconds = 0.0
        self._clock_since = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_clock()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock_since = time.perf_counter()

    def _stop_clock(self) -> None:
        if self._clock_since is not None:
            self.record.train_seconds += time.perf_counter() - self._clock_since
            self._clock_since = None

    # -- counting

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine = getattr(trainer.strategy, "deepspeed_engine", None)
        parameters = [p for p in pl_module.parameters() if p.requires_grad]
        if self._resumed_loss is not None and trainer.is_global_zero:
            self._loss_sum, self.record.loss_weight = self._loss_of_windows = self._resumed_loss
        self._facts = {
            "world_size": trainer.world_size,
            "zero_stage": engine.zero_optimization_stage() if engine is not None else None,
            "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
        }

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loss_sum, self.record.loss_weight = self._loss_of_windows = (0.0, 0.0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch_since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._seconds.append(time.perf_counter() - self._batch_since)
        info = getattr(trainer.strategy, "step_info", None)
        if info is None:
            name = type(trainer.strategy).__name__
            raise RuntimeError(f"RunSummary needs an ODB strategy, whose step_info it reads; this is {name}")
        record = self.record
        record.steps += 1
        self._padded.append(info.num_tokens_padded)
        if info.is_idle:
            record.idle_steps += 1
        else:
            self._count(trainer, outputs, info)
        if (info.step + 1) % info.accumulate == 0:
            self._loss_of_windows = (self._loss_sum, record.loss_weight)

    def _count(self, trainer: Trainer, outputs: Any, info: StepInfo) -> None:
        record = self.record
        record.samples += info.num_samples
        record.tokens_real += info.num_tokens_real
        record.tokens_padded += info.num_tokens_padded
        record.tokens_supervised += info.num_tokens_supervised
        record.shapes.add((info.num_samples, info.max_length))
        assert self._audit is not None
        self._audit.emitted(info.sample_ids)
        loss = step_loss(trainer, outputs)
        if loss is not None and info.num_tokens_supervised:
            # Kept on the device: reading it here would make the host wait in each step.
            self._loss_sum = self._loss_sum + loss.double() * info.num_tokens_supervised
            record.loss_weight += info.num_tokens_supervised

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._audit is not None
        stats = _loader_stats(trainer)
        dropped = list(getattr(stats, "dropped_ids", ()))
        self._audit.dropped(dropped[self._dropped_ids_seen :])
        self._dropped_ids_seen = len(dropped)
        resumed = list(getattr(stats, "resumed_ids", ()))
        self._audit.done_before(resumed[self._resumed_ids_seen :])
        self._resumed_ids_seen = len(resumed)
        expected = getattr(stats, "views_expected", 0)
        all_expected = sum(gather_objects(expected - self._expected_before))
        self._expected_before = expected
        self._audit.close_epoch(lambda counts: reduce_array(trainer, counts), gather_objects, all_expected)

    # -- a checkpoint inside an epoch

    def state_dict(self) -> dict[str, Any]:
        """The loss of the epoch so far. Each rank must call it."""
        parts = gather_objects([float(part) for part in self._loss_of_windows])
        return {name: sum(part) for name, part in zip(("loss_sum", "loss_weight"), zip(*parts, strict=True), strict=True)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed_loss = (state_dict["loss_sum"], state_dict["loss_weight"])

    # -- the end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_failure(exception)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_clock()
        self._finish_record(trainer)
        records = gather_objects(self.record)
        padded = reduce_array(trainer, np.frombuffer(self._padded, dtype=np.int64).copy(), "max")
        seconds = reduce_array(trainer, np.frombuffer(self._seconds, dtype=np.float64).copy(), "max")
        self.figures = self._compose(trainer, run_figures(records, padded.tolist(), seconds.tolist(), self.l_max))

    def partial_figures(self, trainer: Trainer) -> dict[str, Any]:
        """The figures of this rank alone, for a run that did not come to its end."""
        if self._clock_since is not None:
            self._stop_clock()
        self._finish_record(trainer)
        return self._compose(trainer, run_figures([self.record], self._padded.tolist(), self._seconds.tolist(), self.l_max))

    def _finish_record(self, trainer: Trainer) -> None:
        record, stats = self.record, _loader_stats(trainer)
        record.loss_sum = float(self._loss_sum)
        record.peak_memory_bytes = _peak_memory_bytes(trainer.strategy.root_device)
        record.optimizer_state_elements = _optimizer_state_elements(trainer)
        if stats is None:
            return
        record.samples_expected = stats.views_expected
        record.wait_seconds = stats.wait_seconds
        record.rounds, record.exchange_seconds = stats.rounds, stats.exchange_seconds
        record.outstanding_depth, record.over_budget = stats.outstanding_depth, stats.over_budget
        record.batches_without_targets = stats.batches_without_targets
        record.dropped = dict(stats.dropped)
        record.length_sum, record.length_sum_squares = stats.length_sum, stats.length_sum_squares
        record.length_short, record.lengths = stats.length_short, stats.length_count

    def _compose(self, trainer: Trainer, figures: Mapping[str, Any]) -> dict[str, Any]:
        audit = self._audit
        audited = audit is not None and audit.epochs > 0
        return {
            "world_size": trainer.world_size,
            "zero_stage": None,
            **self._facts,
            "l_max": self.l_max,
            "epochs": audit.epochs if audit is not None else 0,
            "updates": trainer.strategy.num_updates,  # type: ignore[attr-defined]
            **figures,
            "identities_missing": audit.missing if audited and audit is not None else None,
            "identities_repeated": audit.repeated if audited and audit is not None else None,
            "val_loss": _metric(trainer, "val_loss"),
            "val_loss_before": self.val_loss_before,
        }


def _metric(trainer: Trainer, name: str) -> float | None:
    value = trainer.callback_metrics.get(name)
    return None if value is None else float(value)


def _loader_stats(trainer: Trainer) -> Any:
    loader = getattr(trainer.datamodule, "train_loader", None)  # type: ignore[attr-defined]
    return getattr(loader, "stats", None)


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _optimizer_state_elements(trainer: Trainer) -> int:
    """Elements of the optimizer's state that this rank holds; step counters are not counted."""
    count = 0
    for optimizer in trainer.strategy.optimizers:
        inner = getattr(optimizer, "optimizer", optimizer)  # DeepSpeed wraps the user's
        for state in inner.state.values():
            held = (value.to_local() if isinstance(value, DTensor) else value for value in state.values())
            count += sum(value.numel() for value in held if isinstance(value, torch.Tensor) and value.dim())
    return count
