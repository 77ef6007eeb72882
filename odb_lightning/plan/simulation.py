"""Any number of ranks in one process, on the planner that the real loader uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from odb_lightning.plan.accumulation import AccumulationWindows
from odb_lightning.plan.protocol import Outcome
from odb_lightning.plan.rounds import RoundPlanner


@dataclass(frozen=True)
class SimulatedRun:
    """`steps[s][r]` are the positions in `shards[r]` that rank r trains on in step s (empty: idle)."""

    steps: list[list[list[int]]]
    num_rounds: int
    num_passes: int = 1
    """Logical passes, which the first rank without a view left ends for all: more than one in non-join alone."""


def simulate_ranks(
    shards: Sequence[Sequence[int]],
    make_planner: Callable[[int], RoundPlanner],
    max_rounds: int | None = None,
    quota: int | None = None,
) -> SimulatedRun:
    """The epoch that W ranks go through, given the lengths of each rank's views in sampler order.

    `make_planner(rank)` gives each rank's planner. Join ends when all views are emitted; non-join begins shards anew, pass
    after pass, until `quota` samples are (by default as many as there are views). Raises RuntimeError if a rank's outcome
    differs from its peers', if a pass of non-join has no view at all, or if the epoch does not end within `max_rounds`
    (default: the largest shard, plus the largest window, plus two; in non-join twice the quota more).
    """
    planners = [make_planner(rank) for rank in range(len(shards))]
    joins = all(planner.joins for planner in planners)
    if joins:
        quota = None
    elif quota is None:
        quota = sum(map(len, shards))
    if max_rounds is None:
        max_rounds = max(map(len, shards), default=0) + max(planner.buffer_size for planner in planners) + 2
        max_rounds += 2 * (quota or 0)
    windows = AccumulationWindows[list[list[int]]](1, quota=quota)
    steps: list[list[list[int]]] = []
    ends = list(map(len, shards))
    num_passes = 1
    for round_number in range(1, max_rounds + 1):
        reports = []
        for planner, shard, end in zip(planners, shards, ends, strict=True):
            while planner.room > 0 and planner.num_observed < end:
                planner.observe(shard[planner.num_observed % len(shard)])
            reports.append(planner.report(is_exhausted=planner.num_observed == end))
        reduced = [max(column) for column in zip(*reports, strict=True)]
        plans = [planner.settle(reduced) for planner in planners]
        if len({(plan.outcome, len(plan.groups)) for plan in plans}) != 1:
            raise RuntimeError(f"ranks disagree in round {round_number}: {[plan.outcome for plan in plans]}")
        outcome = plans[0].outcome
        if outcome is Outcome.END and joins:
            return SimulatedRun(steps, round_number, num_passes)
        if outcome in (Outcome.DIVERGED, Outcome.STOP, Outcome.END):
            raise RuntimeError(f"round {round_number} came to {outcome.value}")
        if outcome is Outcome.PASS_END:
            num_passes += 1
            for rank, planner in enumerate(planners):
                if planner.num_observed == ends[rank]:
                    ends[rank] += len(shards[rank])
        for index in range(len(plans[0].groups)):
            if windows.is_full:
                break
            step = [[ticket % len(shard) for ticket in plan.groups[index]] for plan, shard in zip(plans, shards, strict=True)]
            windows.add(step, 0, sum(map(len, step)))
            steps.append(step)
        if windows.is_full:
            return SimulatedRun(steps, round_number, num_passes)
    raise RuntimeError(f"the epoch did not end within {max_rounds} rounds")
