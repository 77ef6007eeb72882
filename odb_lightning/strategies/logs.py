"""What ranks log, weighed by whether they have something to log.

Puts a function in the place of `update_metrics` of Lightning's result collection (`trainer._results`), which has no public
counterpart; `tests/traps` holds what this relies on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed import ReduceOp

from odb_lightning.batch import LossScaling, StepInfo


class WeighsLogs(Strategy):
    """From the transfer of a batch to the end of `on_train_batch_end`, what an idle rank logs has weight zero; and so has what
    is not finite of a batch without targets, as the mean over none is NaN. With `sync_dist` each rank has to log alike."""

    loss_scaling: LossScaling
    step_info: StepInfo | None
    val_step_info: StepInfo | None
    _trainer: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reducing_in: StepInfo | None = None
        """The step whose idle ranks take no part in reductions."""

    @property
    def _current_info(self) -> StepInfo | None:
        """Of the batch in the loop that runs."""
        return self.step_info if self._trainer.training else self.val_step_info

    @property
    def _progress(self) -> Any:
        """Of the batches in the loop that runs."""
        trainer = self._trainer
        return trainer.fit_loop.epoch_loop.batch_progress if trainer.training else trainer._active_loop.batch_progress

    @property
    def _is_in_batch(self) -> bool:
        """Whether a batch was transferred and its last hook has not ended."""
        now = self._progress.current
        return now.ready > now.completed and now.processed <= now.started  # where on_train_batch_start skips, nothing ends

    @contextmanager
    def _in_step(self, info: StepInfo | None) -> Iterator[None]:
        before, self._reducing_in = self._reducing_in, info
        try:
            yield
        finally:
            self._reducing_in = before

    def _weigh_logs(self) -> None:
        results = self._trainer._results
        if results is not None:
            results.update_metrics = partial(self._update_logged, results)

    def _update_logged(self, results: Any, key: str, value: Any, batch_size: int) -> None:
        """In the place of the collection's method, for what `self.log` is given."""
        entry, update = results[key], partial(type(results).update_metrics, results, key, value, batch_size)
        info = self._current_info
        if info is None or not entry.is_tensor or not self._is_in_batch:
            update()
            return
        before = {name: getattr(entry, name) for name in entry._defaults}
        step_value = entry._forward_cache
        with self._in_step(info):
            update()
        if not self._has_weight(info, value):
            for name, state in before.items():
                setattr(entry, name, state)
            if info.is_idle and not entry.meta.sync.should:
                # Where there is none before, not nothing: what ranks log has to be the same for callbacks that look for it.
                entry._forward_cache = (
                    torch.full_like(value, float("nan"), dtype=torch.float32) if step_value is None else step_value
                )

    def _has_weight(self, info: StepInfo, value: Tensor) -> bool:
        if info.is_idle:
            return False
        has_target = self.loss_scaling != "token" or bool(info.num_tokens_supervised)
        return has_target or not value.is_floating_point() or bool(value.isfinite().all())

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Inside a step, the reduction over the ranks whose value has weight; else as ever."""
        operation = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        is_mean = operation in ("mean", "avg", ReduceOp.AVG, None)
        if is_mean and isinstance(tensor, Tensor) and not tensor.is_floating_point():
            tensor = tensor.double()  # the mean of integers is truncated; Lightning's counts of samples are integers
        info = self._reducing_in
        if info is None or info.world_size == 1 or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]
        has_weight = self._has_weight(info, tensor)
        if not has_weight:
            tensor = _neutral(operation, tensor)
        if not is_mean:
            return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]
        # In one collective with their number, which no rank knows: another's value may be without weight, or in another group.
        row = torch.cat([tensor.flatten(), tensor.new_tensor([float(has_weight)])])
        row = row if row.dtype == torch.float64 else row.float()
        total = super().reduce(row, group, "sum")  # type: ignore[safe-super]
        return (total[:-1] / total[-1]).view_as(tensor).to(tensor.dtype)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Of all ranks, idle or not."""
        with self._in_step(None):
            return super().reduce_boolean_decision(decision, all)


def _neutral(operation: Any, tensor: Tensor) -> Tensor:
    """What leaves the reduction as it is."""
    if operation in ("product", ReduceOp.PRODUCT):
        return torch.ones_like(tensor)
    if operation in ("band", ReduceOp.BAND):
        return torch.zeros_like(tensor).bitwise_not()
    if operation in ("max", ReduceOp.MAX):
        return torch.full_like(tensor, _bounds(tensor)[0])
    if operation in ("min", ReduceOp.MIN):
        return torch.full_like(tensor, _bounds(tensor)[1])
    return torch.zeros_like(tensor)


def _bounds(tensor: Tensor) -> tuple[float, float]:
    if tensor.is_floating_point():
        return float("-inf"), float("inf")
    if tensor.dtype == torch.bool:
        return False, True
    return torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max
