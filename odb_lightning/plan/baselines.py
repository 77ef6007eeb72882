"""What other loaders make of the same lengths, to compare with: fixed batches, and an oracle that knows all lengths."""

from __future__ import annotations

import random
from collections.abc import Sequence

from odb_lightning.plan.costs import RowLimits


def fixed_batch_steps(shards: Sequence[Sequence[int]], batch_size: int) -> list[list[list[int]]]:
    """`batch_size` samples a batch in the order of the shard, the last batch shorter, no sample repeated.

    `steps[s][r]` are positions in `shards[r]`, none where a rank is at its end (as `SimulatedRun` has them). Raises ValueError
    for a `batch_size` below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    num_steps = -(-max(map(len, shards), default=0) // batch_size)
    return [
        [list(range(min(step * batch_size, len(shard)), min((step + 1) * batch_size, len(shard)))) for shard in shards]
        for step in range(num_steps)
    ]


def oracle_steps(lengths: Sequence[int], limits: RowLimits, world_size: int, seed: int) -> list[list[list[int]]]:
    """The offline global max-token batcher (GMT): all lengths sorted, each batch as many samples as its own longest allows;
    batches, shuffled by `seed`, go to the ranks in turn, `world_size` a step.

    `steps[s][r]` are positions in `lengths`, the longest first; none on ranks that the last step has no batch for. No loader
    can do this without a cache of all lengths. Raises ValueError for a length or a `world_size` below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if lengths and min(lengths) < 1:
        raise ValueError(f"lengths must be at least 1, got {min(lengths)}")
    descending = sorted(range(len(lengths)), key=lambda position: -lengths[position])
    batches, start = [], 0
    while start < len(descending):
        rows, _ = limits(lengths[descending[start]])
        batches.append(descending[start : start + rows])
        start += rows
    random.Random(seed).shuffle(batches)
    batches += [[] for _ in range(-len(batches) % world_size)]
    return [batches[first : first + world_size] for first in range(0, len(batches), world_size)]
