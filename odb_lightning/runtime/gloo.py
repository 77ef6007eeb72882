"""The exchange between the collate processes of all ranks, over Gloo and the store of the job."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from odb_lightning.runtime.errors import Failure, PeerFailure
from odb_lightning.runtime.presence import Beacon, Peers, Presence
from odb_lightning.runtime.settings import StoreAddress, Timeouts
from odb_lightning.runtime.store import open_store, publish_failure, read_failure

_GRACE_BEATS = 3
"""Beats after which a peer whose connection was closed, and that has told no reason, counts as dead."""
_FORMING_BEATS = 10
"""The same while the group forms, when no rank does anything else."""
_SHORTEST_PAUSE_SECONDS = 50e-6
_LONGEST_PAUSE_SECONDS = 5e-3
_FINISH_SECONDS = 10.0
_BEAT_SECONDS = 1.0
_LOOK_SECONDS = 5.0
_NO_LIMIT = timedelta(days=365)
"""Of Gloo's own; `_wait` has the limit."""
_WORKER_DIED = "DataLoader worker"
"""In the RuntimeError that torch's signal handler raises wherever the main thread is."""


class GlooExchange:
    """Reductions on a Gloo group of its own, apart from the training's, met through the store of the job.

    A peer that is slow is waited for as long as it gets on: `Timeouts.exchange` runs anew with each sign of progress. One that
    is dead is noticed by its closed connection, at once, or by `Timeouts.peer` seconds without a sign of life.
    """

    def __init__(
        self,
        address: StoreAddress,
        rank: int,
        world_size: int,
        timeouts: Timeouts,
        presence: Presence,
        before: StoreAddress | None = None,
    ) -> None:
        """`before`: where the ranks met for the last epoch, in whose last batches a peer's training may still fail."""
        self.rank = rank
        self.world_size = world_size
        self.seconds = 0.0
        self.presence = presence
        self._timeouts = timeouts
        self._beat_seconds = min(_BEAT_SECONDS, timeouts.exchange / 4, timeouts.peer / 4)
        self._address = address
        with self._store_lost_is_a_peers_failure():
            self._store = open_store(address, timeouts.setup, f"exchange {rank}")
            self._peers = Peers(self._store, rank, world_size)
            # Not in the thread: workers may be forked meanwhile, and would inherit a lock on the look-up of names.
            beacons_store = open_store(address, timeouts.setup, f"beacon {rank}")
            self._beacon = Beacon(beacons_store, rank, presence, self._beat_seconds, partial(read_failure, rank=rank))
            self._store_before = None if before is None else open_store(before, timeouts.setup, f"exchange {rank}")
        self._group: Any = None
        self._work: Any = None
        """The operation under way."""
        self._has_finished = False

    def meet(self) -> None:
        """Forms the group with the peers' collate processes. Raises PeerFailure if one failed before, or does not come."""
        self.presence.note("meeting its peers")
        with self._store_lost_is_a_peers_failure():
            self._store.set(f"ready/{self.rank}", "1")
            self._await_keys({rank: f"ready/{rank}" for rank in range(self.world_size)})
        self.presence.note("forming the group")
        self._form_group(self._timeouts.setup)
        self.presence.note("comparing options")

    @contextlib.contextmanager
    def _store_lost_is_a_peers_failure(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if _WORKER_DIED in str(error):
                raise
            raise PeerFailure(
                f"rank {self.rank} lost the store of the job, which rank 0 holds where no launcher does ({_first_line(error)})"
            ) from error

    def _await_keys(self, keys: dict[int, str]) -> None:
        """Until each of these ranks has written its key. Looked at again and again, as the store's own wait can't be ended."""
        limit = self._timeouts.setup
        deadline = time.monotonic() + limit
        while not self._store.check(list(keys.values())):
            self._raise_published_failure()
            if self._store_before is not None:
                self._raise_published_failure(self._store_before)
            if time.monotonic() > deadline:
                missing = [rank for rank, key in keys.items() if not self._store.check([key])]
                here = [rank for rank in self._peers.present() if rank in missing]
                self._peers.look(here)
                raise PeerFailure(
                    f"rank {self.rank} did not meet {self._peers.describe(missing)} within Timeouts(setup={limit:.0f}) "
                    "seconds: every rank has to iterate over the same loaders in the same order"
                )
            time.sleep(_LONGEST_PAUSE_SECONDS)

    def _form_group(self, limit: float) -> None:
        """All are there, so this takes no time, unless one of them dies just now."""
        formed: list[Any] = []

        def form() -> None:
            try:
                seconds = timedelta(seconds=limit)
                formed.append(dist.ProcessGroupGloo(self._store, self.rank, self.world_size, seconds))
            except RuntimeError as error:
                formed.append(error)

        # In a thread, as it can't be interrupted.
        thread = threading.Thread(target=form, name="odb-meet", daemon=True)
        thread.start()
        thread.join(self._beat_seconds)
        if thread.is_alive():
            self._watch_forming(thread)
        if isinstance(formed[0], RuntimeError):
            raise self.peer_failure(_first_line(formed[0])) from formed[0]
        self._group = formed[0]

    def _watch_forming(self, thread: threading.Thread) -> None:
        # The usual connection waits for what the peers have to write.
        store = open_store(self._address, self._timeouts.setup, f"watch {self.rank}")
        watch = Peers(store, self.rank, self.world_size)
        while thread.is_alive():
            watch.look()
            dead = watch.stale(_FORMING_BEATS * self._beat_seconds)
            if dead:
                raise PeerFailure(f"rank {self.rank} lost {watch.describe(dead)}: no sign of life while the ranks met")
            self._raise_published_failure(store)
            thread.join(self._beat_seconds)

    def compare_knobs(self, knobs: dict[str, Any]) -> str | None:
        """What differs between this rank's knobs and rank 0's, in words; None if nothing does."""
        with self._store_lost_is_a_peers_failure():
            if self.rank == 0:
                self._store.set("knobs", json.dumps(knobs))
            self._await_keys({0: "knobs"})
            first = json.loads(self._store.get("knobs"))
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
        limit = self._timeouts.exchange
        look_every = min(_LOOK_SECONDS + self.world_size / 100, limit / 4, self._timeouts.peer / 4)
        expires, next_look = begin + limit, begin + look_every
        got_on: dict[int, int] | None = None
        self.presence.exchanges += 1
        phase = self.presence.phase
        self.presence.note("in an exchange")
        try:
            work = self._work = self._or_peer_failure(start)
            # Looked at in small pauses, not waited for in C++, so that a stop can interrupt it. What a signal handler raises
            # here (torch's, for a dead worker) is this rank's own failure.
            while not work.is_completed():
                now = time.perf_counter()
                if now > next_look:
                    progress = self._progress_of_the_late()
                    if got_on is not None and progress != got_on:
                        expires = now + limit
                        self.presence.on_progress()
                    got_on, next_look = progress, now + look_every
                if now > expires:
                    late = self._peers.describe(self._peers.behind(self.presence.exchanges)) or "a peer"
                    raise PeerFailure(
                        f"rank {self.rank} waited Timeouts(exchange={limit:.0f}) seconds for {late} to reach the next "
                        "exchange, without a sign of progress"
                    )
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)
            self._or_peer_failure(work.wait)
        finally:
            self.presence.note(phase)
            self.seconds += time.perf_counter() - begin

    def _progress_of_the_late(self) -> dict[int, int]:
        """Of each peer that has not reached this exchange. Raises PeerFailure for one that failed or is dead."""
        with self._store_lost_is_a_peers_failure():
            self._raise_published_failure()
            self._peers.look()
        dead = self._peers.stale(self._timeouts.peer)
        if dead:
            raise PeerFailure(
                f"rank {self.rank} lost {self._peers.describe(dead)}: no sign of life within "
                f"Timeouts(peer={self._timeouts.peer:.0f}) seconds"
            )
        return {rank: self._peers.seen[rank].progress for rank in self._peers.behind(self.presence.exchanges)}

    def _or_peer_failure(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            if _WORKER_DIED in str(error):
                raise
            raise self.peer_failure(_first_line(error)) from error

    def publish(self, failure: Failure) -> None:
        with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that held it
            publish_failure(self._store, self.rank, failure)

    def peer_failure(self, error: str = "no reason was given") -> PeerFailure:
        deadline = time.monotonic() + _GRACE_BEATS * self._beat_seconds
        try:
            self._peers.look()
            while time.monotonic() < deadline:
                self._raise_published_failure()
                time.sleep(10 * _LONGEST_PAUSE_SECONDS)
            self._peers.look()
        except PeerFailure as failure:
            return failure
        except RuntimeError as loss:
            if _WORKER_DIED in str(loss):
                raise
            if self._beacon.heard is not None:
                return PeerFailure(self._beacon.heard)
            error += "; the store of the job is gone, too, which rank 0 holds where no launcher does"
        # Those that noticed it as this rank did have come as far; the one that began it has not.
        behind = self._peers.behind(self.presence.exchanges) or list(self._peers.seen)
        left = [rank for rank in behind if rank in self._peers.left()]
        dead = [rank for rank in self._peers.stale((_GRACE_BEATS - 1) * self._beat_seconds) if rank in behind]
        if left and not dead:
            return PeerFailure(f"{self._peers.describe_left(left)}, so rank {self.rank} can't go on")
        who = self._peers.describe(dead) or (f"rank {1 - self.rank}" if self.world_size == 2 else "a peer")
        return PeerFailure(f"rank {self.rank} lost the collate process of {who} ({error})")

    def _raise_published_failure(self, store: Any = None) -> None:
        failure = read_failure(store or self._store, self.rank)
        if failure is not None:
            raise PeerFailure(failure)

    def finish(self) -> None:
        deadline = time.monotonic() + _FINISH_SECONDS
        with contextlib.suppress(RuntimeError):  # the store went with a rank that has finished: this one has, too
            num_finished = self._store.add("finished", 1)
            while num_finished < self.world_size and time.monotonic() < deadline:
                time.sleep(_LONGEST_PAUSE_SECONDS)
                num_finished = self._store.add("finished", 0)
        self._has_finished = True

    def leave(self) -> None:
        if self._has_finished:
            self._beacon.finish()
        else:
            self._beacon.stop()
        if self._work is not None and not self._work.is_completed():
            _abandoned.append(self._group)
        self._group = self._work = None

    def heard(self) -> str | None:
        return self._beacon.heard

    def close(self) -> None:
        self.leave()
        self._beacon.stop()


_abandoned: list[Any] = []
"""Groups with an operation that waits for a peer: Gloo can't take it back, and to delete the group would wait for it."""


def has_abandoned_group() -> bool:
    """Whether this process has to end without cleaning up after Python, which would wait for a peer."""
    return bool(_abandoned)


def _first_line(error: BaseException) -> str:
    """The part of Gloo's words that says what happened."""
    line = str(error).partition("\n")[0]
    return re.sub(r"^\[\S*\] ", "", line).partition(". ")[0] or type(error).__name__
