"""A few integers per round between the collate processes of all ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from odb_lightning.runtime.errors import Failure, PeerFailure
from odb_lightning.runtime.settings import StoreAddress, Timeouts

_FAILURE_GRACE_SECONDS = 2.0
_SHORTEST_PAUSE_SECONDS = 50e-6
_LONGEST_PAUSE_SECONDS = 5e-3
_BEAT_SECONDS = 1.0
_FORM_SECONDS = 60.0
_NO_LIMIT = timedelta(days=365)
"""Of Gloo's own; `_wait` has the limit."""
_WORKER_DIED = "DataLoader worker"
"""In the RuntimeError that torch's signal handler raises wherever the main thread is."""


class Exchange(Protocol):
    """Every rank makes the same sequence of calls."""

    rank: int
    world_size: int
    seconds: float
    """Time spent in exchanges so far."""

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """The elementwise maximum over all ranks."""

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """The elementwise sum over all ranks, in float64: exact for integers below 2^53."""

    def broadcast(self, payload: bytes | None, source: int) -> bytes:
        """The payload of rank `source`, on all ranks."""

    def publish(self, failure: Failure) -> None:
        """Leaves this rank's failure where peers can read it."""

    def peer_failure(self) -> PeerFailure:
        """What a peer that gave a stop code, or is gone, published."""

    def beat(self) -> None:
        """Tells the peers that this rank waits for its own training process."""

    def close(self) -> None:
        """Leaves the group; peers that still wait for this rank fail at once."""


class SoloExchange:
    """A single rank's exchange with itself."""

    rank = 0
    world_size = 1
    seconds = 0.0

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def broadcast(self, payload: bytes | None, source: int) -> bytes:
        raise AssertionError("a single rank has no peer")

    def publish(self, failure: Failure) -> None:
        pass

    def peer_failure(self) -> PeerFailure:
        raise AssertionError("a single rank has no peer")

    def beat(self) -> None:
        pass

    def close(self) -> None:
        pass


