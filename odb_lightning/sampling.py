"""Which samples a rank sees in an epoch, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler


class ShardedSampler(Sampler[int]):
    """Deals a seeded permutation of the data set to the ranks, card by card and without padding: every sample belongs to
    exactly one rank, and shards differ by one at most. The order depends on (seed, epoch) alone."""

    def __init__(self, num_samples: int, *, rank: int = 0, world_size: int = 1, shuffle: bool = True, seed: int = 0) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}")
        self.num_samples = num_samples
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order the next iteration gives."""
        self.epoch = epoch

    def views(self) -> np.ndarray[Any, Any]:
        """This rank's samples of the epoch, int64."""
        if not self.shuffle:
            return np.arange(self.rank, self.num_samples, self.world_size)
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        return torch.randperm(self.num_samples, generator=generator)[self.rank :: self.world_size].numpy()

    def __iter__(self) -> Iterator[int]:
        return iter(self.views().tolist())

    def __len__(self) -> int:
        return len(range(self.rank, self.num_samples, self.world_size))
