"""What each rank's collate process is doing, kept fresh in the store, so that peers can tell a slow one from a dead one."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

LEFT = "has left"
"""The phase of a rank that has left its group before the end."""
FINISHED = "has finished"
"""The phase of a rank whose epoch is planned and collated to its end; its training process may be batches behind."""


def _do_nothing() -> None:
    pass


class Presence:
    """One rank's place in an epoch. Changed by its main thread alone."""

    __slots__ = ("beat", "epoch", "exchanges", "on_progress", "phase", "progress", "round")

    def __init__(self, epoch: int = 0, on_progress: Callable[[], None] = _do_nothing) -> None:
        self.epoch = epoch
        self.round = 0
        self.phase = "starting its workers"
        self.exchanges = 0
        """Exchanges that the rank has reached."""
        self.progress = 0
        """Grows with whatever is got done: samples brought, steps collated, batches waiting to be taken."""
        self.beat = 0
        """Grows as long as the process runs."""
        self.on_progress = on_progress
        """Called, too, when the rank gets on."""

    def tick(self) -> None:
        """The rank got on."""
        self.progress += 1
        self.on_progress()

    def note(self, phase: str) -> None:
        """The rank got on, and does this now."""
        self.phase = phase
        self.tick()

    def encode(self) -> str:
        """For the store."""
        return json.dumps([self.epoch, self.round, self.phase, self.exchanges, self.progress, self.beat])

    @classmethod
    def decode(cls, text: bytes) -> Presence:
        """As `encode` wrote it."""
        presence = cls()
        epoch, number, phase, exchanges, progress, beat = json.loads(text)
        presence.epoch, presence.round, presence.phase = epoch, number, phase
        presence.exchanges, presence.progress, presence.beat = exchanges, progress, beat
        return presence

    def describe(self, rank: int) -> str:
        """E.g. "rank 1 (round 3 of epoch 0, collating)"; of one that has left, where."""
        doing = "" if self.phase in (LEFT, FINISHED) else f", {self.phase}"
        return f"rank {rank} (round {self.round} of epoch {self.epoch}{doing})"


class Beacon:
    """Writes a `Presence` to the store every `seconds`, from a thread and on a connection of its own (one that waits for a key
    would hold up the beats); listens for a failure of a peer, as the store may be gone when it is asked for."""

    def __init__(
        self, store: Any, rank: int, presence: Presence, seconds: float, read_failure: Callable[[Any], str | None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._presence = presence
        self._seconds = seconds
        self._read_failure = read_failure
        self.heard: str | None = None
        """What ended the iteration on another rank."""
        self._stopped = threading.Event()
        self._is_lost = False
        """The store is gone."""
        self._write()
        self._thread = threading.Thread(target=self._run, name="odb-beacon", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        self._presence.beat += 1
        self._store.set(f"presence/{self._rank}", self._presence.encode())

    def _run(self) -> None:
        # A store that is gone: the rank that held it has ended, and the exchange says so.
        with self._until_lost():
            while not self._stopped.wait(self._seconds):
                self._write()
                if self.heard is None:
                    self.heard = self._read_failure(self._store)
                    if self.heard is not None:
                        self._store.set(f"heard/{self._rank}", "1")

    def finish(self) -> None:
        """Says that the rank has come to the end of the epoch; goes on listening."""
        if self._presence.phase != FINISHED:
            self._presence.note(FINISHED)
            self._write_last()

    def stop(self) -> None:
        """Says that the rank has left, if it has not finished, as far as that is still possible. Once is enough."""
        self._stopped.set()
        self._thread.join(self._seconds + 1.0)
        if self._presence.phase not in (FINISHED, LEFT):
            self._presence.note(LEFT)
            self._write_last()

    def _write_last(self) -> None:
        if not self._is_lost:
            with self._until_lost():
                self._write()

    @contextlib.contextmanager
    def _until_lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            self._is_lost = True


class Peers:
    """The other ranks' presences, as last seen."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self._ranks = [other for other in range(world_size) if other != rank]
        self.seen: dict[int, Presence] = {}
        self._fresh: dict[int, float] = {}

    def look(self, among: Sequence[int] | None = None) -> None:
        """Reads the presences (of all peers; they have to be there)."""
        ranks = self._ranks if among is None else among
        if not ranks:
            return
        now = time.monotonic()
        for rank, text in zip(ranks, self._store.multi_get([f"presence/{rank}" for rank in ranks]), strict=True):
            presence = Presence.decode(text)
            if rank not in self.seen or presence.beat != self.seen[rank].beat:
                self._fresh[rank] = now
            self.seen[rank] = presence

    def present(self) -> list[int]:
        """The peers that have written a presence at all."""
        return [rank for rank in self._ranks if self._store.check([f"presence/{rank}"])]

    def left(self) -> list[int]:
        """Peers that were seen to have left before the end."""
        return [rank for rank, presence in self.seen.items() if presence.phase == LEFT]

    def have_heard(self) -> bool:
        """Whether all peers know of the failure, or have left."""
        self.look(self.present())
        left = self.left()
        return all(rank in left or self._store.check([f"heard/{rank}"]) for rank in self.seen)

    def stale(self, seconds: float) -> list[int]:
        """Peers whose presence was the same for so long, as seen from here, though they have not left."""
        now = time.monotonic()
        silent = [rank for rank, since in self._fresh.items() if now - since >= seconds]
        return [rank for rank in silent if self.seen[rank].phase not in (LEFT, FINISHED)]

    def behind(self, exchanges: int) -> list[int]:
        """Peers that have not reached as many exchanges."""
        return [rank for rank, presence in self.seen.items() if presence.exchanges < exchanges]

    def describe_left(self, ranks: Sequence[int]) -> str:
        """What there is to say of these peers, who left without a word."""
        how = "by a break or by an error that the loader was not told of"
        return f"{self.describe(ranks)} left the iteration before its end, {how}"

    def describe(self, ranks: Sequence[int]) -> str:
        """These peers, and what they did when last seen."""
        return ", ".join(self.seen[rank].describe(rank) if rank in self.seen else f"rank {rank}" for rank in ranks)
