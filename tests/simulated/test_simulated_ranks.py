"""The guarantees of the plan, for any shards, on ranks simulated in one process."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

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
    check_waits,
)

from odb_lightning.plan import Outcome, RoundPlan, RoundPlanner, SimulatedRun, simulate_ranks

of_both = pytest.mark.parametrize("rules", BOTH, ids=["matched", "paper"])


def check_guarantees(case: Case, run: SimulatedRun, planners: list[ObservedPlanner]) -> None:
    check_steps(case, run)
    check_agreement(planners)
    for rank, shard in enumerate(case.shards):
        assert sorted(p for step in run.steps for p in step[rank]) == list(range(len(shard))), "each view exactly once"
        idle = [not step[rank] for step in run.steps]
        assert idle == sorted(idle), "a rank is idle only after its last view"
    outcomes = [plan.outcome for plan in planners[0].plans]
    assert outcomes.count(Outcome.END) == 1
    assert outcomes[-1] is Outcome.END
    assert outcomes.count(Outcome.EMIT) <= max(map(len, case.shards))
    assert run.num_rounds == len(outcomes) <= case.most_rounds
    assert run.num_passes == 1
    assert not any(planner.window for planner in planners)


def run_and_check(case: Case) -> SimulatedRun:
    planners = case.planners()
    run = case.run(planners)
    check_guarantees(case, run, planners)
    if case.rules.alignment == "matched":
        check_waits(case, planners)
    return run


@settings(max_examples=300)
@given(cases())
def test_guarantees_for_any_shards(case: Case) -> None:
    run_and_check(case)


@settings(max_examples=300)
@given(cases())
def test_same_epoch_as_the_protocol_of_the_paper(case: Case) -> None:
    check_against_the_paper(case)


@of_both
@pytest.mark.parametrize("world_size", [16, 33, 64])
@pytest.mark.parametrize("kind", ["equal", "unequal", "one-rank-has-all", "outliers-on-one-rank", "fewer-views-than-ranks"])
def test_guarantees_on_many_ranks(world_size: int, kind: str, rules: Rules) -> None:
    rng = random.Random(f"{world_size}/{kind}")
    sizes = {
        "equal": [40] * world_size,
        "unequal": [rng.randrange(60) for _ in range(world_size)],
        "one-rank-has-all": [200, *[0] * (world_size - 1)],
        "outliers-on-one-rank": [40] * world_size,
        "fewer-views-than-ranks": [1] * 5 + [0] * (world_size - 5),
    }[kind]
    shards = [[int(rng.lognormvariate(4, 0.8)) + 1 for _ in range(size)] for size in sizes]
    if kind == "outliers-on-one-rank":
        shards[3] = [length * 30 for length in shards[3]]
    run_and_check(Case(shards, l_max=512, buffer_size=16, order_seed="3/1", rules=rules))


@settings(max_examples=250)
@given(cases_of_many_ranks())
def test_guarantees_on_up_to_64_ranks(case: Case) -> None:
    run_and_check(case)


@settings(max_examples=25)
@given(cases_of_many_ranks())
def test_same_epoch_as_the_protocol_of_the_paper_on_up_to_64_ranks(case: Case) -> None:
    check_against_the_paper(case)


@given(cases(), st.data())
def test_a_rank_without_views_changes_nothing_for_the_others(case: Case, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(case.shards)))
    more = replace(case, shards=[*case.shards[:rank], [], *case.shards[rank:]])
    if case.capacities:
        more = replace(more, capacities=[*case.capacities[:rank], [1, 0, 0], *case.capacities[rank:]])
    run, run_of_more = case.run(), more.run()
    assert [step[rank] for step in run_of_more.steps] == [[]] * len(run.steps)
    assert [step[:rank] + step[rank + 1 :] for step in run_of_more.steps] == run.steps
    assert run_of_more.num_rounds == run.num_rounds


@pytest.mark.parametrize(("rules", "groups"), [(PAPER, [[513], [10], [10]]), (MATCHED, [[513], [10, 10]])])
@pytest.mark.parametrize("world_size", [1, 2])
def test_one_token_over_the_budget_goes_out_alone(world_size: int, rules: Rules, groups: list[list[int]]) -> None:
    """C01"""
    case = Case([[513, 10, 10]] * world_size, l_max=512, buffer_size=1024, rules=rules)
    assert case.lengths(run_and_check(case)) == [[group] * world_size for group in groups]


@pytest.mark.parametrize(
    ("rules", "lengths", "l_max", "groups"),
    [
        (PAPER, [100, 10, 10, 10, 100], 150, [[100], [100], [10], [10, 10]]),
        (PAPER, [1, 1, 1, 1, 1, 20], 50, [[20], [1, 1], [1, 1, 1]]),
        (MATCHED, [100, 10, 10, 10, 100], 150, [[100], [100], [10, 10, 10]]),
        (MATCHED, [1, 1, 1, 1, 1, 20], 50, [[20], [1, 1, 1, 1, 1]]),
    ],
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_long_sample_never_goes_with_short_ones_over_the_padded_budget(
    rules: Rules, lengths: list[int], l_max: int, groups: list[list[int]], world_size: int
) -> None:
    """C02"""
    case = Case([lengths] * world_size, l_max, buffer_size=1024, rules=rules)
    assert case.lengths(run_and_check(case)) == [[group] * world_size for group in groups]


@of_both
@pytest.mark.parametrize("buffer_size", [1, 2, 4, 1024])
def test_a_long_sample_that_joins_late_keeps_the_padded_budget(buffer_size: int, rules: Rules) -> None:
    """C02, in every order in which the samples come."""
    for lengths, l_max in ([10, 10, 10, 100, 100], 150), ([1, 1, 1, 1, 1, 20], 50):
        for start in range(len(lengths)):
            case = Case([lengths[start:] + lengths[:start], lengths], l_max, buffer_size, rules=rules)
            run_and_check(case)


@of_both
def test_ten_samples_and_a_long_one_are_all_there(rules: Rules) -> None:
    """C04"""
    for shards in [[64] * 5 + [900], [64] * 5], [[900] + [64] * 5, [64] * 5], [[64] * 10, [900]]:
        run = run_and_check(Case(shards, l_max=1024, buffer_size=8, rules=rules))
        assert sum(len(group) for step in run.steps for group in step) == 11


@of_both
@pytest.mark.parametrize("buffer_size", [1, 2, 1024])
def test_three_views_on_four_ranks_is_one_step_with_one_idle(buffer_size: int, rules: Rules) -> None:
    """C05"""
    case = Case([[5], [6], [7], []], l_max=1024, buffer_size=buffer_size, rules=rules)
    assert run_and_check(case).steps == [[[0], [0], [0], []]]


@of_both
def test_an_empty_shard_takes_part_without_views(rules: Rules) -> None:
    """C05"""
    run = run_and_check(Case([[18, 20, 30], []], l_max=30, buffer_size=8, rules=rules))
    assert run.steps == [[[2], []], [[1], []], [[0], []]]


@of_both
@pytest.mark.parametrize("sizes", [[8, 2], [4, 4, 8, 4], [5, 3], [5, 0], [2, 8]])
@pytest.mark.parametrize("buffer_size", [1, 3, 1024])
def test_full_batches_of_one_make_as_many_steps_as_the_largest_shard(sizes: list[int], buffer_size: int, rules: Rules) -> None:
    """C16, C21: eight against two are eight steps, six of them idle on the second rank."""
    run = run_and_check(Case([[100] * size for size in sizes], l_max=100, buffer_size=buffer_size, rules=rules))
    assert len(run.steps) == max(sizes)
    for rank, size in enumerate(sizes):
        assert [len(step[rank]) for step in run.steps] == [1] * size + [0] * (max(sizes) - size)


@of_both
@pytest.mark.parametrize("sizes", [[8, 5], [40, 29], [29, 40], [287, 286], [450, 150], [575, 0]])
@pytest.mark.parametrize("buffer_size", [1, 16, 1024])
@pytest.mark.parametrize("l_max", [1, 120, 4096])
def test_uneven_shards_lose_no_view(sizes: list[int], buffer_size: int, l_max: int, rules: Rules) -> None:
    rng = random.Random(f"{sizes}")
    shards = [[int(rng.lognormvariate(3.5, 0.6)) + 1 for _ in range(size)] for size in sizes]
    run = run_and_check(Case(shards, l_max, buffer_size, rules=rules))
    assert sum(len(group) for step in run.steps for group in step) == sum(sizes)


@of_both
def test_no_views_at_all_is_an_epoch_without_steps(rules: Rules) -> None:
    assert Case([[], []], l_max=10, buffer_size=4, rules=rules).run() == SimulatedRun([], num_rounds=1)


@of_both
def test_a_capacity_of_zero_on_one_rank_skips_the_round_for_all(rules: Rules) -> None:
    case = Case([[10] * 4, [10] * 4], l_max=10, buffer_size=4, capacities=[[2, 2], [2, 0]], rules=rules)
    planners = case.planners()
    run = case.run(planners)
    # at the fourth round both have finished, so that a capacity of zero no longer counts
    outcomes = [Outcome.EMIT, Outcome.SKIP, Outcome.EMIT, Outcome.END]
    assert [[plan.outcome for plan in planner.plans] for planner in planners] == [outcomes, outcomes]
    assert len(run.steps) == 4


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        # formed: [4] [3] [2, 1] [0]; the largest stays, and of the equal ones the earliest
        (PAPER, [[[4], [2, 1]], [[3], [0]], []]),
        # formed: [4] [3] [0, 1, 2], which cost 30, 20, and 30; the costliest stay
        (MATCHED, [[[4], [0, 1, 2]], [[3]], []]),
    ],
)
def test_a_capacity_bounds_the_groups_of_a_round_and_the_rest_waits(rules: Rules, expected: list[Any]) -> None:
    case = Case([[10, 10, 10, 20, 30]], l_max=40, buffer_size=5, capacities=[[2]], rules=rules)
    planners = case.planners()
    case.run(planners)
    assert [plan.groups for plan in planners[0].plans] == expected


@given(st.integers(0, 5), st.integers(1, 20), st.sampled_from(BOTH))
def test_a_finished_rank_without_capacity_does_not_block_the_others(early: int, late: int, rules: Rules) -> None:
    class FullOnceFinished(ObservedPlanner):
        def report(self, *, is_exhausted: bool, stop_code: int = 0) -> list[int]:
            self.capacities = (0,) if is_exhausted and not self.window else (1,)
            return super().report(is_exhausted=is_exhausted, stop_code=stop_code)

    shards = [[10] * early, [10] * (early + late)]
    run = simulate_ranks(shards, lambda _: FullOnceFinished(buffer_size=3, **rules.options(10, None)))
    assert len(run.steps) == early + late
    assert run.num_rounds == early + late + 1


@of_both
def test_a_capacity_of_zero_for_ever_never_ends_and_loses_nothing(rules: Rules) -> None:
    planner = ObservedPlanner((0,), buffer_size=3, **rules.options(10, None))
    with pytest.raises(RuntimeError, match="did not end within 20 rounds"):
        simulate_ranks([[1, 2, 3]], lambda _: planner, max_rounds=20)
    assert planner.window == {0: 1, 1: 2, 2: 3}


@given(cases(with_capacities=False))
def test_the_order_seed_moves_whole_steps_within_their_round(case: Case) -> None:
    plain, seeded = replace(case, order_seed=None).planners(), replace(case, order_seed="4/2").planners()
    case.run(plain)
    case.run(seeded)

    def columns(planners: list[ObservedPlanner], round_number: int) -> list[Any]:
        """What all ranks do in each step of the round: only whole columns may move."""
        return sorted(zip(*(planner.plans[round_number].groups for planner in planners), strict=True))

    assert len(plain[0].plans) == len(seeded[0].plans)
    for round_number in range(len(plain[0].plans)):
        assert columns(plain, round_number) == columns(seeded, round_number)


@pytest.mark.parametrize(
    ("rules", "buffer_size", "first"),
    [(PAPER, 20, [[19 - position] for position in range(20)]), (MATCHED, 60, [[ticket] for ticket in range(21)])],
    ids=["paper", "matched"],
)
def test_the_order_seed_and_the_round_decide_the_order(rules: Rules, buffer_size: int, first: list[list[int]]) -> None:
    """Groups of one: by the paper's rule all of the window, the last first; matched, a share of it, the oldest first."""

    def orders(order_seed: str | None) -> list[list[list[int]]]:
        case = Case([[10] * 3 * buffer_size], 10, buffer_size, order_seed=order_seed, rules=rules)
        planners = case.planners()
        case.run(planners)
        return [plan.groups for plan in planners[0].plans[:3]]

    def places(order: list[list[int]]) -> list[int]:
        return [sorted(order).index(group) for group in order]

    assert orders(None)[0] == first
    assert orders("1/0") == orders("1/0")
    assert sorted(orders("1/0")[0]) == sorted(first)
    assert orders("1/0")[0] != orders("1/1")[0] != orders(None)[0]
    assert places(orders("1/0")[0]) != places(orders("1/0")[1])


