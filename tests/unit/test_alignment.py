"""Group alignment: how many groups a round has, and how a rank comes to exactly that many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_lightning.plan import align_groups, group_window, target_group_count


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], int, list[list[int]]]:
    """Lengths, a budget, and the groups of that window."""
    lengths = draw(st.lists(st.integers(1, 200), min_size=1, max_size=50))
    l_max = draw(st.integers(1, 600))
    return lengths, l_max, group_window(lengths, l_max)


def split_one_by_one(groups: list[list[int]], target: int) -> list[list[int]]:
    """The split of the design, one at a time: the longest of the first group with two or more, next to its group."""
    groups = [list(group) for group in groups]
    while len(groups) < target:
        index = next(i for i, group in enumerate(groups) if len(group) > 1)
        groups.insert(index, [groups[index].pop(0)])
    return groups


def split_by_the_paper(groups: list[list[int]], target: int) -> list[list[int]]:
    """The split as the paper words it, where a group's last sample and the last group are the longest ones."""
    ascending = [list(reversed(group)) for group in reversed(groups)]
    alone: list[list[int]] = []
    while len(ascending) + len(alone) < target:
        for group in reversed(ascending):
            if len(group) >= 2:
                alone.append([group.pop()])
                break
    return ascending + alone


def drop_one_by_one(groups: list[list[int]], target: int) -> list[list[int]]:
    """The groups that stay: as long as there are too many, the smallest goes, of equal ones the latest."""
    groups = list(groups)
    while len(groups) > target:
        smallest = min(map(len, groups))
        del groups[max(i for i, group in enumerate(groups) if len(group) == smallest)]
    return groups


def test_the_worked_example_of_three_ranks() -> None:
    rank_groups = [[[0], [1, 2], [3, 4, 5], [6, 7]], [[0, 1], [2, 3, 4]], [[0], [1], [2, 3]]]
    counts, samples = [4, 2, 3], [8, 5, 4]
    assert target_group_count(counts, [3, 3, 3], samples) == 3

    assert align_groups(rank_groups[0], 3) == ([[1, 2], [3, 4, 5], [6, 7]], [0])
    assert align_groups(rank_groups[1], 3) == ([[0], [1], [2, 3, 4]], [])
    assert align_groups(rank_groups[2], 3) == ([[0], [1], [2, 3]], [])


@pytest.mark.parametrize(
    ("counts", "capacities", "samples", "expected"),
    [
        pytest.param([4, 2, 3], [9, 9, 9], [9, 9, 9], 4, id="the-most-groups"),
        pytest.param([4, 2, 3], [9, 2, 9], [9, 9, 9], 2, id="bounded-by-a-capacity"),
        pytest.param([4, 2, 3], [9, 9, 9], [9, 2, 9], 2, id="bounded-by-the-samples-of-one-rank"),
        pytest.param([4, 2], [0, 9], [9, 9], 4, id="a-capacity-of-zero-does-not-bound"),
        pytest.param([4, 0], [9, 1], [9, 1], 4, id="a-rank-without-groups-does-not-bound"),
        pytest.param([0, 0], [5, 5], [0, 0], 0, id="nobody-active"),
        pytest.param([], [], [], 0, id="no-ranks"),
        pytest.param([1], [1], [1], 1, id="one"),
    ],
)
def test_target_group_count(counts: list[int], capacities: list[int], samples: list[int], expected: int) -> None:
    assert target_group_count(counts, capacities, samples) == expected


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 40)), max_size=8))
def test_target_is_the_formula_of_the_paper(ranks: list[tuple[int, int, int]]) -> None:
    active = [rank for rank in ranks if rank[0] > 0]
    most = max((groups for groups, _, _ in active), default=0)
    slots = min((capacity for _, capacity, _ in active if capacity > 0), default=10**9)
    samples = min((count for _, _, count in active if count > 0), default=10**9)
    expected = max(min(most, slots, samples), 1) if active else 0
    assert target_group_count([r[0] for r in ranks], [r[1] for r in ranks], [r[2] for r in ranks]) == expected


@given(windows(), st.data())
def test_exactly_target_groups_and_no_position_lost(
    window: tuple[list[int], int, list[list[int]]], data: st.DataObject
) -> None:
    lengths, l_max, groups = window
    target = data.draw(st.integers(0, len(lengths)))
    aligned, overflow = align_groups(groups, target)
    assert len(aligned) == target
    assert all(aligned)
    assert sorted([p for group in aligned for p in group] + overflow) == list(range(len(lengths)))
    for group in aligned:
        rows = [lengths[position] for position in group]
        assert rows == sorted(rows, reverse=True)
        assert len(rows) == 1 or len(rows) * rows[0] <= l_max


@given(windows(), st.data())
def test_split_takes_the_longest_of_the_first_group_with_two_or_more(
    window: tuple[list[int], int, list[list[int]]], data: st.DataObject
) -> None:
    lengths, _, groups = window
    target = data.draw(st.integers(len(groups), len(lengths)))
    aligned, overflow = align_groups(groups, target)
    assert overflow == []
    assert aligned == split_one_by_one(groups, target)
    assert sorted(sorted(group) for group in aligned) == sorted(sorted(g) for g in split_by_the_paper(groups, target))
    emitted = [lengths[position] for group in aligned for position in group]
    assert emitted == sorted(emitted, reverse=True)


@given(windows(), st.data())
def test_overflow_keeps_the_groups_with_most_samples(
    window: tuple[list[int], int, list[list[int]]], data: st.DataObject
) -> None:
    _, _, groups = window
    target = data.draw(st.integers(0, len(groups)))
    aligned, overflow = align_groups(groups, target)
    kept = drop_one_by_one(groups, target)
    assert aligned == kept
    assert overflow == [position for group in groups if group not in kept for position in group]


@pytest.mark.parametrize(
    ("groups", "target", "expected"),
    [
        ([[5, 4, 3], [2, 1, 0]], 3, ([[5], [4, 3], [2, 1, 0]], [])),
        ([[5, 4, 3], [2, 1, 0]], 4, ([[5], [4], [3], [2, 1, 0]], [])),
        ([[5, 4, 3], [2, 1, 0]], 5, ([[5], [4], [3], [2], [1, 0]], [])),
        ([[5], [4, 3], [2, 1, 0]], 4, ([[5], [4], [3], [2, 1, 0]], [])),
        ([[5], [4, 3], [2, 1], [0]], 2, ([[4, 3], [2, 1]], [5, 0])),
        ([[5], [4, 3], [2, 1], [0]], 1, ([[4, 3]], [5, 2, 1, 0])),
        ([[5], [4, 3], [2, 1], [0]], 3, ([[5], [4, 3], [2, 1]], [0])),
        ([[5], [4]], 0, ([], [5, 4])),
        ([], 0, ([], [])),
    ],
)
def test_alignment_examples(groups: list[list[int]], target: int, expected: tuple[list[list[int]], list[int]]) -> None:
    assert align_groups(groups, target) == expected


def test_the_given_groups_are_left_alone() -> None:
    groups = [[3, 2], [1, 0]]
    aligned, _ = align_groups(groups, 3)
    aligned[2].append(99)
    align_groups(groups, 2)[0][0].append(99)
    assert groups == [[3, 2], [1, 0]]


def test_more_groups_than_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="2 samples can't be split into 3 groups"):
        align_groups([[1, 0]], 3)


def test_a_negative_target_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        align_groups([[0]], -1)
