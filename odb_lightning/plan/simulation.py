"""Any number of ranks in one process, on the planner that the real loader uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from odb_lightning.plan.protocol import Outcome
from odb_lightning.plan.rounds import RoundPlanner


@dataclass(frozen=True)
class SimulatedRun:
    """`steps[s][r]` are the positions in `shards[r]` that rank r trains on in step s (empty: idle)."""

    steps: list[list[list[int]]]
    num_rounds: int


def simulate_ranks(
    shards: Sequence[Sequence[int]], make_planner: Callable[[int], RoundPlanner], max_rounds: int | None = None
) -> SimulatedRun:
    """The epoch that W ranks go through, given the lengths of each rank's views in sampler order.

    `make_planner(rank)` gives each rank's planner. Raises RuntimeError if a rank's outcome differs from its peers', or if
    the epoch does not end within `max_rounds` (default: the largest shard, plus the largest window, plus two).
    """
    planners = [make_planner(rank) for rank in range(len(shards))]
    if max_rounds is None:
        max_rounds = max(map(len, shards), default=0) + max(planner.buffer_size for planner in planners) + 2
    steps: list[list[list[int]]] = []
    for round_number in range(1, max_rounds + 1):
        reports = []
        for planner, shard in zip(planners, shards, strict=True):
            while planner.room > 0 and planner.num_observed < len(shard):
                planner.observe(shard[planner.num_observed])
            reports.append(planner.report(is_exhausted=planner.num_observed == len(shard)))
        reduced = [max(column) for column in zip(*reports, strict=True)]
        plans = [planner.settle(reduced) for planner in planners]
        if len({(plan.outcome, len(plan.groups)) for plan in plans}) != 1:
            raise RuntimeError(f"ranks disagree in round {round_number}: {[plan.outcome for plan in plans]}")
        if plans[0].outcome is Outcome.END:
            return SimulatedRun(steps, round_number)
        if plans[0].outcome in (Outcome.DIVERGED, Outcome.STOP):
            raise RuntimeError(f"round {round_number} came to {plans[0].outcome.value}")
        steps += [[plan.groups[step] for plan in plans] for step in range(len(plans[0].groups))]
    raise RuntimeError(f"the epoch did not end within {max_rounds} rounds")
