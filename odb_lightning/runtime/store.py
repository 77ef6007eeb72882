"""The store of the job: connections to it, and the failure that one rank leaves there for the others to read."""

from __future__ import annotations

import contextlib
import json
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from odb_lightning.runtime.errors import Failure
from odb_lightning.runtime.settings import StoreAddress

_RECONNECT_SECONDS = 2.0
_FAILURE_KEY = "failure"

_connections: dict[tuple[Any, ...], Any] = {}
"""Kept by the process, as to connect can take seconds where names are looked up slowly."""
os.register_at_fork(after_in_child=_connections.clear)


def open_store(address: StoreAddress, seconds: float, purpose: str) -> Any:
    """The place where ranks meet, its keys below the prefix of one iteration, on a connection that is kept for this `purpose`.

    Raises RuntimeError if it can't be reached within `seconds`.
    """
    key = address.host, address.port, address.path, purpose
    if key in _connections:
        with contextlib.suppress(RuntimeError):
            _connections[key].check(["is it there?"])
            return dist.PrefixStore(address.prefix, _connections[key])
        # The job has made its store anew at the same place, or there is none any more.
        seconds = min(seconds, _RECONNECT_SECONDS)
    host, port, limit = address.host or "", address.port or 0, timedelta(seconds=seconds)
    _connections[key] = (
        dist.FileStore(address.path)
        if address.path is not None
        else dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    )
    return dist.PrefixStore(address.prefix, _connections[key])


def publish_failure(store: Any, rank: int, failure: Failure) -> str | None:
    """Leaves it in the store unless a peer was first, whose failure is given then."""
    first = json.loads(store.compare_set(_FAILURE_KEY, "", json.dumps([rank, failure.describe(rank)])))
    return None if first[0] == rank else str(first[1])


def read_failure(store: Any, rank: int) -> str | None:
    """What ended the iteration first, unless it was this rank."""
    if not store.check([_FAILURE_KEY]):
        return None
    first = json.loads(store.get(_FAILURE_KEY))
    return None if first[0] == rank else str(first[1])
