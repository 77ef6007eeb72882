"""The steps of "matched", worked out by hand: groups, quantiles of their costs, steps, and what goes into each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_lightning.plan import RoundPlanner, RowLimits
from odb_lightning.plan.matching import (
    NUM_QUANTILES,
    Groups,
    SortedWindow,
    cost_quantiles,
    form_groups,
    fullest_groups,
    num_steps,
    split_costliest,
    step_costs,
)
from odb_lightning.plan.protocol import INF, REPORT_SIZE

FAR = 10**6
"""Tickets to wait for, so many that a few don't count."""


def sorted_window(
    lengths: Sequence[int],
    l_max: int,
    tickets: Sequence[int] | None = None,
    patches: Sequence[int] | None = None,
    max_patches: int = 0,
) -> SortedWindow:
    """Samples of these lengths, the longest first; tickets are their positions, unless given."""
    rows, cost = zip(*map(RowLimits(l_max), lengths), strict=True)
    numbers = range(len(lengths)) if tickets is None else tickets
    counts = None if patches is None else np.array(patches)
    return SortedWindow(np.array(numbers), np.array(rows), np.array(cost), counts, max_patches)


def empty_window() -> SortedWindow:
    none = np.array([], dtype=np.int64)
    return SortedWindow(none, none, none)


class TestMost:
    def test_rows_and_what_is_left(self) -> None:
        assert sorted_window([7, 4, 4, 2, 2], 8).most().tolist() == [1, 2, 2, 2, 1]

    @pytest.mark.parametrize(
        ("patches", "max_patches", "expected"),
        [
            pytest.param([3, 1, 1, 1], 3, [1, 3, 2, 1], id="as-many-as-keep-within"),
            pytest.param([1, 1, 1, 1], 3, [3, 3, 2, 1], id="exactly-met"),
            pytest.param([0, 0, 0, 0], 3, [4, 3, 2, 1], id="none"),
            pytest.param([3, 0, 0, 1], 3, [3, 3, 2, 1], id="those-without-are-free"),
            pytest.param([9, 1, 9, 0], 3, [1, 1, 1, 1], id="a-lone-one-may-be-over"),
        ],
    )
    def test_patches(self, patches: list[int], max_patches: int, expected: list[int]) -> None:
        assert sorted_window([2] * 4, 8, patches=patches, max_patches=max_patches).most().tolist() == expected

    def test_the_smaller_of_both_budgets_counts(self) -> None:
        assert sorted_window([4, 4, 1, 1], 8, patches=[1, 1, 2, 0], max_patches=3).most().tolist() == [2, 2, 2, 1]


class TestFormGroups:
    def test_full_groups_where_lengths_are_alike(self) -> None:
        """Of [10, 9, 9, 9], 40 padded tokens for 37; a group of three would be 30 for 28, and leave a step of 9."""
        assert form_groups(sorted_window([10, 9, 9, 9], 40)) == Groups([[0, 1, 2, 3]], [40])

    def test_a_group_ends_where_padding_begins(self) -> None:
        """Nine rows keep within 90, but 4 of 10 without padding and then 5 of 1 are 45 padded tokens in all."""
        assert form_groups(sorted_window([10] * 4 + [1] * 5, 90)) == Groups([[0, 1, 2, 3], [4, 5, 6, 7, 8]], [40, 5])

    def test_the_costliest_first_whatever_their_lengths(self) -> None:
        assert form_groups(sorted_window([5, 4, 4], 8)) == Groups([[1, 2], [0]], [8, 5])

    def test_of_equal_cost_the_one_of_the_longest_first(self) -> None:
        assert form_groups(sorted_window([8, 4, 4, 2, 2], 8)) == Groups([[0], [1, 2], [3, 4]], [8, 8, 4])

    def test_tickets_not_positions(self) -> None:
        assert form_groups(sorted_window([5, 4, 4], 8, tickets=[30, 7, 19])).tickets == [[7, 19], [30]]

    def test_a_lone_sample_over_the_budget(self) -> None:
        assert form_groups(sorted_window([20, 4, 4], 8)) == Groups([[0], [1, 2]], [20, 8])

    def test_patches_end_a_group(self) -> None:
        groups = form_groups(sorted_window([2] * 4, 8, patches=[2, 1, 3, 0], max_patches=3))
        assert groups == Groups([[0, 1], [2, 3]], [4, 4])

    def test_no_sample_is_no_group(self) -> None:
        assert form_groups(empty_window()) == Groups([], [])


