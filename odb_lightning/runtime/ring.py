"""Batches from the collate process to the training process through shared memory that leaves nothing behind."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pickle
import select
import tempfile
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch

from odb_lightning.runtime.codec import decode, encode

_ALIGN = 64
_NUM_COUNTERS = 3
_COUNTER_BYTES = 8 * _NUM_COUNTERS
_POLL_SECONDS = 1.0


def _do_nothing() -> None:
    pass


class SharedMemory:
    """Anonymous shared memory: no name in the file system, so nothing to unlink and not limited by the size of /dev/shm.

    Can be handed to a child process at its start under any start method.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("odb-ring")
        else:
            with tempfile.TemporaryFile() as file:
                self._fd = os.dup(file.fileno())
        os.ftruncate(self._fd, self._whole_size)
        self._map()

    def _map(self) -> None:
        everything = np.frombuffer(mmap.mmap(self._fd, self._whole_size), dtype=np.uint8)
        self.array = everything[: self.size]
        self.progress, self.taken, self.is_awaited = everything[-_COUNTER_BYTES:].view(np.int64).reshape(_NUM_COUNTERS, 1)
        """Numbers that both sides see: what the collate process got done; messages that the training process has taken, and
        whether the collate process waits to be told of the next."""

    @property
    def _whole_size(self) -> int:
        return -(-self.size // 8) * 8 + _COUNTER_BYTES

    def __getstate__(self) -> dict[str, Any]:
        return {"size": self.size, "fd": DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.size = state["size"]
        self._fd = state["fd"].detach()
        self._map()

    def close(self) -> None:
        """Gives the descriptor back; the memory goes when nobody maps it any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Readiness:
    """Whether a connection has something to read. As `Connection.poll`, which makes a selector at each call."""

    def __init__(self, connection: Connection) -> None:
        self._poller = select.poll()
        self._poller.register(connection.fileno(), select.POLLIN)

    def within(self, seconds: float = 0.0) -> bool:
        """Waits for so long; also true when the other end is closed."""
        return bool(self._poller.poll(math.ceil(1000 * seconds)))


class BatchSender:
    """The collate process's end. Holds at most `depth` messages that the training process has not taken yet.

    What was taken is counted in the memory, where to look costs nothing; a word through the pipe comes only if waited for.
    """

    def __init__(self, connection: Connection, memory: SharedMemory, depth: int) -> None:
        self._connection = connection
        self._word = Readiness(connection)
        self._memory = memory
        self._depth = depth
        self.while_waiting: Callable[[], None] = _do_nothing
        """Called now and then while the training process is behind."""
        self._in_flight: deque[tuple[int, int]] = deque()
        self._num_taken = 0
        self._head = 0
        self._used = 0
        """Ends of messages so far: rather than beyond, in memory not used yet, the next one begins at the beginning."""

    def send(self, kind: str, facts: Any, payload: Any = None) -> None:
        """Hands over a message; waits while the training process is `depth` messages behind or the memory is full."""
        encoded = encode(payload)
        sizes = [buffer.nbytes for buffer in encoded.buffers]
        total = sum(-(-size // _ALIGN) * _ALIGN for size in sizes)
        start = self._allocate(total) if total <= self._memory.size // 2 else None
        if start is not None:
            offset = start
            for buffer in encoded.buffers:
                self._memory.array[offset : offset + buffer.nbytes] = buffer
                offset += -(-buffer.nbytes // _ALIGN) * _ALIGN
        else:
            self._allocate(0)
        self._connection.send_bytes(pickle.dumps((kind, facts, encoded.header, sizes, start), protocol=5))
        if start is None:
            for buffer in encoded.buffers:
                self._connection.send_bytes(buffer.data)

    def _allocate(self, size: int) -> int:
        """The start of `size` free bytes, in the order of a ring; registers them as in flight."""
        if (start := self._free_start(size)) is None:
            self._memory.is_awaited[0] = 1
            while (start := self._free_start(size)) is None:
                # No limit: a training process that is gone ends this one (see guard.py), one that is alive may validate for
                # hours. Nor is anything lost with a word that was not sent, as both looked at the same time: see `_free_start`.
                if self._word.within(_POLL_SECONDS):
                    self._connection.recv_bytes()
                else:
                    self.while_waiting()
            self._memory.is_awaited[0] = 0
        self._in_flight.append((start, size))
        self._head = start + size
        self._used = max(self._used, self._head)
        return start

    def _free_start(self, size: int) -> int | None:
        taken = int(self._memory.taken[0])
        while self._num_taken < taken:
            self._in_flight.popleft()
            self._num_taken += 1
        if len(self._in_flight) >= self._depth:
            return None
        occupied = [(start, length) for start, length in self._in_flight if length]
        if not occupied:
            return 0
        tail = occupied[0][0]
        if self._head <= tail:
            return self._head if self._head + size < tail else None
        if self._head + size <= self._used:
            return self._head
        if size < tail:
            return 0
        return self._head if self._head + size <= self._memory.size else None


class BatchReceiver:
    """The training process's end."""

    def __init__(self, connection: Connection, memory: SharedMemory, pin_memory: bool) -> None:
        self._connection = connection
        self._memory = memory
        self._pin_memory = pin_memory and torch.cuda.is_available()

    def receive(self) -> tuple[str, Any, Any]:
        """The next message (kind, facts, payload), copied out of the shared memory, whose space is given back."""
        kind, facts, header, sizes, start = pickle.loads(self._connection.recv_bytes())
        buffers = [self._new_buffer(size) for size in sizes]
        if start is None:
            for buffer in buffers:
                self._connection.recv_bytes_into(buffer.data)
        else:
            for buffer in buffers:
                np.copyto(buffer, self._memory.array[start : start + buffer.nbytes])
                start += -(-buffer.nbytes // _ALIGN) * _ALIGN
        self._memory.taken[0] += 1
        if self._memory.is_awaited[0]:
            with contextlib.suppress(ConnectionError):  # a process that has ended needs no space
                self._connection.send_bytes(b"t")
        return kind, facts, decode(header, buffers)

    def _new_buffer(self, size: int) -> np.ndarray[Any, Any]:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin_memory).numpy()
