"""What went wrong in a helper process, as the training process tells it."""

from __future__ import annotations

import traceback
from collections.abc import Hashable
from dataclasses import dataclass


class ODBLoaderError(RuntimeError):
    """A loader's process failed, on this rank or on a peer. The message names the rank, what it was doing and the sample,
    and holds the original traceback."""

    is_known_to_peers = False
    """The collate process has told it, or was told."""


@dataclass(frozen=True)
class Failure:
    """An exception in words, so that it can cross processes whatever its type."""

    where: str
    """What was being done, e.g. "dataset[37]"."""
    error: str
    """Type and text of the exception."""
    traceback: str = ""
    sample_id: Hashable = None

    @classmethod
    def of(cls, error: BaseException, where: str, sample_id: Hashable = None) -> Failure:
        """The exception being handled. Keeps the one that a RaisedFailure carries."""
        if isinstance(error, RaisedFailure):
            return error.failure
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        return cls(where, text, "".join(traceback.format_exception(type(error), error, error.__traceback__)), sample_id)

    def describe(self, rank: int) -> str:
        """The message for the user, on whatever rank."""
        text = f"rank {rank} failed in {self.where}: {self.error}"
        return f"{text}\n\nOriginal traceback on rank {rank}:\n{self.traceback}" if self.traceback else text


class RaisedFailure(Exception):
    """Carries a Failure to where it is reported."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure


class PeerFailure(Exception):
    """Another rank failed; its own words, as far as they could be had."""
