"""Shards to simulate, and planners that can be watched: for the tests of this folder."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from hypothesis import strategies as st
from paper_protocol import naive_epoch

from odb_lightning.plan import (
    ALIGNMENTS,
    Alignment,
    QuadraticCost,
    RoundPlan,
    RoundPlanner,
    RowCost,
    RowLimits,
    SimulatedRun,
    simulate_ranks,
)
from odb_lightning.plan.costs import tokens
from odb_lightning.plan.protocol import INF

MOST_LATE = 8
"""Windows that are observed after a sample before "matched" takes it, whatever it fits to."""
PERIOD = 3
"""Simulated capacities repeat after so many rounds, and are above zero on all ranks in one of them."""


def patches_of(length: int) -> int:
    """What a sample of this length takes of the second budget: more, or less, than one that is a little longer."""
    return length * 7 % 11


def same_for_all(length: int) -> float:
    """A step's time that lies in its rows alone."""
    return 3.0


@dataclass(frozen=True)
class Rules:
    """How groups are formed and come into the same steps."""

    alignment: Alignment = "matched"
    budget: RowCost = tokens
    cost: RowCost | None = None
    max_patches: int | None = None

    def options(self, l_max: int, max_rows: int | None) -> dict[str, Any]:
        """For a `RoundPlanner`."""
        limits = RowLimits(l_max, max_rows, self.budget, self.cost)
        return {"limits": limits, "max_patches": self.max_patches, "alignment": self.alignment}


MATCHED, PAPER = Rules("matched"), Rules("paper")
BOTH = (MATCHED, PAPER)


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    """Either alignment; at times another budget or cost than tokens, and a budget of patches, which "paper" does not know."""
    alignment = draw(st.sampled_from(ALIGNMENTS))
    budget = draw(st.sampled_from([tokens, tokens, QuadraticCost(), QuadraticCost(0.3, 0.02)]))
    cost = draw(st.sampled_from([None, None, QuadraticCost(0, 1), same_for_all]))
    max_patches = draw(st.none() | st.integers(1, 40)) if alignment == "matched" else None
    return Rules(alignment, budget, cost, max_patches)


@dataclass(frozen=True)
class Settled:
    """A rank around one of its rounds."""

    num_observed: int
    window_before: dict[int, int]
    window_after: dict[int, int]