class GlooExchange:
    """Reductions on a Gloo group of its own, apart from the training's, met through the store of the job."""

    def __init__(self, address: StoreAddress, rank: int, world_size: int, timeouts: Timeouts) -> None:
        self.rank = rank
        self.world_size = world_size
        self.seconds = 0.0
        self._timeout = timeouts.exchange
        setup = timedelta(seconds=timeouts.setup)
        base = (
            dist.FileStore(address.path, world_size)
            if address.path is not None
            else dist.TCPStore(address.host or "", address.port or 0, is_master=False, wait_for_workers=False, timeout=setup)
        )
        self._store = dist.PrefixStore(address.prefix, base)
        self._setup = timeouts.setup
        self._group: Any = None
        self._num_beats, self._last_beat = 0, 0.0
        self._beats_seen: list[bytes | None] = []

    def meet(self) -> None:
        """Forms the group with the peers' collate processes. Raises PeerFailure if one failed before, or does not come."""
        self._store.set(f"ready/{self.rank}", "1")
        everyone = [f"ready/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + self._setup
        while not self._store.check(everyone):
            failure = self._published_failure()
            if failure is not None:
                raise failure
            if time.monotonic() > deadline:
                missing = [rank for rank in range(self.world_size) if not self._store.check([f"ready/{rank}"])]
                raise PeerFailure(
                    f"rank {self.rank} did not meet rank {', '.join(map(str, missing))} within "
                    f"Timeouts(setup={self._setup:.0f}) seconds: every rank has to iterate over the same loaders in "
                    "the same order"
                )
            time.sleep(_LONGEST_PAUSE_SECONDS)
        # All are there, so this takes no time; short, as it can't be interrupted if a peer fails just now.
        limit = timedelta(seconds=min(self._setup, _FORM_SECONDS))
        self._group = self._or_peer_failure(lambda: dist.ProcessGroupGloo(self._store, self.rank, self.world_size, limit))

    def beat(self) -> None:
        """Tells the peers that this rank waits for its own training process, so that they are patient with it."""
        if time.monotonic() - self._last_beat > _BEAT_SECONDS:
            self._num_beats, self._last_beat = self._num_beats + 1, time.monotonic()
            self._store.set(f"beat/{self.rank}", str(self._num_beats))

    def _a_peer_beat(self) -> bool:
        """Whether a peer did since this was last asked."""
        keys = [f"beat/{rank}" for rank in range(self.world_size) if rank != self.rank]
        beats = [self._store.get(key) if self._store.check([key]) else None for key in keys]
        before, self._beats_seen = self._beats_seen or [None] * len(keys), beats
        return beats != before

    def compare_knobs(self, knobs: dict[str, Any]) -> str | None:
        """What differs between this rank's knobs and rank 0's, in words; None if nothing does."""
        self._store.set(f"knobs/{self.rank}", json.dumps(knobs))
        first = json.loads(self._store.get("knobs/0"))
        differing = [
            f"{name} is {knobs[name]!r} on rank {self.rank} and {first[name]!r} on rank 0"
            for name in knobs
            if knobs[name] != first[name]
        ]
        return "; ".join(differing) or None

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        return self._all_reduce(torch.tensor(values, dtype=torch.int64), dist.ReduceOp.MAX)

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        return self._all_reduce(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.SUM)

    def _all_reduce(self, tensor: torch.Tensor, operation: Any) -> list[Any]:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        options.timeout = _NO_LIMIT
        self._wait(lambda: self._group.allreduce([tensor], options))
        return tensor.tolist()

    def broadcast(self, payload: bytes | None, source: int) -> bytes:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        options.timeout = _NO_LIMIT
        size = torch.tensor([len(payload or b"")])
        self._wait(lambda: self._group.broadcast([size], options))
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(int(size), dtype=torch.uint8)
        self._wait(lambda: self._group.broadcast([data], options))
        return data.numpy().tobytes()

    def _wait(self, start: Callable[[], Any]) -> None:
        begin, pause = time.perf_counter(), _SHORTEST_PAUSE_SECONDS
        expires = begin + self._timeout
        try:
            work = self._or_peer_failure(start)
            # Looked at in small pauses, not waited for in C++, so that a stop can interrupt it. What a signal handler raises
            # here (torch's, for a dead worker) is this rank's own failure.
            while not work.is_completed():
                if time.perf_counter() > expires:
                    if self._a_peer_beat():
                        expires = time.perf_counter() + self._timeout
                        continue
                    limit = f"Timeouts(exchange={self._timeout:.0f}) seconds"
                    raise self.peer_failure(f"that did not reach the next exchange within {limit}")
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)
            self._or_peer_failure(work.wait)
        finally:
            self.seconds += time.perf_counter() - begin

    def _or_peer_failure(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            if _WORKER_DIED in str(error):
                raise
            raise self.peer_failure(f"that closed its connection ({str(error).splitlines()[0]})") from error

    def publish(self, failure: Failure) -> None:
        self._store.set(f"failure/{self.rank}", failure.describe(self.rank))

    def peer_failure(self, circumstances: str = "") -> PeerFailure:
        deadline = time.monotonic() + _FAILURE_GRACE_SECONDS
        lost = f"lost a peer's collate process {circumstances}; the rank that ended first tells why"
        try:
            while time.monotonic() < deadline:
                failure = self._published_failure()
                if failure is not None:
                    return failure
                time.sleep(_LONGEST_PAUSE_SECONDS)
        except RuntimeError:
            lost += " (the store of the job is gone, too)"
        return PeerFailure(f"rank {self.rank} {lost}")

    def _published_failure(self) -> PeerFailure | None:
        for rank in range(self.world_size):
            if rank != self.rank and self._store.check([f"failure/{rank}"]):
                return PeerFailure(self._store.get(f"failure/{rank}").decode())
        return None

    def close(self) -> None:
        self._group = None
