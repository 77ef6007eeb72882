"""The bytes of samples from a worker to the collate process, past the queue: only what describes them goes through it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from odb_lightning.runtime.ring import SharedMemory

_ALIGN = 64
_SLAB_BYTES = 2**30
"""Of address space, per worker: memory is used for what is under way only."""

_slabs: Sequence[SharedMemory] = ()
"""In the collate process, those of its workers."""


def make_slabs(num_workers: int) -> list[SharedMemory]:
    """One for each worker of this process, which takes out of them what arrives."""
    global _slabs
    _slabs = [SharedMemory(_SLAB_BYTES) for _ in range(num_workers)]
    return list(_slabs)


class _InSlab(np.ndarray[Any, Any]):
    """Bytes in a slab. When pickled, their place is; the receiver copies them out and so gives it back."""

    place: tuple[int, int, int]

    def __reduce__(self) -> Any:
        return _take_out, (*self.place, self.nbytes)


def _take_out(index: int, offset: int, number: int, size: int) -> np.ndarray[Any, Any]:
    slab = _slabs[index]
    taken = slab.array[offset : offset + size].copy()
    slab.progress[0] = number
    return taken


class Slab:
    """A worker's end: a ring, whose places are given back in the order in which they were taken."""

    def __init__(self, memory: SharedMemory, index: int) -> None:
        self._memory = memory
        self._index = index
        self._in_flight: deque[tuple[int, int, int]] = deque()
        """Number, start and end; numbers go on where those of a worker before this one ended."""
        self._number = int(memory.progress[0])
        self._head = 0
        self._used = 0
        """Ends of places so far: rather than beyond, the next one is looked for at the beginning."""

    def new_bytes(self, size: int) -> np.ndarray[Any, Any]:
        """Room for so many bytes: in the slab, or elsewhere while that is full."""
        start = self._free_start(size)
        if start is None:
            return np.empty(size, dtype=np.uint8)
        self._head = start + -(-size // _ALIGN) * _ALIGN
        self._used = max(self._used, self._head)
        self._number += 1
        self._in_flight.append((self._number, start, self._head))
        place: _InSlab = self._memory.array[start : start + size].view(_InSlab)
        place.place = self._index, start, self._number
        return place

    def _free_start(self, size: int) -> int | None:
        taken = int(self._memory.progress[0])
        while self._in_flight and self._in_flight[0][0] <= taken:
            self._in_flight.popleft()
        if not self._in_flight:
            return 0 if size <= self._memory.size else None
        tail = self._in_flight[0][1]
        if self._head <= tail:  # it has begun again at the beginning
            return self._head if self._head + size <= tail else None
        if self._head + size <= self._used:
            return self._head
        if size <= tail:
            return 0
        return self._head if self._head + size <= self._memory.size else None
