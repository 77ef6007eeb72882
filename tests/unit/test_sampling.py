"""The default order of samples: every one on one rank, new in each epoch, the same on each machine."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_lightning.sampling import ShardedSampler


def shards(num_samples: int, world_size: int, epoch: int = 0, **options: object) -> list[list[int]]:
    samplers = [ShardedSampler(num_samples, rank=rank, world_size=world_size, **options) for rank in range(world_size)]  # type: ignore[arg-type]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 5), st.booleans(), st.integers(-3, 2**40))
def test_every_sample_on_exactly_one_rank_and_shards_differ_by_one_at_most(
    num_samples: int, world_size: int, epoch: int, shuffle: bool, seed: int
) -> None:
    dealt = shards(num_samples, world_size, epoch, shuffle=shuffle, seed=seed)
    assert sorted(list(itertools.chain.from_iterable(dealt))) == list(range(num_samples))
    sizes = [len(shard) for shard in dealt]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == [len(ShardedSampler(num_samples, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert all(type(index) is int for shard in dealt for index in shard)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_shards_of_any_world_size_are_dealt_from_one_permutation(world_size: int) -> None:
    (whole,) = shards(20, 1, epoch=2, seed=5)
    assert shards(20, world_size, epoch=2, seed=5) == [whole[rank::world_size] for rank in range(world_size)]


def test_without_shuffling_the_order_is_that_of_the_data_set() -> None:
    assert shards(7, 2, epoch=3, shuffle=False) == [[0, 2, 4, 6], [1, 3, 5]]


def test_order_depends_on_seed_and_epoch() -> None:
    orders = {tuple(shards(30, 1, epoch, seed=seed)[0]) for seed in (0, 1, 2) for epoch in (0, 1, 2)}
    assert len(orders) == 9
    assert shards(30, 2, 1, seed=4) == shards(30, 2, 1, seed=4)


def test_order_does_not_depend_on_the_global_random_state_nor_alter_it() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = shards(30, 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert shards(30, 1) == first


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="rank must be from 0"):
        ShardedSampler(5, rank=rank, world_size=world_size)
