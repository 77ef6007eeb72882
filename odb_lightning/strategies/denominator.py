"""What the loss of an update is a mean over, found by the strategy itself, for loaders that do not know it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from odb_lightning.batch import ODBBatch, StepInfo
from odb_lightning.runtime.counting import DEFAULT_RULE, NumSupervised, TargetCounter, labels_of

_HEADER = ("epoch", "first step", "number of batches", "steps of an epoch")


class WindowCounts:
    """Counts the batches of any loader by `num_supervised_fn`, an accumulation window at a time, and sums over ranks.

    A window's batches are drawn from the loader before its first is handed on, so the counts of the whole window are known
    before any backward. They are exchanged once per window, over a Gloo group of their own: in the order of steps, which is
    the same on all ranks, and apart from the collectives of the training. All ranks have to make the same steps: that they do
    is checked on the way.
    """

    def __init__(self, rule: NumSupervised) -> None:
        self.has_rule = rule is not DEFAULT_RULE
        self._counter = TargetCounter(rule)
        self._group: Any = None

    def batches(
        self, loader: Iterable[Any], *, epoch: int, first_step: int, accumulate: int, limit: float, timeout: timedelta | None
    ) -> Iterator[ODBBatch]:
        """The loader's batches with their `StepInfo`, from `first_step` of the epoch to its end or `limit` steps.

        What a foreign loader does not tell (sample ids, lengths) is empty or 0. Raises RuntimeError where ranks differ.
        """
        source, step = iter(loader), first_step
        while step < limit:
            size = int(min(accumulate - step % accumulate, limit - step))
            window = [self._counted(batch, epoch, step + offset) for offset, batch in enumerate(islice(source, size))]
            infos = self._sums([batch.step for batch in window], epoch, step, accumulate, limit, timeout)
            if not window:
                return
            for batch, info in zip(window, infos, strict=True):
                yield ODBBatch(batch.data, info)
            step += len(window)

    def close(self) -> None:
        """Ends the group, if there is one."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _counted(self, batch: Any, epoch: int, step: int) -> ODBBatch:
        if isinstance(batch, ODBBatch):
            return ODBBatch(batch.data, replace(batch.step, epoch=epoch, step=step))
        num_samples = _num_samples(batch)
        num_targets = self._counter.of_batch(batch, num_samples)
        for warning in self._counter.take_warnings():
            rank_zero_warn(warning)
        return ODBBatch(
            batch,
            StepInfo(
                epoch=epoch,
                step=step,
                is_idle=False,
                sample_ids=(),
                num_samples=num_samples,
                num_tokens_real=0,
                num_tokens_padded=0,
                num_tokens_supervised=num_targets,
                max_length=0,
                global_num_samples=num_samples,
                global_num_tokens_supervised=num_targets,
                window_num_tokens_supervised=num_targets,
                window_num_samples=num_samples,
            ),
        )

    def _sums(
        self, infos: list[StepInfo], epoch: int, step: int, accumulate: int, limit: float, timeout: timedelta | None
    ) -> list[StepInfo]:
        """The same with what is summed over ranks and over the window."""
        counts = torch.zeros(2, accumulate, dtype=torch.float64)
        for position, info in enumerate(infos):
            counts[:, position] = torch.tensor([info.num_tokens_supervised, info.num_samples], dtype=torch.float64)
        header = torch.tensor([epoch, step, len(infos), limit], dtype=torch.float64)
        rows = self._gathered(torch.cat([header, counts.flatten()]), timeout)
        _check_equal(rows[:, : len(_HEADER)])
        tokens, samples = rows[:, len(_HEADER) :].view(len(rows), 2, accumulate).sum(dim=0)
        return [
            replace(
                info,
                global_num_tokens_supervised=_number(tokens[position]),
                global_num_samples=int(samples[position]),
                window_num_tokens_supervised=_number(tokens.sum()),
                window_num_samples=int(samples.sum()),
                num_active_ranks=len(rows),
                world_size=len(rows),
                accumulate=accumulate,
            )
            for position, info in enumerate(infos)
        ]

    def _gathered(self, row: torch.Tensor, timeout: timedelta | None) -> torch.Tensor:
        """The row of each rank."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return row[None]
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        try:
            dist.all_gather(rows, row, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                "a rank took no part in counting the targets of an accumulation window: it has failed, or its training loader "
                "has ended before those of the others. " + _MEND
            ) from error
        return torch.stack(rows)


_MEND = (
    'denominator="strategy" needs the same number of steps on every rank, which is up to the training loader: let all ranks '
    "draw equally many batches (drop_last, limit_train_batches), or use an ODBDataLoader, which sees to it"
)


def _check_equal(headers: torch.Tensor) -> None:
    for name, values in zip(_HEADER, headers.T.tolist(), strict=True):
        if len(set(values)) > 1:
            listed = ", ".join(f"{value:.0f}" for value in values)
            raise RuntimeError(f"the training loaders of the ranks differ: {name} by rank: {listed}. {_MEND}")


def _number(value: torch.Tensor) -> int | float:
    number = float(value)
    return int(number) if number.is_integer() else number


def _num_samples(batch: Any) -> int:
    """Rows of the labels, else of the first tensor."""
    labels = labels_of(batch)
    if labels is not None:
        return len(labels)
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:
        raise ValueError(
            f'denominator="strategy" found no tensor in a training batch of type {type(batch).__name__}, so how many samples '
            "it has is not known: let the loader's collate_fn return tensors"
        ) from None
