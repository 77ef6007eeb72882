"""The loaders that ODB is compared with: fixed batches, and the offline oracle."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_lightning.plan import RowLimits, fixed_batch_steps, oracle_steps

LENGTHS = st.lists(st.integers(1, 300), max_size=80)


@given(shards=st.lists(LENGTHS, min_size=1, max_size=6), batch_size=st.integers(1, 12))
def test_fixed_batches_go_through_each_shard_in_its_order(shards: list[list[int]], batch_size: int) -> None:
    steps = fixed_batch_steps(shards, batch_size)
    for rank, shard in enumerate(shards):
        batches = [step[rank] for step in steps]
        assert list(itertools.chain.from_iterable(batches)) == list(range(len(shard)))
        full, rest = divmod(len(shard), batch_size)
        sizes = [batch_size] * full + ([rest] if rest else [])
        assert list(map(len, batches)) == sizes + [0] * (len(steps) - len(sizes))
    assert all(any(step) for step in steps)


@given(
    lengths=LENGTHS,
    l_max=st.integers(1, 900),
    max_rows=st.none() | st.integers(1, 5),
    world_size=st.integers(1, 9),
    seed=st.integers(0, 3),
)
def test_the_oracle_fills_batches_of_neighbours_in_length(
    lengths: list[int], l_max: int, max_rows: int | None, world_size: int, seed: int
) -> None:
    steps = oracle_steps(lengths, RowLimits(l_max, max_rows), world_size, seed)
    assert {len(step) for step in steps} <= {world_size}
    batches = [[lengths[position] for position in batch] for step in steps for batch in step]
    assert sorted(position for step in steps for batch in step for position in batch) == list(range(len(lengths)))
    assert all(batches[:-world_size]), "only the last step has ranks without a batch"
    found = sorted((batch for batch in batches if batch), reverse=True)
    assert list(itertools.chain.from_iterable(found)) == sorted(lengths, reverse=True)
    for number, batch in enumerate(found, 1):
        rows = min(max(l_max // batch[0], 1), max_rows or len(lengths))
        assert len(batch) == rows or (number == len(found) and len(batch) < rows)


def test_the_oracle_takes_as_many_as_the_batch_s_own_longest_allows() -> None:
    steps = oracle_steps([100, 200, 500, 800, 50], RowLimits(1000), world_size=2, seed=0)
    assert sorted(batch for step in steps for batch in step) == [[], [0, 4], [2, 1], [3]]


def test_the_oracle_s_order_depends_on_the_seed_alone() -> None:
    lengths = list(range(1, 200))
    first, again, other = (oracle_steps(lengths, RowLimits(400), 4, seed) for seed in (1, 1, 2))
    assert first == again != other
    longest = [max(lengths[batch[0]] for batch in step if batch) for step in first]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)


def test_what_cannot_be_used_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        fixed_batch_steps([[1]], 0)
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        oracle_steps([1], RowLimits(4), 0, 0)
    with pytest.raises(ValueError, match="lengths must be at least 1, got 0"):
        oracle_steps([1, 0], RowLimits(4), 1, 0)
