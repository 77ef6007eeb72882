"""Shards to simulate, and planners that can be watched: for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from odb_lightning.plan import RoundPlan, RoundPlanner, SimulatedRun, simulate_ranks
from odb_lightning.plan.protocol import INF

PERIOD = 3
"""Simulated capacities repeat after so many rounds, and are above zero on all ranks in one of them."""


class ObservedPlanner(RoundPlanner):
    """A planner whose capacity changes from round to round, and that remembers its plans."""

    def __init__(self, capacities: Sequence[int] = (INF,), **options: Any) -> None:
        super().__init__(**options)
        self.capacities = capacities
        self.plans: list[RoundPlan] = []

    def report(self, *, is_exhausted: bool, stop_code: int = 0) -> list[int]:
        self.capacity = self.capacities[self.num_rounds % len(self.capacities)]
        return super().report(is_exhausted=is_exhausted, stop_code=stop_code)

    def settle(self, reduced: Sequence[int]) -> RoundPlan:
        self.plans.append(super().settle(reduced))
        return self.plans[-1]


@dataclass(frozen=True)
class Case:
    shards: list[list[int]]
    l_max: int
    buffer_size: int
    max_rows: int | None = None
    capacities: list[list[int]] | None = None
    order_seed: str | None = None

    def planners(self) -> list[ObservedPlanner]:
        return [
            ObservedPlanner(
                self.capacities[rank] if self.capacities else (INF,),
                l_max=self.l_max,
                buffer_size=self.buffer_size,
                max_rows=self.max_rows,
                order_seed=self.order_seed,
            )
            for rank in range(len(self.shards))
        ]

    def run(self, planners: list[ObservedPlanner] | None = None) -> SimulatedRun:
        planners = planners or self.planners()
        return simulate_ranks(self.shards, planners.__getitem__, max_rounds=self.most_rounds)

    @property
    def most_rounds(self) -> int:
        """Each round that emits takes a view from every rank that has one; one round ends the epoch."""
        rounds = max(map(len, self.shards)) + 1
        return rounds * PERIOD if self.capacities else rounds

    def lengths(self, run: SimulatedRun) -> list[list[list[int]]]:
        return [[[self.shards[r][p] for p in group] for r, group in enumerate(step)] for step in run.steps]


@st.composite
def cases(draw: st.DrawFn, max_ranks: int = 8, with_capacities: bool = True) -> Case:
    """Shards that are unequal, empty, fewer views than ranks, or with all the long samples on one rank."""
    world_size = draw(st.integers(1, max_ranks))
    views = st.lists(st.integers(1, 60), max_size=draw(st.sampled_from([1, 4, 25])))
    shards = [draw(views) for _ in range(world_size)]
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
    )
