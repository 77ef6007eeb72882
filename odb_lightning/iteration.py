"""One pass over a loader, in the training process."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from odb_lightning.batch import IDLE_DATA, ODBBatch
from odb_lightning.resume import Rounds
from odb_lightning.runtime.client import CollateProcess
from odb_lightning.runtime.errors import Failure, ODBLoaderError

if TYPE_CHECKING:
    from odb_lightning.loader import ODBDataLoader


class Iteration(Iterator[ODBBatch]):
    """One pass. Starts its processes with the first `next`, and takes them along when it is dropped before its end."""

    def __init__(self, loader: ODBDataLoader) -> None:
        self._loader: ODBDataLoader | None = loader
        self._process: CollateProcess | None = None
        self._rounds = Rounds()

    def __next__(self) -> ODBBatch:
        loader = self._loader
        if loader is None:
            raise StopIteration
        begin = time.perf_counter()
        try:
            if self._process is None:
                self._process = loader._begin_epoch()
            batch = self._receive(loader, self._process)
        except StopIteration as error:  # of the user's sampler, say: it would look like the end of the epoch
            self.close(error)
            raise RuntimeError("beginning the epoch raised StopIteration") from error
        except BaseException as error:
            self.close(error)
            raise
        finally:
            loader._pass_stats.wait_seconds += time.perf_counter() - begin
        if batch is None:
            self._finish(loader)
            raise StopIteration
        loader._has_begun = True
        return batch

    def _receive(self, loader: ODBDataLoader, process: CollateProcess) -> ODBBatch | None:
        """The next batch, or None at the end of the epoch."""
        while True:
            kind, facts, payload = process.receive()
            if kind == "batch":
                info, stats, rounds, resume = facts
                if stats is not None:
                    loader._pass_stats.add(stats)
                assert loader._place is not None
                position = self._rounds.position(loader._place, rounds, *resume)
                object.__setattr__(info, "position", position)  # frozen, and nobody else's yet
                loader._position, loader._loaded = position, None
                if info.is_idle:
                    return ODBBatch(IDLE_DATA, info, process.stand_in())
                return ODBBatch(payload, info)
            if kind == "warning":
                warnings.warn(facts, stacklevel=3)
            elif kind == "end":
                loader._pass_stats.add(facts)
                return None
            else:
                error = ODBLoaderError(facts)
                error.is_known_to_peers = True
                raise error

    def _finish(self, loader: ODBDataLoader) -> None:
        loader._finished_at = None if loader._meeting is None else loader._meeting.address
        loader._has_begun, loader._unfinished_epoch = True, None
        loader._position, loader._loaded = None, None
        self._loader, loader._iteration = None, None
        if not loader._keeps_process:
            loader.close()

    def close(self, reason: BaseException | None = None) -> str | None:
        """Ends the pass; its processes go with it, since they are in the middle of an epoch. See `ODBDataLoader.close`."""
        loader, self._loader = self._loader, None
        if loader is None:
            return None
        loader._iteration = None
        earlier = None
        if isinstance(reason, ODBLoaderError):
            if not reason.is_known_to_peers:
                loader._tell_peers(Failure("its loader", str(reason)))
        elif reason is not None:
            where = "its training loop" if self._process else "beginning an epoch"
            earlier = loader._tell_peers(Failure.of(reason, where))
        if self._process is not None:
            loader._end_process()
        return earlier

    def __del__(self) -> None:
        # A `for` loop that was left. Without waiting for the processes: if it was by an error, the peers are about to be told.
        loader, self._loader = self._loader, None
        if loader is not None:
            loader._iteration = None
            if self._process is not None:
                self._process.stop()
