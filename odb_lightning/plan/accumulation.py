"""Totals of whole accumulation windows, known before the first micro-batch of a window is handed over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class SummedStep(Generic[T]):
    """A step with its sums over all ranks, and those of its accumulation window."""

    item: T
    global_targets: float
    global_samples: int
    window_targets: float
    window_samples: int


class AccumulationWindows(Generic[T]):
    """Holds back the steps of an incomplete window: at most `accumulate - 1` of them.

    A window is `accumulate` consecutive steps counted from the beginning of the epoch, and ends early at step
    `max_steps` (when the trainer ends the epoch there), at the step that reaches the `quota` of samples over all ranks, or at
    the end of the epoch (`flush`).
    """

    def __init__(
        self,
        accumulate: int,
        max_steps: int | None = None,
        quota: int | None = None,
        *,
        num_steps: int = 0,
        num_samples: int = 0,
    ) -> None:
        """`num_steps` and `num_samples` were before; no window goes over from there."""
        self.accumulate = accumulate
        self.max_steps = max_steps
        self.quota = quota
        self.num_steps = num_steps
        self.num_samples = num_samples
        self._pending: list[tuple[T, float, int]] = []

    @property
    def is_full(self) -> bool:
        """The epoch has all the steps it may have, or all the samples it is to have."""
        has_steps = self.max_steps is not None and self.num_steps >= self.max_steps
        return has_steps or (self.quota is not None and self.num_samples >= self.quota)

    def add(self, item: T, targets: float, samples: int) -> list[SummedStep[T]]:
        """The steps released by one more step, whose sums over all ranks are given: none, or a whole window."""
        self._pending.append((item, targets, samples))
        self.num_steps += 1
        self.num_samples += samples
        return self.flush() if self.num_steps % self.accumulate == 0 or self.is_full else []

    def flush(self) -> list[SummedStep[T]]:
        """The steps held back, as a window of their own."""
        steps, self._pending = self._pending, []
        targets = sum(step[1] for step in steps)
        samples = sum(step[2] for step in steps)
        return [SummedStep(*step, targets, samples) for step in steps]


def exchange_blocks(num_steps: int, accumulate: int, at_least: int = 16) -> Iterator[int]:
    """Sizes of the blocks in which `num_steps` steps are collated and their sums exchanged: one exchange for many steps, but
    no need to collate a whole round before its first batch. A function of numbers that all ranks share."""
    block = accumulate * -(-at_least // accumulate)
    while num_steps > 0:
        yield min(block, num_steps)
        num_steps -= block
