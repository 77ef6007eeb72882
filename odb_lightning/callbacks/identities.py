"""The identity audit: was each sample of the data set trained exactly once in an epoch, over all ranks?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np

GatherObjects = Callable[[Any], list[Any]]
SumArray = Callable[[np.ndarray], np.ndarray]


class IdentityAudit:
    """Counts of identities, closed once an epoch; `missing` and `repeated` add up over the epochs closed.

    `size` is the number of samples of the data set if its identities are 0 to size - 1, else None: then what no rank saw
    is unknown, and `missing` counts what was expected but not seen.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.missing = 0
        """Neither emitted nor dropped by a policy."""
        self.repeated = 0
        """Emissions beyond the first of an identity within an epoch."""
        self.epochs = 0
        self._start_epoch()

    def _start_epoch(self) -> None:
        self._emitted = np.zeros(self.size or 0, dtype=np.int64)
        self._dropped = np.zeros(self.size or 0, dtype=np.int64)
        self._done = np.zeros(self.size or 0, dtype=np.int64)
        self._others: Counter[Hashable] = Counter()
        self._others_dropped: set[Hashable] = set()
        self._others_done: set[Hashable] = set()

    def emitted(self, sample_ids: Iterable[Hashable]) -> None:
        """Note the samples of a trained batch."""
        for sample_id in sample_ids:
            index = self._index(sample_id)
            if index is None:
                self._others[sample_id] += 1
            else:
                self._emitted[index] += 1

    def dropped(self, sample_ids: Iterable[Hashable]) -> None:
        """Note samples that a policy left out."""
        for sample_id in sample_ids:
            index = self._index(sample_id)
            if index is None:
                self._others_dropped.add(sample_id)
            else:
                self._dropped[index] += 1

    def done_before(self, sample_ids: Iterable[Hashable]) -> None:
        """Note samples that a run before this one was done with in the epoch, trained or left out; ranks may name the same."""
        for sample_id in sample_ids:
            index = self._index(sample_id)
            if index is None:
                self._others_done.add(sample_id)
            else:
                self._done[index] = 1

    def close_epoch(self, sum_array: SumArray, gather: GatherObjects, expected: int | None = None) -> None:
        """Reduce over the ranks and start anew. Each rank must call it; `expected`: the views that were left of the epoch when
        this run began it, all ranks."""
        emitted, dropped, done = sum_array(self._emitted), sum_array(self._dropped), sum_array(self._done) > 0
        others: Counter[Hashable] = Counter()
        others_dropped: set[Hashable] = set()
        others_done: set[Hashable] = set()
        for counts, dropped_ids, done_ids in gather((self._others, self._others_dropped, self._others_done)):
            others.update(counts)
            others_dropped |= dropped_ids
            others_done |= done_ids
        others.update(others_done)
        if self.size is not None:
            self.missing += int(((emitted == 0) & (dropped == 0) & ~done).sum())
        elif expected is not None:
            self.missing += max(expected + len(others_done) - len(others.keys() | others_dropped), 0)
        self.repeated += int(np.maximum(emitted + done - 1, 0).sum()) + sum(count - 1 for count in others.values())
        self.epochs += 1
        self._start_epoch()

    def _index(self, sample_id: Hashable) -> int | None:
        """The position in the data set that `sample_id` is, or None."""
        is_integer = isinstance(sample_id, (int, np.integer)) and not isinstance(sample_id, bool)
        return int(sample_id) if is_integer and self.size is not None and 0 <= sample_id < self.size else None  # type: ignore[operator, call-overload]
