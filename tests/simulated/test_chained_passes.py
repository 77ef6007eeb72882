"""Non-join: passes are chained until all ranks together have emitted the quota; what a pass leaves is carried over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_cases import (
    BOTH,
    MATCHED,
    PAPER,
    Case,
    ObservedPlanner,
    Rules,
    cases,
    cases_of_many_ranks,
    check_against_the_paper,
    check_agreement,
    check_steps,
)

from odb_lightning.plan import Outcome, RoundPlanner, SimulatedRun, simulate_ranks

of_both = pytest.mark.parametrize("rules", BOTH, ids=["matched", "paper"])


def check_quota(case: Case, run: SimulatedRun) -> None:
    sizes = [sum(map(len, step)) for step in run.steps]
    samples, most = sum(sizes), max(sizes)
    assert case.samples_due <= samples < case.samples_due + most
    assert samples - sizes[-1] < case.samples_due, "the step that reaches the quota is the last"
    if case.quota is None:
        assert case.num_views <= samples <= case.num_views + most, "N <= S_emit <= N + S_max"


def check_passes(case: Case, planners: Sequence[ObservedPlanner]) -> None:
    """A rank's views, pass after pass, are its tickets: ticket t is view `t % len(shard)` of its pass `t // len(shard)`."""
    ends = set[int]()
    for planner, shard in zip(planners, case.shards, strict=True):
        left, num_observed, num_ended = dict[int, int](), 0, 0
        emitted: list[int] = []
        for number, (plan, settled) in enumerate(zip(planner.plans, planner.settled, strict=True)):
            new = [(ticket, shard[ticket % len(shard)]) for ticket in range(num_observed, settled.num_observed)]
            assert list(settled.window_before.items()) == [*left.items(), *new], "left-overs stay, and views come in order"
            num_observed = settled.num_observed
            if shard and not settled.window_before and num_observed % len(shard) == 0:
                ends.add(number)
                num_ended = num_observed
            left = dict(settled.window_before)
            for ticket in (ticket for group in plan.groups for ticket in group):
                del left[ticket]
                emitted.append(ticket)
            assert settled.window_after == left, "what is not emitted stays"
        assert sorted([*emitted, *planner.window]) == list(range(num_observed)), "none skipped, none twice"
        assert set(range(num_ended)) <= set(emitted), "each view of each pass that the rank ended"
    pass_ends = [number for number, plan in enumerate(planners[0].plans) if plan.outcome is Outcome.PASS_END]
    assert pass_ends == sorted(ends), "the first rank that has emitted all of its pass ends it, nothing else does"