@given(cases())
def test_the_same_input_gives_the_same_epoch(case: Case) -> None:
    assert case.run() == case.run()


def drive(case: Case, planners: list[ObservedPlanner], rng: random.Random, end_known_late: bool = False) -> None:
    """The rounds of `simulate_ranks`, but views enter the windows in any interleaving of the ranks, in one go or in several,
    and a rank may learn only in the next round that its shard has ended."""
    known = [False] * len(planners)
    for _ in range(case.most_rounds + 1):
        hungry = [
            rank for rank, planner in enumerate(planners) if planner.room and planner.num_observed < len(case.shards[rank])
        ]
        while hungry:
            rank = rng.choice(hungry)
            planner, left = planners[rank], case.shards[rank][planners[rank].num_observed :]
            for length in left[: rng.randint(1, planner.room)]:
                planner.observe(length)
            if not planner.room or planner.num_observed == len(case.shards[rank]):
                hungry.remove(rank)
        ended = [planner.num_observed == len(shard) for planner, shard in zip(planners, case.shards, strict=True)]
        known, told = ended, known if end_known_late else ended
        reports = [planner.report(is_exhausted=end) for planner, end in zip(planners, told, strict=True)]
        reduced = [max(column) for column in zip(*reports, strict=True)]
        if {planner.settle(reduced).outcome for planner in planners} == {Outcome.END}:
            return
    raise AssertionError("the epoch did not end")