class TestCostQuantiles:
    def test_as_many_groups_as_quantiles_are_themselves(self) -> None:
        costs = list(range(NUM_QUANTILES, 0, -1))
        assert cost_quantiles(costs) == costs

    def test_of_three_times_as_many_the_middle_ones(self) -> None:
        costs = list(range(3 * NUM_QUANTILES, 0, -1))
        assert cost_quantiles(costs) == costs[1::3]

    def test_of_fewer_some_repeat(self) -> None:
        assert cost_quantiles([9, 4]) == [9] * (NUM_QUANTILES // 2) + [4] * (NUM_QUANTILES // 2)
        assert cost_quantiles([5]) == [5] * NUM_QUANTILES

    def test_without_groups_they_bound_nobody(self) -> None:
        assert cost_quantiles([]) == [0] * NUM_QUANTILES


class TestNumSteps:
    @pytest.mark.parametrize(
        ("most", "fewest", "bound", "is_last", "expected"),
        [
            pytest.param(100, 40, INF, False, 14, id="a-share-of-the-fewest"),
            pytest.param(100, 40, 5, False, 5, id="bounded"),
            pytest.param(2, 2, INF, False, 1, id="at-least-one"),
            pytest.param(1, 1, INF, False, 1, id="one-group-and-more-to-come"),
            pytest.param(9, 9, INF, False, 4, id="half-of-few"),
            pytest.param(16, 16, INF, False, 5, id="rounded-down"),
            pytest.param(100, 40, INF, True, 100, id="last-all-of-the-most"),
            pytest.param(100, 40, 30, True, 30, id="last-and-bounded"),
            pytest.param(1, 1, INF, True, 1, id="last-and-one"),
        ],
    )
    def test_examples(self, most: int, fewest: int, bound: int, is_last: bool, expected: int) -> None:
        assert num_steps(most, fewest, bound, is_last) == expected

    @given(st.integers(1, 2000), st.integers(1, 2000), st.integers(1, 2000), st.booleans())
    def test_it_is_never_more_than_all_ranks_can(self, most: int, fewest: int, bound: int, is_last: bool) -> None:
        fewest = min(fewest, most)
        steps = num_steps(most, fewest, bound, is_last)
        assert 1 <= steps <= min(bound, most if is_last else fewest)


class TestStepCosts:
    QUANTILES = tuple(64 * (16 - index) for index in range(16))

    def test_as_many_steps_as_quantiles(self) -> None:
        assert step_costs(self.QUANTILES, 16) == list(self.QUANTILES)

    def test_a_single_step_is_in_the_middle(self) -> None:
        """Of 576 and 512."""
        assert step_costs(self.QUANTILES, 1) == [544]

    def test_fewer_steps_are_between_two_quantiles(self) -> None:
        """The middle of each four: of 960 and 896, and so on."""
        assert step_costs(self.QUANTILES, 4) == [928, 672, 416, 160]

    def test_more_steps_are_interpolated_and_end_at_the_outer_ones(self) -> None:
        assert step_costs(self.QUANTILES, 32) == [1024, *range(1008, 64, -32), 64]

    def test_halves_are_rounded_down(self) -> None:
        assert step_costs([10] * 8 + [9] * 8, 1) == [9]

    @given(
        st.lists(st.integers(0, 10**12), min_size=NUM_QUANTILES, max_size=NUM_QUANTILES).map(
            lambda quantiles: sorted(quantiles, reverse=True)
        ),
        st.integers(1, 400),
    )
    def test_they_fall_and_keep_between_the_outer_quantiles(self, quantiles: list[int], steps: int) -> None:
        costs = step_costs(quantiles, steps)
        assert len(costs) == steps
        assert costs == sorted(costs, reverse=True)
        assert quantiles[0] >= costs[0]
        assert costs[-1] >= quantiles[-1]
        assert all(type(cost) is int for cost in costs)


class TestFullestGroups:
    @staticmethod
    def groups(window: SortedWindow, costs: list[int]) -> list[list[int]]:
        return fullest_groups(window, costs, now=len(window), latest=FAR)

    def test_each_step_takes_the_fullest_of_what_is_left(self) -> None:
        """Two of 4 are more than one of 7, and that is more than two of 2."""
        assert self.groups(sorted_window([7, 4, 4, 2, 2], 8), [8, 8, 8]) == [[1, 2], [0], [3, 4]]

    def test_each_keeps_within_the_cost_of_its_step(self) -> None:
        assert self.groups(sorted_window([7, 4, 4, 2, 2], 8), [8, 4, 8]) == [[1, 2], [3, 4], [0]]
        assert self.groups(sorted_window([7, 4, 4, 2, 2], 8), [7]) == [[0]]

    def test_what_would_have_to_be_cut_much_is_left_for_another_step(self) -> None:
        """The groups from the first four on are of 4, 3, 2 and 1. Two rows of 2 cost 4: half of the first, less than three
        quarters of the second, and all of the third. Three rows cost 6: enough of the first."""
        window = sorted_window([2, 2, 2, 2, 1, 1], 8)
        assert self.groups(window, [4]) == [[2, 3]]
        assert self.groups(window, [6]) == [[0, 1, 2]]
        assert self.groups(window, [8]) == [[0, 1, 2, 3]]

    def test_where_nothing_is_within_the_cost_the_shortest_goes_alone(self) -> None:
        assert self.groups(sorted_window([7, 4, 4, 2, 2], 8), [1, 0]) == [[4], [3]]

    def test_none_is_empty(self) -> None:
        assert self.groups(sorted_window([2, 2, 2], 8), [8, 8, 8]) == [[0], [1], [2]]
        assert self.groups(sorted_window([2, 2, 2, 2], 8), [8, 8]) == [[0, 1, 2], [3]]

    def test_more_steps_than_samples_are_refused(self) -> None:
        with pytest.raises(ValueError, match="2 samples can't be split into 3 groups"):
            self.groups(sorted_window([2, 2], 8), [8, 8, 8])

    def test_no_step_needs_no_sample(self) -> None:
        assert self.groups(empty_window(), []) == []

    def test_patches_are_within_their_budget(self) -> None:
        window = sorted_window([2] * 4, 8, patches=[3, 1, 1, 1], max_patches=3)
        assert self.groups(window, [8, 8]) == [[1, 2, 3], [0]]

    def test_patches_of_those_that_become_neighbours_are_counted_anew(self) -> None:
        """The outer two can't go together once the late one between them is out, alone, since it fits to the first only."""
        window = sorted_window([2, 2, 2], 8, tickets=[90, 0, 91], patches=[2, 1, 3], max_patches=3)
        assert window.most().tolist() == [2, 1, 1]
        assert fullest_groups(window, [2, 8], now=100, latest=99) == [[0], [90]]


class TestWaiting:
    def test_of_like_groups_the_one_that_waited_longer(self) -> None:
        lengths = [4, 4, 4, 4]
        assert fullest_groups(sorted_window(lengths, 8, [0, 1, 90, 91]), [8], now=100, latest=1000) == [[0, 1]]
        assert fullest_groups(sorted_window(lengths, 8, [90, 91, 0, 1]), [8], now=100, latest=1000) == [[0, 1]]
        assert fullest_groups(sorted_window(lengths, 8, [90, 0, 1, 91]), [8], now=100, latest=1000) == [[0, 1]]

    def test_waiting_does_not_make_up_for_much(self) -> None:
        """A quarter more at the most: 5 of two thirds of the limit are less than 8 just come."""
        window = sorted_window([5, 4, 4], 8, [0, 65, 66])
        assert fullest_groups(window, [8], now=66, latest=99) == [[65, 66]]

    @pytest.mark.parametrize(("ticket", "expected"), [(4, [[4]]), (5, [[101, 102, 103, 104]])])
    def test_later_than_the_latest_goes_first_even_over_the_cost_of_the_step(
        self, ticket: int, expected: list[list[int]]
    ) -> None:
        """At 105 tickets the fifth has waited for 101, the sixth for 100."""
        window = sorted_window([16, 2, 2, 2, 2], 8, [ticket, 101, 102, 103, 104])
        assert fullest_groups(window, [8], now=105, latest=100) == expected

    def test_a_late_one_over_the_cost_of_the_step_goes_in_a_group_of_its_own_size(self) -> None:
        window = sorted_window([16, 16, 2, 2], 32, [0, 101, 102, 103])
        assert fullest_groups(window, [2], now=105, latest=100) == [[0, 101]]

    def test_a_late_one_goes_with_others_if_there_is_such_a_group(self) -> None:
        """Three quarters of what the group from the longest on would be."""
        window = sorted_window([2, 2, 2, 2, 2], 8, [101, 102, 103, 0, 104])
        assert 0 in fullest_groups(window, [8], now=105, latest=100)[0]
        assert len(fullest_groups(window, [8], now=105, latest=100)[0]) == 4

    def test_a_late_short_one_goes_before_fuller_groups(self) -> None:
        window = sorted_window([4, 4, 4, 4, 1], 8, [101, 102, 103, 104, 0])
        assert fullest_groups(window, [8, 8], now=105, latest=100) == [[0], [101, 102]]

    def test_of_several_late_ones_the_oldest_first_a_step_for_each(self) -> None:
        window = sorted_window([16, 14, 12, 2], 8, [2, 0, 1, 104])
        assert fullest_groups(window, [8, 8], now=105, latest=100) == [[0], [1]]
        assert fullest_groups(window, [8, 8, 8, 8], now=105, latest=100) == [[0], [1], [2], [104]]


class TestSplitCostliest:
    GROUPS = Groups([[0, 1, 2], [3, 4]], [9, 4])

    @pytest.mark.parametrize(
        ("target", "expected"),
        [
            pytest.param(1, [[0, 1, 2]], id="the-costliest-stay"),
            pytest.param(2, [[0, 1, 2], [3, 4]], id="as-they-are"),
            # halves of 3 and 6: the order is that of their costs
            pytest.param(3, [[1, 2], [3, 4], [0]], id="halves-of-the-costliest"),
            pytest.param(4, [[3, 4], [0], [1], [2]], id="halves-of-a-half"),
            pytest.param(5, [[0], [1], [2], [3], [4]], id="all-alone"),
        ],
    )
    def test_examples(self, target: int, expected: list[list[int]]) -> None:
        assert split_costliest(self.GROUPS, target) == expected

    def test_a_single_sample_is_not_split(self) -> None:
        assert split_costliest(Groups([[0], [1, 2]], [10, 4]), 3) == [[0], [1], [2]]

    def test_more_groups_than_samples_are_refused(self) -> None:
        with pytest.raises(ValueError, match="5 samples can't be split into 6 groups"):
            split_costliest(self.GROUPS, 6)

    def test_the_given_groups_are_left_alone(self) -> None:
        groups = Groups([[0, 1], [2]], [4, 2])
        split_costliest(groups, 3)
        assert groups == Groups([[0, 1], [2]], [4, 2])


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 200), st.data())
def test_groups_of_any_window_keep_within_rows_patches_and_the_cost_of_their_step(
    lengths: list[int], l_max: int, data: st.DataObject
) -> None:
    lengths.sort(reverse=True)
    patches = data.draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
    max_patches = data.draw(st.integers(1, 30))
    window = sorted_window(lengths, l_max, patches=patches, max_patches=max_patches)
    costs = data.draw(st.lists(st.integers(1, 300), max_size=len(lengths)).map(lambda found: sorted(found, reverse=True)))
    formed, taken = form_groups(window), fullest_groups(window, costs, now=len(lengths), latest=FAR)
    target = data.draw(st.integers(1, len(lengths)))
    split = split_costliest(formed, target)
    assert sorted(position for group in formed.tickets for position in group) == list(range(len(lengths)))
    assert formed.costs == [len(group) * lengths[group[0]] for group in formed.tickets]
    assert formed.costs == sorted(formed.costs, reverse=True)
    assert len(split) == target
    for groups in formed.tickets, taken, split:
        flat = [position for group in groups for position in group]
        assert len(flat) == len(set(flat))
        for group in groups:
            assert group == sorted(group), "the longest first"
            assert group
            assert len(group) == 1 or len(group) * lengths[group[0]] <= l_max
            assert len(group) == 1 or sum(patches[position] for position in group) <= max_patches
    assert len(taken) == len(costs)
    for group, cost in zip(taken, costs, strict=True):
        assert len(group) == 1 or len(group) * lengths[group[0]] <= cost