def check_rounds(case: Case, run: SimulatedRun, planners: Sequence[ObservedPlanner]) -> None:
    outcomes = [plan.outcome for plan in planners[0].plans]
    num_emits, num_ends = outcomes.count(Outcome.EMIT), outcomes.count(Outcome.PASS_END)
    num_active = sum(map(bool, case.shards))
    assert set(outcomes) <= {Outcome.EMIT, Outcome.PASS_END, Outcome.SKIP}
    assert run.num_rounds == len(outcomes) <= case.most_rounds
    assert run.num_passes == num_ends + 1
    assert outcomes[-1] is Outcome.EMIT
    assert num_emits <= -(-case.samples_due // num_active)
    assert num_ends < num_emits
    emitted = [planner.num_observed - len(planner.window) for planner in planners]
    assert num_ends <= sum(count // len(shard) for count, shard in zip(emitted, case.shards, strict=True) if shard)
    moves = [outcome for outcome in outcomes if outcome is not Outcome.SKIP]
    assert (Outcome.PASS_END, Outcome.PASS_END) not in pairwise(moves), "each pass emits"


def run_and_check(case: Case, planners: list[ObservedPlanner] | None = None) -> SimulatedRun:
    planners = planners or case.planners()
    run = case.run(planners)
    check_steps(case, run)
    check_agreement(planners)
    check_quota(case, run)
    check_passes(case, planners)
    check_rounds(case, run, planners)
    for rank, (planner, shard) in enumerate(zip(planners, case.shards, strict=True)):
        columns = [group for plan in planner.plans for group in plan.groups]
        assert [step[rank] for step in run.steps] == [[t % len(shard) for t in group] for group in columns[: len(run.steps)]]
        assert all(bool(step[rank]) == bool(shard) for step in run.steps), "idle: a rank without views, and no other"
    return run


@settings(max_examples=400)
@given(cases(joins=False))
def test_guarantees_for_any_shards(case: Case) -> None:
    run_and_check(case)


@settings(max_examples=80)
@given(cases_of_many_ranks(joins=False))
def test_guarantees_on_up_to_64_ranks(case: Case) -> None:
    run_and_check(case)


@settings(max_examples=300)
@given(cases(joins=False))
def test_same_passes_as_the_protocol_of_the_paper(case: Case) -> None:
    check_against_the_paper(case)


@given(cases(joins=False), st.data())
def test_a_rank_without_views_changes_nothing_for_the_others(case: Case, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(case.shards)))
    more = replace(case, shards=[*case.shards[:rank], [], *case.shards[rank:]])
    if case.capacities:
        more = replace(more, capacities=[*case.capacities[:rank], [1, 0, 0], *case.capacities[rank:]])
    run, run_of_more = case.run(), more.run()
    assert [step[rank] for step in run_of_more.steps] == [[]] * len(run.steps)
    assert [step[:rank] + step[rank + 1 :] for step in run_of_more.steps] == run.steps
    assert (run_of_more.num_rounds, run_of_more.num_passes) == (run.num_rounds, run.num_passes)


@given(cases(joins=False), st.integers(1, 100))
def test_a_larger_quota_only_adds_steps(case: Case, more: int) -> None:
    run, longer = case.run(), replace(case, quota=case.samples_due + more).run()
    assert longer.steps[: len(run.steps)] == run.steps
    assert longer.num_rounds >= run.num_rounds
    assert longer.num_passes >= run.num_passes


@given(cases(max_ranks=1, joins=False), st.integers(1, 3))
def test_a_rank_alone_repeats_the_epoch_of_join(case: Case, times: int) -> None:
    case = replace(case, order_seed=None, capacities=None, quota=times * case.num_views)
    run, join = run_and_check(case), replace(case, joins=True, quota=None).run()
    assert run.steps == join.steps * times
    assert run.num_passes == times


@given(cases(joins=False))
def test_a_quota_of_one_is_one_step(case: Case) -> None:
    run = run_and_check(replace(case, quota=1))
    assert len(run.steps) == run.num_passes == 1


@of_both
@pytest.mark.parametrize("sizes", [[24, 5], [5, 24], [24, 0, 5]])
@pytest.mark.parametrize("buffer_size", [1, 4, 1024])
@pytest.mark.parametrize("l_max", [30, 100])
def test_shards_of_24_and_5_take_more_than_one_pass(sizes: list[int], buffer_size: int, l_max: int, rules: Rules) -> None:
    case = Case([[30] * size for size in sizes], l_max, buffer_size, joins=False, rules=rules)
    run = run_and_check(case)
    samples = [sum(map(len, step)) for step in run.steps]
    assert run.num_passes > 1
    assert 29 <= sum(samples) <= 29 + max(samples)


@of_both
def test_what_a_pass_leaves_goes_out_in_the_next(rules: Rules) -> None:
    """Rank 0 has three views for each one of rank 1, which ends every pass after its own view."""
    case = Case([[10, 10, 10], [10]], l_max=10, buffer_size=2, joins=False, quota=12, rules=rules)
    planners = case.planners()
    run = run_and_check(case, planners)
    assert run.num_passes == 6
    # rank 0 goes once through its shard while rank 1 goes three times, and then begins again
    assert sorted(step[0][0] for step in run.steps) == [0, 0, 1, 1, 2, 2]
    assert [step[1] for step in run.steps] == [[0]] * 6
    assert [plan.outcome for plan in planners[0].plans] == [Outcome.EMIT, Outcome.PASS_END] * 5 + [Outcome.EMIT]


@pytest.mark.parametrize(("rules", "emitted"), [(PAPER, [5, 4, 3]), (MATCHED, [0, 1, 2])], ids=["paper", "matched"])
def test_the_rest_of_a_round_is_cut_at_the_quota(rules: Rules, emitted: list[int]) -> None:
    case = Case([[10] * 6, [10] * 6], l_max=10, buffer_size=6, joins=False, quota=5, rules=rules)
    planners = case.planners()
    run = case.run(planners)
    assert len(planners[0].plans[0].groups) == 6
    assert run == SimulatedRun([[[position], [position]] for position in emitted], num_rounds=1)


@pytest.mark.parametrize("world_size", [1, 2, 64])
def test_a_pass_in_which_no_rank_has_a_view_is_an_error(world_size: int) -> None:
    with pytest.raises(RuntimeError, match="round 1 came to end"):
        simulate_ranks([[]] * world_size, lambda _: RoundPlanner(l_max=9, buffer_size=4, joins=False), quota=1)


def test_no_view_at_all_is_an_error_with_the_default_quota_too() -> None:
    with pytest.raises(RuntimeError, match="round 1 came to end"):
        simulate_ranks([[]], lambda _: RoundPlanner(l_max=9, buffer_size=4, joins=False))


def test_an_epoch_may_take_all_the_rounds_it_is_allowed() -> None:
    run = simulate_ranks([[1]], lambda _: RoundPlanner(l_max=9, buffer_size=4, joins=False), max_rounds=1)
    assert run == SimulatedRun([[[0]]], num_rounds=1)


def test_a_capacity_of_zero_for_ever_emits_nothing() -> None:
    planner = ObservedPlanner((0,), l_max=10, buffer_size=3, joins=False)
    with pytest.raises(RuntimeError, match="did not end within 20 rounds"):
        simulate_ranks([[1, 2, 3]], lambda _: planner, max_rounds=20, quota=1)
    assert planner.window == {0: 1, 1: 2, 2: 3}


def test_the_quota_means_nothing_in_join() -> None:
    shards = [[10] * 5, [10] * 2]
    runs = [simulate_ranks(shards, lambda _: RoundPlanner(l_max=10, buffer_size=4), quota=quota) for quota in (None, 1, 99)]
    assert runs[0] == runs[1] == runs[2]


def reduce_max(reports: Sequence[Sequence[int]]) -> list[int]:
    return [max(column) for column in zip(*reports, strict=True)]


def test_a_rank_that_has_none_in_a_later_pass_does_not_end_it() -> None:
    """Views can be missing in one pass alone, where a policy drops what is too long."""
    alternating, steady = (RoundPlanner(l_max=10, buffer_size=1, joins=False) for _ in range(2))

    def settle(alternating_ended: bool, steady_ended: bool) -> Outcome:
        reports = [alternating.report(is_exhausted=alternating_ended), steady.report(is_exhausted=steady_ended)]
        plans = [planner.settle(reduce_max(reports)) for planner in (alternating, steady)]
        assert plans[0].outcome is plans[1].outcome
        return plans[0].outcome

    alternating.observe(10)
    steady.observe(10)
    assert settle(True, False) is Outcome.EMIT
    steady.observe(10)
    assert settle(True, False) is Outcome.PASS_END
    # the second pass gives the first rank nothing: the other goes on to its own end
    assert settle(True, False) is Outcome.EMIT
    assert settle(True, True) is Outcome.PASS_END
    # in the third, neither has a view
    assert settle(True, True) is Outcome.END


def test_a_view_carried_over_counts_as_one_of_the_pass() -> None:
    planner = RoundPlanner(l_max=10, buffer_size=2, joins=False)
    peer = RoundPlanner(l_max=10, buffer_size=2, joins=False)
    for length in (10, 10):
        planner.observe(length)
    peer.observe(10)
    outcomes = []
    for _ in range(4):
        reduced = reduce_max([planner.report(is_exhausted=True), peer.report(is_exhausted=True)])
        plans = planner.settle(reduced), peer.settle(reduced)
        assert plans[0].outcome is plans[1].outcome
        outcomes.append(plans[0].outcome)
    # the peer ends the first pass; the one view left goes out in the second, and is a reason to end it
    assert outcomes == [Outcome.EMIT, Outcome.PASS_END, Outcome.EMIT, Outcome.PASS_END]


def test_a_rank_that_learns_late_of_its_end_ends_the_pass_then() -> None:
    early, late = (RoundPlanner(l_max=10, buffer_size=2, joins=False) for _ in range(2))
    late.observe(10)
    outcomes = []
    for late_has_ended in (False, False, False, True):
        # the other rank has a view in the first two rounds, and waits in the third
        if len(outcomes) < 2:
            early.observe(10)
        reduced = reduce_max([early.report(is_exhausted=False), late.report(is_exhausted=late_has_ended)])
        plans = early.settle(reduced), late.settle(reduced)
        assert plans[0].outcome is plans[1].outcome
        outcomes.append(plans[0].outcome)
    assert outcomes == [Outcome.EMIT, Outcome.EMIT, Outcome.SKIP, Outcome.PASS_END]


def test_a_rank_that_joins_does_not_agree_with_one_that_does_not() -> None:
    with pytest.raises(RuntimeError, match="ranks disagree in round 2"):
        simulate_ranks([[10], [10, 10]], lambda rank: RoundPlanner(l_max=10, buffer_size=1, joins=rank == 0), quota=9)
