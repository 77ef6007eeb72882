"""The bytes of samples from a worker to the collate process, past the queue: only what describes them goes through it."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import numpy as np

from odb_lightning.runtime.ring import SharedMemory

_ALIGN = 64
_SLAB_BYTES, _SMALLEST_SLAB_BYTES = 2**30, 2**24
"""Of address space, per worker: memory is used up to the most that was under way at once."""

_slabs: Slabs | None = None
"""In the collate process, those of its workers."""


class Slabs:
    """One slab for each worker, in one piece of memory; can be handed to workers at their start."""

    def __init__(self, num_workers: int, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self._num_workers = num_workers
        self._memory = SharedMemory(num_workers * (slab_bytes + _ALIGN))

    def array(self, index: int) -> np.ndarray[Any, Any]:
        """The bytes of one worker's."""
        start = self._num_workers * _ALIGN + index * self.slab_bytes
        return self._memory.array[start : start + self.slab_bytes]

    def taken(self, index: int) -> np.ndarray[Any, Any]:
        """One number: up to which of its messages the collate process has taken out."""
        return self._memory.array[index * _ALIGN : index * _ALIGN + 8].view(np.int64)


def make_slabs(num_workers: int) -> Slabs | None:
    """Those of the workers of this process, which takes out of them what arrives. None where there is no room for them (a limit
    on address space or on the size of files): then everything goes through the queue."""
    global _slabs
    _slabs, size = None, _SLAB_BYTES
    # Without memfd the memory would be a file on a disk, which may be full.
    while _slabs is None and num_workers > 0 and hasattr(os, "memfd_create") and size >= min(_SMALLEST_SLAB_BYTES, _SLAB_BYTES):
        try:
            _slabs = Slabs(num_workers, size)
        except (OSError, ValueError, OverflowError):
            size //= 4
    return _slabs


class _InSlab(np.ndarray[Any, Any]):
    """Bytes in a slab. When pickled, their place is; the receiver copies them out and so gives it back."""

    place: tuple[int, int, int]

    def __reduce__(self) -> Any:
        return _take_out, (*self.place, self.nbytes)


def _take_out(index: int, offset: int, number: int, size: int) -> np.ndarray[Any, Any]:
    assert _slabs is not None
    taken = _slabs.array(index)[offset : offset + size].copy()
    _slabs.taken(index)[0] = number
    return taken


class Slab:
    """A worker's end: a ring, whose places are given back in the order in which they were taken."""

    def __init__(self, slabs: Slabs, index: int) -> None:
        self._array = slabs.array(index)
        self._taken = slabs.taken(index)
        self._index = index
        self._in_flight: deque[tuple[int, int, int]] = deque()
        """Number, start and end; numbers go on where those of a worker before this one ended."""
        self._number = int(self._taken[0])
        self._head = 0
        self._used = 0
        """Ends of places so far: rather than beyond, the next one is looked for at the beginning."""

    def new_bytes(self, size: int) -> np.ndarray[Any, Any]:
        """Room for so many bytes: in the slab, or elsewhere while that is full."""
        start = self._free_start(size) if size else None
        if start is None:
            return np.empty(size, dtype=np.uint8)
        self._head = start + -(-size // _ALIGN) * _ALIGN
        self._used = max(self._used, self._head)
        self._number += 1
        self._in_flight.append((self._number, start, self._head))
        place: _InSlab = self._array[start : start + size].view(_InSlab)
        place.place = self._index, start, self._number
        return place

    def _free_start(self, size: int) -> int | None:
        taken = int(self._taken[0])
        while self._in_flight and self._in_flight[0][0] <= taken:
            self._in_flight.popleft()
        if not self._in_flight:
            return 0 if size <= self._array.size else None
        tail = self._in_flight[0][1]
        if self._head <= tail:  # it has begun again at the beginning
            return self._head if self._head + size <= tail else None
        if self._head + size <= self._used:
            return self._head
        if size <= tail:
            return 0
        return self._head if self._head + size <= self._array.size else None