class ObservedPlanner(RoundPlanner):
    """A planner whose capacity changes from round to round, and that remembers its plans. `told`: when it learns of the end
    of its shard; by default at once."""

    def __init__(self, capacities: Sequence[int] = (INF,), told: Sequence[bool] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.capacities = capacities
        self.told = told
        self.plans: list[RoundPlan] = []
        self.settled: list[Settled] = []

    def observe(self, length: int, patches: int | None = None) -> int:
        return super().observe(length, patches_of(length) if patches is None else patches)

    def report(self, *, is_exhausted: bool, stop_code: int = 0) -> list[int]:
        self.capacity = self.capacities[self.num_rounds % len(self.capacities)]
        if self.told is not None:
            is_exhausted = self.told[self.num_rounds]
        return super().report(is_exhausted=is_exhausted, stop_code=stop_code)

    def settle(self, reduced: Sequence[int]) -> RoundPlan:
        before = dict(self.window)
        self.plans.append(super().settle(reduced))
        self.settled.append(Settled(self.num_observed, before, dict(self.window)))
        assert not self.patches or self.patches == {ticket: patches_of(length) for ticket, length in self.window.items()}
        return self.plans[-1]


@dataclass(frozen=True)
class Case:
    shards: list[list[int]]
    l_max: int
    buffer_size: int
    max_rows: int | None = None
    capacities: list[list[int]] | None = None
    order_seed: str | None = None
    joins: bool = True
    quota: int | None = None
    """Non-join: samples over all ranks; by default as many as there are views."""
    rules: Rules = MATCHED

    def planners(self) -> list[ObservedPlanner]:
        return [
            ObservedPlanner(
                self.capacities[rank] if self.capacities else (INF,),
                buffer_size=self.buffer_size,
                order_seed=self.order_seed,
                joins=self.joins,
                **self.rules.options(self.l_max, self.max_rows),
            )
            for rank in range(len(self.shards))
        ]

    def run(self, planners: list[ObservedPlanner] | None = None) -> SimulatedRun:
        """The epoch; that it ends within `most_rounds` is left to the caller to check."""
        planners = planners or self.planners()
        return simulate_ranks(self.shards, planners.__getitem__, max_rounds=self.most_rounds, quota=self.quota)

    @property
    def num_views(self) -> int:
        return sum(map(len, self.shards))

    @property
    def samples_due(self) -> int:
        """The quota of non-join."""
        return self.num_views if self.quota is None else self.quota

    @property
    def most_rounds(self) -> int:
        """Join: each round that emits takes a view from every rank that has one; one round ends the epoch.

        Non-join: each round that emits takes a view from every rank of a shard that isn't empty, so that fewer than
        `ceil(quota / such ranks)` don't reach the quota; between two of them, at most one round ends a pass.
        """
        per_round = PERIOD if self.capacities else 1
        if self.joins:
            return per_round * (max(map(len, self.shards)) + 1)
        num_active = sum(map(bool, self.shards))
        return per_round * (2 * -(-self.samples_due // num_active) - 1)

    def lengths(self, run: SimulatedRun) -> list[list[list[int]]]:
        return [[[self.shards[r][p] for p in group] for r, group in enumerate(step)] for step in run.steps]


def check_steps(case: Case, run: SimulatedRun) -> None:
    """What holds of each step by itself, in join and in non-join."""
    max_patches = case.rules.max_patches
    for step, groups in zip(run.steps, case.lengths(run), strict=True):
        assert len(step) == len(case.shards), "each rank has an entry in each step"
        assert any(step), "never idle on all ranks"
        for group in groups:
            assert group == sorted(group, reverse=True), "the longest first"
            assert len(group) <= 1 or len(group) * case.rules.budget(group[0]) <= case.l_max, "the padded budget"
            assert case.max_rows is None or len(group) <= case.max_rows
            assert max_patches is None or len(group) <= 1 or sum(map(patches_of, group)) <= max_patches


def check_agreement(planners: Sequence[ObservedPlanner]) -> None:
    for plans in zip(*(planner.plans for planner in planners), strict=True):
        assert len({plan.outcome for plan in plans}) == 1, "the same outcome on all ranks"
        assert len({len(plan.groups) for plan in plans}) == 1, "the same number of steps on all ranks"


def check_waits(case: Case, planners: Sequence[ObservedPlanner]) -> None:
    """Matched: of the samples that `MOST_LATE` windows were observed after, each step takes the oldest; what a round leaves
    of them has a step each in the next ones. (Not when nothing more is to come, and the round takes all.)"""
    latest = MOST_LATE * case.buffer_size
    for planner, shard in zip(planners, case.shards, strict=True):
        for plan, settled in zip(planner.plans, planner.settled, strict=True):
            if settled.num_observed == len(shard):
                break
            late = sorted(ticket for ticket in settled.window_before if settled.num_observed - ticket > latest)
            emitted = set(chain.from_iterable(plan.groups))
            assert emitted.issuperset(late[: len(plan.groups)])


def check_against_the_paper(case: Case) -> None:
    """Step by step and round by round what the protocol makes of it, written down a second time."""
    case = replace(case, order_seed=None, rules=replace(case.rules, alignment="paper", max_patches=None))
    planners = case.planners()
    run = case.run(planners)
    capacities = case.capacities or [[INF]] * len(case.shards)
    quota = None if case.joins else case.samples_due
    steps, rounds = naive_epoch(case.shards, case.l_max, case.buffer_size, case.max_rows, capacities, quota, case.rules.budget)
    assert [plan.outcome.value for plan in planners[0].plans] == rounds
    assert case.lengths(run) == steps


@st.composite
def cases(draw: st.DrawFn, max_ranks: int = 8, with_capacities: bool = True, joins: bool = True) -> Case:
    """Shards that are unequal, empty, fewer views than ranks, or with all the long samples on one rank; for non-join, with
    one view at least."""
    world_size = draw(st.integers(1, max_ranks))
    most_views = draw(st.sampled_from([25, 4, 1]))
    views = st.lists(st.integers(1, 60), min_size=draw(st.sampled_from([0, 0, most_views // 2])), max_size=most_views)
    shards = [draw(views) for _ in range(world_size)]
    if not joins and not any(shards):
        shards[draw(st.integers(0, world_size - 1))] = [draw(st.integers(1, 60))]
    if draw(st.booleans()):
        outlier_rank = draw(st.integers(0, world_size - 1))
        shards[outlier_rank] = [length * 20 for length in shards[outlier_rank]]
    slots = st.sampled_from([0, 0, 1, 2, 5, INF])
    capacities = None
    if with_capacities and draw(st.booleans()):
        capacities = [[draw(st.integers(1, 6)), draw(slots), draw(slots)] for _ in range(world_size)]
    return Case(
        shards=shards,
        l_max=draw(st.integers(1, 400)),
        buffer_size=draw(st.integers(1, 30)),
        max_rows=draw(st.none() | st.integers(1, 6)),
        capacities=capacities,
        order_seed=draw(st.sampled_from([None, "7/0"])),
        joins=joins,
        quota=None if joins else draw(st.none() | st.integers(1, 250)),
        rules=draw(rules()),
    )


@st.composite
def cases_of_many_ranks(draw: st.DrawFn, joins: bool = True) -> Case:
    """Nine to 64 ranks. The shape is drawn; lengths and capacities come from a generator, which keeps examples small."""
    world_size = draw(st.sampled_from([64, 49, 33, 16, 9]))
    most_views = draw(st.sampled_from([40, 6, 1]))
    share_empty = draw(st.sampled_from([0, 0, 0.1, 0.5, 0.95]))
    share_full = draw(st.sampled_from([0.005, 0.02, 0.2, 0, None]))
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.0, 0.3, 1.2]))
    shards = [
        [int(rng.lognormvariate(3.5, spread)) + 1 for _ in range(rng.randint(0, most_views))]
        if rng.random() >= share_empty
        else []
        for _ in range(world_size)
    ]
    if not joins and not any(shards):
        shards[rng.randrange(world_size)] = [30]
    if draw(st.booleans()):
        outlier_rank = rng.randrange(world_size)
        shards[outlier_rank] = [length * 20 for length in shards[outlier_rank]]

    def slots() -> int:
        return 0 if rng.random() < (share_full or 0) else rng.choice([1, 2, 3, 5, 8, INF, INF])

    capacities = [[rng.randint(1, 6), slots(), slots()] for _ in shards]
    return Case(
        shards=shards,
        l_max=draw(st.integers(1, 600)),
        buffer_size=draw(st.sampled_from([16, 7, 2, 1, 64])),
        max_rows=draw(st.none() | st.integers(1, 6)),
        capacities=None if share_full is None else capacities,
        order_seed=draw(st.sampled_from([None, "7/0"])),
        joins=joins,
        quota=None if joins else draw(st.none() | st.integers(1, 800)),
        rules=draw(rules()),
    )
