"""What "matched" is for, and what it must not cost: steps of like cost on all ranks, and no sample that waits for ever."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_cases import MATCHED, MOST_LATE, PAPER, Case, ObservedPlanner, Rules, check_waits, rules

from odb_lightning.plan import QuadraticCost


def waits(planner: ObservedPlanner) -> dict[int, int]:
    """For each ticket emitted, the tickets given out after it until then."""
    return {
        ticket: settled.num_observed - ticket - 1
        for plan, settled in zip(planner.plans, planner.settled, strict=True)
        for group in plan.groups
        for ticket in group
    }


def most_waited(case: Case) -> int:
    """What a sample waits for at the most: `MOST_LATE` windows. Whether it has waited so long is looked at once a round, and
    between two rounds another window is observed at most: so it's a window more. And if so many wait so long at once that the
    steps of a round are not enough for them, then another for each round that they take: see `check_waits`."""
    return (MOST_LATE + 1) * case.buffer_size


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("buffer_size", [16, 64, 256])
@pytest.mark.parametrize("outlier", [400, 2000, 4000, 100_000])
def test_one_outlier_among_many_waits_for_so_many_windows_and_no_more(world_size: int, buffer_size: int, outlier: int) -> None:
    """No step is meant for it, so that it comes when it is late, and alone."""
    rng = np.random.default_rng(buffer_size)
    shards = [rng.integers(90, 110, 12 * buffer_size).tolist() for _ in range(world_size)]
    shards[0][buffer_size // 2] = outlier
    case = Case(shards, l_max=400, buffer_size=buffer_size, rules=replace(MATCHED, cost=QuadraticCost(1, 0.01)))
    planners = case.planners()
    run = case.run(planners)
    check_waits(case, planners)
    assert [buffer_size // 2] in [step[0] for step in run.steps]
    assert max(waits(planners[0]).values()) == waits(planners[0])[buffer_size // 2]
    assert MOST_LATE * buffer_size <= waits(planners[0])[buffer_size // 2] <= most_waited(case)
    for planner in planners[1:]:
        assert max(waits(planner).values()) <= most_waited(case)


@settings(max_examples=40)
@given(
    st.integers(1, 3),
    st.sampled_from([3, 8, 20, 40]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.01, 0.1]),
    rules(),
    st.data(),
)
def test_no_sample_waits_longer_than_it_may_whatever_the_lengths(
    world_size: int, buffer_size: int, seed: int, share_outliers: float, drawn: Rules, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    spread = data.draw(st.sampled_from([0.0, 0.2, 1.5]))
    shards = []
    for _ in range(world_size):
        size = 15 * buffer_size
        lengths = rng.lognormal(3, spread, size) * np.where(rng.random(size) < share_outliers, 50, 1)
        shards.append((lengths.astype(int) + 1).tolist())
    case = Case(
        shards, l_max=data.draw(st.integers(50, 800)), buffer_size=buffer_size, rules=replace(drawn, alignment="matched")
    )
    planners = case.planners()
    case.run(planners)
    check_waits(case, planners)
    for planner, shard in zip(planners, shards, strict=True):
        num_late, queue = 0, 0
        for plan, settled in zip(planner.plans, planner.settled, strict=True):
            if settled.num_observed == len(shard):
                break
            late = [ticket for ticket in settled.window_before if settled.num_observed - ticket > MOST_LATE * buffer_size]
            num_late = max(num_late, len(late))
            queue = max(queue, math.ceil(len(late) / len(plan.groups)))
        assert max(waits(planner).values()) <= most_waited(case) + max(queue - 1, 0) * buffer_size


WORLD_SIZE, L_MAX = 8, 12_288


def lognormal(count: int, mean: float, cv: float, longest: int = 10**6) -> list[int]:
    variance = math.log1p(cv * cv)
    drawn = np.random.default_rng(5).lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)
    lengths: list[int] = np.clip(drawn.round(), 1, longest).astype(int).tolist()
    return lengths


def bimodal(count: int) -> list[int]:
    modes = zip(lognormal(count, 120, 0.35), lognormal(count, 1000, 0.35), strict=True)
    return [pair[which] for pair, which in zip(modes, np.random.default_rng(6).integers(0, 2, count), strict=True)]


LAWS: dict[str, Callable[[int], list[int]]] = {
    "cv-0.29": lambda count: lognormal(count, 600, 0.29),
    "cv-0.48": lambda count: lognormal(count, 1200, 0.48),
    "bimodal": bimodal,
    "heavy": lambda count: lognormal(count, 1800, 0.94, longest=L_MAX),
}


@dataclass(frozen=True)
class Figures:
    efficiency: float
    fill: float
    num_steps: int


def figures(lengths: list[int], rules: Rules) -> Figures:
    case = Case([lengths[rank::WORLD_SIZE] for rank in range(WORLD_SIZE)], L_MAX, buffer_size=1024, rules=rules)
    steps = case.lengths(case.run())
    real = sum(length for step in steps for group in step for length in group)
    assert real == sum(lengths)
    largest = sum(max(len(group) * max(group, default=0) for group in step) for step in steps)
    return Figures(real / (WORLD_SIZE * largest), real / (len(steps) * WORLD_SIZE * L_MAX), len(steps))


@pytest.mark.parametrize("law", LAWS)
def test_schedules_are_more_efficient_than_the_papers_at_no_lower_fill_and_in_no_more_steps(law: str) -> None:
    """On the laws of the design's targets, in a short epoch: of two windows and a half."""
    lengths = LAWS[law](20_000)
    matched, paper = figures(lengths, MATCHED), figures(lengths, PAPER)
    assert matched.efficiency > paper.efficiency
    assert matched.fill >= paper.fill
    assert matched.num_steps <= paper.num_steps