@given(st.lists(st.integers(1, 10**6), max_size=300), st.integers(1, 300), st.sampled_from([1, 8, 64]), st.booleans())
def test_a_report_is_as_long_whatever_the_window_and_the_world(
    lengths: list[int], buffer_size: int, world_size: int, is_exhausted: bool
) -> None:
    reports = []
    for _ in range(world_size):
        planner = RoundPlanner(l_max=1000, buffer_size=buffer_size)
        for length in lengths[: planner.room]:
            planner.observe(length)
        reports.append(planner.report(is_exhausted=is_exhausted))
    for report in reports:
        assert len(report) == REPORT_SIZE + 1 + NUM_QUANTILES
        assert all(type(value) is int and -(2**63) <= value < 2**63 for value in report)
        is_fetching, *quantiles = report[REPORT_SIZE:]
        assert is_fetching == (not is_exhausted)
        assert quantiles == sorted(quantiles, reverse=True)
        assert bool(quantiles[0]) == bool(quantiles[-1]) == bool(lengths)


def test_a_report_of_the_papers_rule_is_ten_integers() -> None:
    planner = RoundPlanner(l_max=10, buffer_size=4, alignment="paper")
    planner.observe(3)
    assert len(planner.report(is_exhausted=False)) == REPORT_SIZE


def test_what_is_exchanged_are_the_groups_of_a_rank_and_their_costs() -> None:
    planner = RoundPlanner(l_max=8, buffer_size=8)
    for length in (2, 8, 4, 2, 4):
        planner.observe(length)
    report = planner.report(is_exhausted=True)
    assert report[0] == 3
    assert report[REPORT_SIZE:] == [0, *cost_quantiles([8, 8, 4])]
