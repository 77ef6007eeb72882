"""The guarantees of the plan, for any shards, on ranks simulated in one process."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_protocol import naive_epoch
from rank_cases import Case, ObservedPlanner, cases

from odb_lightning.plan import Outcome, RoundPlan, RoundPlanner, SimulatedRun, simulate_ranks
from odb_lightning.plan.protocol import INF


def check_guarantees(case: Case, run: SimulatedRun) -> None:
    for rank, shard in enumerate(case.shards):
        assert sorted(p for step in run.steps for p in step[rank]) == list(range(len(shard))), "each view exactly once"
        idle = [not step[rank] for step in run.steps]
        assert idle == sorted(idle), "a rank is idle only after its last view"
    for step, groups in zip(run.steps, case.lengths(run), strict=True):
        assert len(step) == len(case.shards), "each rank has an entry in each step"
        assert any(step), "never idle on all ranks"
        for group in groups:
            assert group == sorted(group, reverse=True), "the longest first"
            assert len(group) <= 1 or len(group) * group[0] <= case.l_max, "the padded budget"
            assert case.max_rows is None or len(group) <= case.max_rows


@settings(max_examples=300)
@given(cases())
def test_guarantees_for_any_shards(case: Case) -> None:
    planners = case.planners()
    run = case.run(planners)
    check_guarantees(case, run)
    assert run.num_rounds <= case.most_rounds
    assert [plan.outcome for plan in planners[0].plans].count(Outcome.END) == 1
    for plans in zip(*(planner.plans for planner in planners), strict=True):
        assert len({plan.outcome for plan in plans}) == 1, "the same outcome on all ranks"
        assert len({len(plan.groups) for plan in plans}) == 1, "the same number of steps on all ranks"
    for planner in planners:
        assert not planner.window


@settings(max_examples=300)
@given(cases())
def test_same_epoch_as_the_protocol_of_the_paper(case: Case) -> None:
    case = replace(case, order_seed=None)
    planners = case.planners()
    run = case.run(planners)
    capacities = case.capacities or [[INF]] * len(case.shards)
    steps, rounds = naive_epoch(case.shards, case.l_max, case.buffer_size, case.max_rows, capacities)
    assert [plan.outcome.value for plan in planners[0].plans] == rounds
    assert case.lengths(run) == steps


@pytest.mark.parametrize("world_size", [16, 33, 64])
@pytest.mark.parametrize("kind", ["equal", "unequal", "one-rank-has-all", "outliers-on-one-rank", "fewer-views-than-ranks"])
def test_guarantees_on_many_ranks(world_size: int, kind: str) -> None:
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
    case = Case(shards, l_max=512, buffer_size=16, order_seed="3/1")
    check_guarantees(case, case.run())


@settings(max_examples=5)
@given(cases(max_ranks=64))
def test_guarantees_on_up_to_64_ranks(case: Case) -> None:
    check_guarantees(case, case.run())


def test_eight_views_against_two_gives_eight_steps_and_six_idle() -> None:
    case = Case([[100] * 8, [100] * 2], l_max=100, buffer_size=1024)
    run = case.run()
    assert len(run.steps) == 8
    assert [len(step[0]) for step in run.steps] == [1] * 8
    assert [len(step[1]) for step in run.steps] == [1, 1, 0, 0, 0, 0, 0, 0]


def test_three_views_on_four_ranks_is_one_step_with_one_idle() -> None:
    assert Case([[5], [6], [7], []], l_max=1024, buffer_size=1024).run().steps == [[[0], [0], [0], []]]


def test_no_views_at_all_is_an_epoch_without_steps() -> None:
    assert Case([[], []], l_max=10, buffer_size=4).run() == SimulatedRun([], num_rounds=1)


def test_an_empty_shard_takes_part_without_views() -> None:
    run = Case([[10, 20, 30], []], l_max=30, buffer_size=8).run()
    assert run.steps == [[[2], []], [[1], []], [[0], []]]


def test_eleven_views_with_one_outlier_are_all_there() -> None:
    case = Case([[64] * 5 + [900], [64] * 5], l_max=1024, buffer_size=8)
    run = case.run()
    check_guarantees(case, run)
    assert sum(len(group) for step in run.steps for group in step) == 11


def test_a_capacity_of_zero_on_one_rank_skips_the_round_for_all() -> None:
    case = Case([[10] * 4, [10] * 4], l_max=10, buffer_size=4, capacities=[[2, 2], [2, 0]])
    planners = case.planners()
    run = case.run(planners)
    # at the fourth round both have finished, so that a capacity of zero no longer counts
    outcomes = [Outcome.EMIT, Outcome.SKIP, Outcome.EMIT, Outcome.END]
    assert [[plan.outcome for plan in planner.plans] for planner in planners] == [outcomes, outcomes]
    assert len(run.steps) == 4


def test_a_capacity_bounds_the_groups_of_a_round_and_the_rest_waits() -> None:
    case = Case([[10, 10, 10, 20, 30]], l_max=40, buffer_size=5, capacities=[[2]])
    planners = case.planners()
    case.run(planners)
    # formed: [4] [3] [2, 1] [0]; the largest stays, and of the equal ones the earliest
    assert [plan.groups for plan in planners[0].plans] == [[[4], [2, 1]], [[3], [0]], []]


@given(st.integers(0, 5), st.integers(1, 20))
def test_a_finished_rank_without_capacity_does_not_block_the_others(early: int, late: int) -> None:
    class FullOnceFinished(ObservedPlanner):
        def report(self, *, is_exhausted: bool, stop_code: int = 0) -> list[int]:
            self.capacities = (0,) if is_exhausted and not self.window else (1,)
            return super().report(is_exhausted=is_exhausted, stop_code=stop_code)

    shards = [[10] * early, [10] * (early + late)]
    run = simulate_ranks(shards, lambda _: FullOnceFinished(l_max=10, buffer_size=3))
    assert len(run.steps) == early + late
    assert run.num_rounds == early + late + 1


def test_a_capacity_of_zero_for_ever_never_ends_and_loses_nothing() -> None:
    planner = ObservedPlanner((0,), l_max=10, buffer_size=3)
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


def test_the_order_seed_and_the_round_decide_the_order() -> None:
    def orders(order_seed: str | None) -> list[list[list[int]]]:
        planners = Case([[10] * 60], l_max=10, buffer_size=20, order_seed=order_seed).planners()
        simulate_ranks([[10] * 60], planners.__getitem__)
        return [[[ticket % 20 for ticket in group] for group in plan.groups] for plan in planners[0].plans[:3]]

    assert orders(None)[0] == [[19 - position] for position in range(20)]
    assert orders("1/0") == orders("1/0")
    assert orders("1/0")[0] != orders("1/1")[0] != orders(None)[0]
    assert orders("1/0")[0] != orders("1/0")[1]


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
def test_to_learn_late_of_the_end_costs_one_round_and_changes_no_step(case: Case, rng: random.Random) -> None:
    steady, late = case.planners(), case.planners()
    case.run(steady)
    drive(case, late, rng, end_known_late=True)
    for planner, in_time in zip(late, steady, strict=True):
        assert len(planner.plans) - len(in_time.plans) in (0, 1)
        assert [plan for plan in planner.plans if plan.groups] == [plan for plan in in_time.plans if plan.groups]


def test_a_window_is_as_large_as_the_buffer_and_full_from_the_first_round() -> None:
    sizes: list[int] = []

    class Watching(RoundPlanner):
        def report(self, *, is_exhausted: bool, stop_code: int = 0) -> list[int]:
            sizes.append(len(self.window))
            return super().report(is_exhausted=is_exhausted, stop_code=stop_code)

    simulate_ranks([[5] * 10], lambda _: Watching(l_max=10, buffer_size=4, capacity=1))
    assert sizes[0] == 4
    assert max(sizes) == 4


@pytest.mark.parametrize("changed", [{"knobs": "l_max=11"}, {"rounds": 1}])
def test_ranks_with_other_knobs_or_rounds_have_diverged(changed: dict[str, Any]) -> None:
    def make_planner(rank: int) -> RoundPlanner:
        planner = RoundPlanner(l_max=10, buffer_size=4, knobs=changed.get("knobs", "l_max=10") if rank else "l_max=10")
        planner.num_rounds = changed.get("rounds", 0) * rank
        return planner

    with pytest.raises(RuntimeError, match="diverged"):
        simulate_ranks([[1, 2], [3, 4]], make_planner)


def test_a_stop_of_one_rank_reaches_all_and_nothing_leaves_a_window() -> None:
    planners = [RoundPlanner(l_max=10, buffer_size=4) for _ in range(2)]
    for planner in planners:
        planner.observe(5)
    reports = [planners[0].report(is_exhausted=False), planners[1].report(is_exhausted=False, stop_code=3)]
    reduced = [max(column) for column in zip(*reports, strict=True)]
    for planner in planners:
        assert planner.settle(reduced) == RoundPlan(Outcome.STOP, [], stop_code=3)
        assert planner.window == {0: 5}
