"""Where the ranks of an iteration meet, as the training process sees it: it may fail, too, and tells the peers."""

from __future__ import annotations

import time
from typing import Any

from odb_lightning.runtime.errors import Failure, ODBLoaderError
from odb_lightning.runtime.presence import Peers
from odb_lightning.runtime.settings import StoreAddress
from odb_lightning.runtime.store import open_store, publish_failure

_HEARD_SECONDS = 3.0
"""For the peers to hear of a failure: they listen once a second."""
_PAUSE_SECONDS = 0.05


class Meeting:
    """Of one iteration. `address` is None for a single rank, which has nobody to tell."""

    def __init__(self, address: StoreAddress | None, rank: int, world_size: int) -> None:
        self.address = address
        self._rank = rank
        self._world_size = world_size
        self._store: Any = None

    def connect(self, seconds: float) -> None:
        """While all is well: when there is something to tell, the peers may not wait for it. Raises ODBLoaderError if there is
        no store to be reached within `seconds`."""
        address = self.address
        if address is None:
            return
        try:
            self._store = open_store(address, seconds, f"trainer {self._rank}")
        except RuntimeError as error:
            where = f"{address.host}:{address.port}" if address.path is None else address.path
            raise ODBLoaderError(
                f"rank {self._rank} found no store at {where} within Timeouts(setup={seconds:.0f}) seconds, where ranks are to "
                f"meet; rank 0 or the launcher of the job holds it: {error}"
            ) from error

    def tell(self, failure: Failure) -> str | None:
        """Leaves the failure for the peers; gives what ended the iteration on one of them before. Rank 0, with which the store
        may go, waits for them to hear of it. Raises RuntimeError if the store is gone."""
        if self._store is None:
            return None
        peers = Peers(self._store, self._rank, self._world_size)
        peers.look(peers.present())  # before they are told: one that hears of it leaves
        left = peers.left()
        earlier = publish_failure(self._store, self._rank, failure)
        if earlier is not None:
            return earlier
        if left:
            return peers.describe_left(left)
        deadline = time.monotonic() + _HEARD_SECONDS
        while self._rank == 0 and time.monotonic() < deadline and not peers.have_heard():
            time.sleep(_PAUSE_SECONDS)
        return None
