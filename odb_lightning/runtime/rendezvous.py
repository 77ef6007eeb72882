"""Who this process is among the ranks, and where their collate processes meet."""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch.distributed as dist

from odb_lightning.runtime.settings import StoreAddress

_group_numbers = itertools.count()
"""Every rank forms its groups in the same order, so the number is the same on all of them, and new for each."""

_hosted: dict[tuple[str, int], dist.TCPStore] = {}


def data_parallel_position(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size): as given, else torch.distributed's where it is initialised, else (0, 1)."""
    if (rank is None) != (world_size is None):
        raise ValueError("give both rank and world_size, or neither")
    if rank is not None and world_size is not None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}")
        return rank, world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def store_address(store: Any, rank: int, world_size: int) -> StoreAddress | None:
    """The meeting point of a new group; None for a single rank. Raises ValueError where there is none to be found."""
    if world_size == 1:
        return None
    prefix = f"odb/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_group_numbers)}"
    if isinstance(store, dist.TCPStore):
        return StoreAddress(prefix, host=store.host, port=store.port)
    if isinstance(store, dist.FileStore):
        return StoreAddress(prefix, path=store.path)  # type: ignore[attr-defined]
    if store is not None:
        raise ValueError(f"store has to be a torch.distributed TCPStore or FileStore, got {type(store).__name__}")
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise ValueError(
            f"rank {rank} of {world_size} does not know where to meet its peers: set MASTER_ADDR and MASTER_PORT (torchrun and "
            "Lightning do), or pass store=torch.distributed.TCPStore(...)"
        )
    has_store = dist.is_initialized() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and not has_store and (host, int(port)) not in _hosted:
        _hosted[host, int(port)] = dist.TCPStore(host, int(port), is_master=True, wait_for_workers=False, multi_tenant=True)
    return StoreAddress(prefix, host=host, port=int(port))
