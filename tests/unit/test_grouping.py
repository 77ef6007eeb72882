"""Grouping of a window: the worked examples of the paper, and its rule written a second time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_lightning.plan import QuadraticCost, RowLimits, group_window
from odb_lightning.plan.grouping import carry_over

LENGTHS = st.lists(st.integers(1, 300), max_size=60)
BUDGETS = st.integers(1, 600)


def groups_by_the_paper(lengths: list[int], l_max: int, max_rows: int | None = None) -> list[list[int]]:
    """The groups as lengths: slices of the descending lengths, each as long as the slice before it allows."""
    descending = sorted(lengths, reverse=True)
    groups: list[list[int]] = []
    size = 1
    while descending:
        groups.append(descending[:size])
        descending = descending[size:]
        size = 1
        while (size + 1) * groups[-1][-1] <= l_max and (max_rows is None or size < max_rows):
            size += 1
    return groups


def as_lengths(groups: list[list[int]], lengths: list[int]) -> list[list[int]]:
    return [[lengths[position] for position in group] for group in groups]


@pytest.mark.parametrize(
    ("lengths", "l_max", "expected"),
    [
        pytest.param([100, 200, 500, 800], 1000, [[800], [500], [200, 100]], id="worked-example"),
        pytest.param([500, 100, 800, 200], 1000, [[800], [500], [200, 100]], id="worked-example-in-any-order"),
        pytest.param([], 1000, [], id="empty-window"),
        pytest.param([7], 10, [[7]], id="one-sample"),
        pytest.param([513, 10, 10], 512, [[513], [10], [10]], id="over-budget-goes-alone"),
        pytest.param([100, 10, 10, 10, 100], 150, [[100], [100], [10], [10, 10]], id="no-long-sample-with-short-ones"),
        pytest.param([1, 1, 1, 1, 1, 20], 50, [[20], [1, 1], [1, 1, 1]], id="padded-not-raw-budget"),
        pytest.param([10] * 12, 50, [[10], [10] * 5, [10] * 5, [10]], id="last-group-is-what-is-left"),
        pytest.param([5, 5, 5], 5, [[5], [5], [5]], id="exactly-the-budget"),
        pytest.param([5, 5, 5], 10, [[5], [5, 5]], id="exactly-twice-in-the-budget"),
    ],
)
def test_worked_examples(lengths: list[int], l_max: int, expected: list[list[int]]) -> None:
    assert as_lengths(group_window(lengths, l_max), lengths) == expected


def test_positions_not_lengths_are_given_back() -> None:
    assert group_window([100, 200, 500, 800], 1000) == [[3], [2], [1, 0]]


def test_the_padded_tokens_of_the_worked_example() -> None:
    lengths = [100, 200, 500, 800]
    assert [len(group) * max(group) for group in as_lengths(group_window(lengths, 1000), lengths)] == [800, 500, 400]


@given(LENGTHS, BUDGETS, st.none() | st.integers(1, 12))
def test_same_groups_as_the_rule_of_the_paper(lengths: list[int], l_max: int, max_rows: int | None) -> None:
    groups = as_lengths(group_window(lengths, l_max, max_rows), lengths)
    assert groups == groups_by_the_paper(lengths, l_max, max_rows)


@given(LENGTHS, BUDGETS, st.none() | st.integers(1, 12))
def test_each_position_is_in_exactly_one_group(lengths: list[int], l_max: int, max_rows: int | None) -> None:
    groups = group_window(lengths, l_max, max_rows)
    assert sorted(position for group in groups for position in group) == list(range(len(lengths)))
    assert all(groups)


@given(LENGTHS, BUDGETS, st.none() | st.integers(1, 12))
def test_a_group_of_two_or_more_keeps_the_padded_budget(lengths: list[int], l_max: int, max_rows: int | None) -> None:
    for group in as_lengths(group_window(lengths, l_max, max_rows), lengths):
        assert len(group) == 1 or len(group) * max(group) <= l_max


@given(LENGTHS, BUDGETS)
def test_the_longest_come_first_within_and_across_groups(lengths: list[int], l_max: int) -> None:
    emitted = [length for group in as_lengths(group_window(lengths, l_max), lengths) for length in group]
    assert emitted == sorted(lengths, reverse=True)


@given(LENGTHS, BUDGETS, st.integers(1, 12))
def test_max_rows_caps_every_group(lengths: list[int], l_max: int, max_rows: int) -> None:
    assert all(len(group) <= max_rows for group in group_window(lengths, l_max, max_rows))


@given(LENGTHS, BUDGETS)
def test_a_max_rows_that_is_never_reached_changes_nothing(lengths: list[int], l_max: int) -> None:
    assert group_window(lengths, l_max, max_rows=l_max) == group_window(lengths, l_max)


@given(LENGTHS, BUDGETS, st.randoms(use_true_random=False))
def test_the_order_in_the_window_does_not_change_the_groups(lengths: list[int], l_max: int, rng: random.Random) -> None:
    shuffled = rng.sample(lengths, len(lengths))
    assert as_lengths(group_window(shuffled, l_max), shuffled) == as_lengths(group_window(lengths, l_max), lengths)


@given(LENGTHS, BUDGETS)
def test_the_input_is_left_alone_and_the_output_is_repeatable(lengths: list[int], l_max: int) -> None:
    before = list(lengths)
    assert group_window(lengths, l_max) == group_window(tuple(lengths), l_max)
    assert lengths == before


@pytest.mark.parametrize("l_max", [0, -1])
def test_a_budget_below_one_token_is_refused(l_max: int) -> None:
    with pytest.raises(ValueError, match="l_max must be at least 1"):
        group_window([1], l_max)


@pytest.mark.parametrize("bad", [0, -3])
def test_a_length_below_one_is_refused_and_its_position_named(bad: int) -> None:
    with pytest.raises(ValueError, match=f"got {bad} at position 2"):
        group_window([4, 1, bad, 9], 10)


@pytest.mark.parametrize("max_rows", [0, -1])
def test_a_max_rows_below_one_is_refused(max_rows: int) -> None:
    with pytest.raises(ValueError, match="max_rows"):
        group_window([5] * 6, 10, max_rows=max_rows)


COSTS = st.sampled_from([QuadraticCost(), QuadraticCost(0, 0.1), QuadraticCost(0.3, 0.02)])


@given(LENGTHS, BUDGETS, st.none() | st.integers(1, 12), COSTS)
def test_other_budgets_by_the_same_rule(lengths: list[int], l_max: int, max_rows: int | None, budget: QuadraticCost) -> None:
    limits = RowLimits(l_max, max_rows, budget)
    groups = as_lengths(carry_over(lengths, lambda length: limits(length)[0]), lengths)
    assert [length for group in groups for length in group] == sorted(lengths, reverse=True)
    full = [1, *(limits(group[-1])[0] for group in groups)]
    assert [len(group) for group in groups[:-1]] == full[: max(len(groups) - 1, 0)], "as many as the group before allows"
    for group in groups:
        assert len(group) == 1 or len(group) * budget(group[0]) <= l_max
        assert max_rows is None or len(group) <= max_rows


def test_a_length_below_one_is_refused_whatever_the_budget() -> None:
    with pytest.raises(ValueError, match="lengths must be at least 1, got 0 at position 1"):
        carry_over([3, 0], lambda length: 1)
