"""What an epoch needs of the other ranks: a few integers per round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from odb_lightning.runtime.errors import Failure, PeerFailure
from odb_lightning.runtime.presence import Presence


class Exchange(Protocol):
    """Every rank makes the same sequence of calls."""

    rank: int
    world_size: int
    seconds: float
    """Time spent in exchanges so far."""
    presence: Presence
    """What this rank does, for its peers to know."""

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """The elementwise maximum over all ranks."""

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """The elementwise sum over all ranks, in float64: exact for integers below 2^53."""

    def broadcast(self, payload: bytes | None, source: int) -> bytes:
        """The payload of rank `source`, on all ranks."""

    def publish(self, failure: Failure) -> None:
        """Leaves this rank's failure where peers can read it, unless another one was first."""

    def peer_failure(self) -> PeerFailure:
        """What a peer that gave a stop code, or is gone, published."""

    def finish(self) -> None:
        """After the last exchange: waits for the peers to have come through it, so that none takes this rank's end for a
        failure."""

    def leave(self) -> None:
        """Gives up the group. After `finish` this rank still listens for what becomes of its peers, until `close`; else it
        has left, and peers that still wait for it fail at once."""

    def heard(self) -> str | None:
        """What ended the iteration on a peer, as far as this rank has heard."""

    def close(self) -> None:
        """Leaves, and listens no more."""


class SoloExchange:
    """A single rank's exchange with itself."""

    rank = 0
    world_size = 1
    seconds = 0.0

    def __init__(self, presence: Presence) -> None:
        self.presence = presence

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

    def finish(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def heard(self) -> str | None:
        return None

    def close(self) -> None:
        pass
