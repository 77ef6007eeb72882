"""Exchanges between the ranks of a Trainer, for counting. Used at the end of an epoch and of a run, never in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def reduce_array(trainer: Trainer, array: np.ndarray, how: str = "sum") -> np.ndarray:
    """`array` reduced over all ranks ("sum" or "max"), element by element; its shape must be the same on each."""
    # The strategy's own reduce leaves idle ranks out, which is right for metrics and wrong here.
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1 or array.size == 0:
        return array
    tensor = torch.from_numpy(array).to(trainer.strategy.root_device)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)
    return tensor.cpu().numpy()


def gather_objects(value: Any) -> list[Any]:
    """Each rank's `value`, in the order of ranks, on every rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