@given(cases(), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_how_views_are_fed(case: Case, rng: random.Random) -> None:
    steady, fed = case.planners(), case.planners()
    case.run(steady)
    drive(case, fed, rng)
    assert [planner.plans for planner in fed] == [planner.plans for planner in steady]


@given(cases(with_capacities=False), st.randoms(use_true_random=False))
def test_to_learn_late_of_the_end_costs_one_round_and_changes_no_step_of_the_papers(case: Case, rng: random.Random) -> None:
    case = replace(case, rules=replace(case.rules, alignment="paper", max_patches=None))
    steady, late = case.planners(), case.planners()
    case.run(steady)
    drive(case, late, rng, end_known_late=True)
    for planner, in_time in zip(late, steady, strict=True):
        assert len(planner.plans) - len(in_time.plans) in (0, 1)
        assert [plan for plan in planner.plans if plan.groups] == [plan for plan in in_time.plans if plan.groups]


@given(cases(with_capacities=False), st.randoms(use_true_random=False))
def test_to_learn_late_of_the_end_loses_nothing(case: Case, rng: random.Random) -> None:
    planners = case.planners()
    drive(case, planners, rng, end_known_late=True)
    check_agreement(planners)
    for planner, shard in zip(planners, case.shards, strict=True):
        groups = [group for plan in planner.plans for group in plan.groups]
        assert sorted(ticket for group in groups for ticket in group) == list(range(len(shard)))


@of_both
def test_an_empty_window_is_not_the_end_while_the_shard_has_not_ended(rules: Rules) -> None:
    planner = RoundPlanner(buffer_size=2, **rules.options(10, None))
    outcomes = [planner.settle(planner.report(is_exhausted=has_ended)).outcome for has_ended in (False, True)]
    assert outcomes == [Outcome.SKIP, Outcome.END]


@of_both
def test_a_window_is_as_large_as_the_buffer_and_full_from_the_first_round(rules: Rules) -> None:
    sizes: list[int] = []

    class Watching(RoundPlanner):
        def report(self, *, is_exhausted: bool, stop_code: int = 0) -> list[int]:
            sizes.append(len(self.window))
            return super().report(is_exhausted=is_exhausted, stop_code=stop_code)

    simulate_ranks([[5] * 10], lambda _: Watching(buffer_size=4, capacity=1, **rules.options(10, None)))
    assert sizes[0] == 4
    assert max(sizes) == 4


@of_both
@pytest.mark.parametrize("changed", [{"knobs": "l_max=11"}, {"rounds": 1}])
def test_ranks_with_other_knobs_or_rounds_have_diverged(changed: dict[str, Any], rules: Rules) -> None:
    def make_planner(rank: int) -> RoundPlanner:
        knobs = changed.get("knobs", "l_max=10") if rank else "l_max=10"
        planner = RoundPlanner(buffer_size=4, knobs=knobs, **rules.options(10, None))
        planner.num_rounds = changed.get("rounds", 0) * rank
        return planner

    with pytest.raises(RuntimeError, match="diverged"):
        simulate_ranks([[1, 2], [3, 4]], make_planner)


@of_both
def test_a_stop_of_one_rank_reaches_all_and_nothing_leaves_a_window(rules: Rules) -> None:
    planners = [RoundPlanner(buffer_size=4, **rules.options(10, None)) for _ in range(2)]
    for planner in planners:
        planner.observe(5)
    reports = [planners[0].report(is_exhausted=False), planners[1].report(is_exhausted=False, stop_code=3)]
    reduced = [max(column) for column in zip(*reports, strict=True)]
    for planner in planners:
        assert planner.settle(reduced) == RoundPlan(Outcome.STOP, [], stop_code=3)
        assert planner.window == {0: 5}
