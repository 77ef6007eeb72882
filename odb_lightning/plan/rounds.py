"""One rank's window through the rounds of an epoch."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from odb_lightning.plan import matching
from odb_lightning.plan.alignment import align_groups
from odb_lightning.plan.costs import RowLimits
from odb_lightning.plan.grouping import carry_over
from odb_lightning.plan.protocol import INF, Outcome, RankReport, RoundDecision, decide_round, encode_report

Alignment = Literal["matched", "paper"]
ALIGNMENTS: tuple[Alignment, ...] = ("matched", "paper")

_MOST_WINDOWS_LATE = 8
"""Windows that may be observed after a sample before it has to go out."""


@dataclass(frozen=True)
class RoundPlan:
    """What one rank does in one round. `groups` has one entry per step, the same number on all ranks: tickets, longest
    sample first, or an empty list for an idle step."""

    outcome: Outcome
    groups: list[list[int]]
    stop_code: int = 0


class RoundPlanner:
    """A rank's window of observed lengths, and the rounds that empty it.

    With `joins`, the epoch ends when nothing remains on any rank. Without, a pass ends on all ranks as soon as one of them has
    no view left (`Outcome.PASS_END`): its views are then given anew, while what the others have left stays theirs.

    Per round: `observe` lengths while there is `room`, take the elementwise maximum of `report` over all ranks, `settle`.
    A ticket is the number of a kept view of the epoch, from 0. State is the window (ticket -> length; patches likewise, where
    they count), the number of tickets given out and the number of rounds; what the window holds depends on counts and order
    only, never on timing.
    """

    def __init__(
        self,
        *,
        buffer_size: int,
        l_max: int | None = None,
        max_rows: int | None = None,
        limits: RowLimits | None = None,
        max_patches: int | None = None,
        alignment: Alignment = "matched",
        capacity: int = INF,
        order_seed: str | None = None,
        knobs: str = "",
        joins: bool = True,
    ) -> None:
        """The budget is `l_max` padded tokens and `max_rows`, or else `limits`; and `max_patches`, if it counts them.
        `order_seed` (the same on all ranks) shuffles the steps of each round, with one permutation for all ranks, so
        that groups of like cost stay in the same step; None keeps the costliest first. `knobs` goes into the fingerprint."""
        self.buffer_size = buffer_size
        self.capacity = capacity
        self.order_seed = order_seed
        self.knobs = knobs
        self.joins = joins
        self.window: dict[int, int] = {}
        self.patches: dict[int, int] = {}
        self.num_observed = 0
        self.num_rounds = 0
        self._pass_start = 0
        """Tickets given out before this pass and used up by then."""
        if limits is None:
            if l_max is None:
                raise ValueError("a planner needs l_max or limits")
            limits = RowLimits(l_max, max_rows)
        self._rule: _Rule = _Paper(limits) if alignment == "paper" else _Matched(limits, max_patches)
        self._counts_patches = max_patches is not None

    def restore(self, window: dict[int, tuple[int, int]], *, num_observed: int, num_rounds: int, pass_start: int) -> None:
        """Goes on where another planner with the same options was: with its window (ticket -> length, patches)."""
        self.window = {ticket: length for ticket, (length, _) in window.items()}
        self.patches = {ticket: patches for ticket, (_, patches) in window.items()} if self._counts_patches else {}
        self.num_observed, self.num_rounds, self._pass_start = num_observed, num_rounds, pass_start

    @property
    def pass_start(self) -> int:
        """Tickets given out before this pass of non-join, and used up by then."""
        return self._pass_start

    @property
    def room(self) -> int:
        """Views that the window takes before the next round."""
        return self.buffer_size - len(self.window)

    def observe(self, length: int, patches: int = 0) -> int:
        """The ticket of a view that enters the window."""
        ticket = self.num_observed
        self.window[ticket] = length
        if self._counts_patches:
            self.patches[ticket] = patches
        self.num_observed += 1
        return ticket

    def report(self, *, is_exhausted: bool, stop_code: int = 0) -> list[int]:
        """This rank's integers for the exchange of this round; `is_exhausted`: the sampler has no view left."""
        num_groups, facts = self._rule.form(self.window, self.patches, is_exhausted)
        report = RankReport(
            num_groups=num_groups,
            capacity=self.capacity,
            num_samples=len(self.window),
            free_slots=self.capacity,
            is_finished=is_exhausted and not self.window,
            had_views=self.num_observed > self._pass_start,
            stop_code=stop_code,
        )
        return [*encode_report(report, zlib.crc32(f"{self.num_rounds}/{self.knobs}".encode())), *facts]

    def settle(self, reduced: Sequence[int]) -> RoundPlan:
        """This rank's part of the round, from the maximum over all ranks; emitted tickets leave the window."""
        decision = decide_round(reduced, joins=self.joins)
        if decision.outcome is Outcome.PASS_END:
            self._pass_start = self.num_observed - len(self.window)
        groups: list[list[int]] = []
        if decision.outcome is Outcome.EMIT:
            groups = self._rule.align(decision, reduced, self.num_observed, _MOST_WINDOWS_LATE * self.buffer_size)
            if self.order_seed is not None:
                random.Random(f"{self.order_seed}/{self.num_rounds}").shuffle(groups)
            for group in groups:
                for ticket in group:
                    del self.window[ticket]
                    self.patches.pop(ticket, None)
        self.num_rounds += 1
        return RoundPlan(decision.outcome, groups, decision.stop_code)


class _Rule(Protocol):
    """How a window falls into groups, and how they become as many as on the other ranks."""

    def form(self, window: dict[int, int], patches: dict[int, int], is_exhausted: bool) -> tuple[int, list[int]]:
        """Groups formed, and what else the other ranks have to know."""

    def align(self, decision: RoundDecision, reduced: Sequence[int], now: int, latest: int) -> list[list[int]]:
        """The groups of the round, one for each of its steps; empty ones on a rank that has formed none. `now`
        tickets were given out; none is to wait for `latest` more."""


class _Paper:
    """The carry-over rule, splitting and overflow of arXiv 2606.19989."""

    def __init__(self, limits: RowLimits) -> None:
        self._limits = limits
        self._groups: list[list[int]] = []

    def form(self, window: dict[int, int], patches: dict[int, int], is_exhausted: bool) -> tuple[int, list[int]]:
        tickets, lengths = list(window), list(window.values())
        groups = carry_over(lengths, lambda length: self._limits(length)[0])
        self._groups = [[tickets[position] for position in group] for group in groups]
        return len(groups), []

    def align(self, decision: RoundDecision, reduced: Sequence[int], now: int, latest: int) -> list[list[int]]:
        if not self._groups:
            return [[] for _ in range(decision.target)]
        return align_groups(self._groups, decision.target)[0]


class _Matched:
    """Groups that cost alike in the same step, see `matching`. Exchanged: whether views are left, and quantiles of costs."""

    def __init__(self, limits: RowLimits, max_patches: int | None) -> None:
        self._limits = limits
        self._max_patches = max_patches
        self._window = self._sorted({}, {})
        self._groups = matching.Groups([], [])

    def _sorted(self, window: dict[int, int], patches: dict[int, int]) -> matching.SortedWindow:
        lengths = np.fromiter(window.values(), dtype=np.int64, count=len(window))
        order = np.argsort(-lengths, kind="stable")
        rows, cost = self._limits.of_each(lengths[order].tolist())
        counts = None if self._max_patches is None else np.array([patches[ticket] for ticket in window], dtype=np.int64)[order]
        tickets = np.fromiter(window, dtype=np.int64, count=len(window))[order]
        return matching.SortedWindow(tickets, rows, cost, counts, self._max_patches or 0)

    def form(self, window: dict[int, int], patches: dict[int, int], is_exhausted: bool) -> tuple[int, list[int]]:
        self._window = self._sorted(window, patches)
        self._groups = matching.form_groups(self._window)
        return len(self._groups.costs), [int(not is_exhausted), *matching.cost_quantiles(self._groups.costs)]

    def align(self, decision: RoundDecision, reduced: Sequence[int], now: int, latest: int) -> list[list[int]]:
        is_fetching, *quantiles = reduced[-matching.NUM_QUANTILES - 1 :]
        target = matching.num_steps(decision.most_groups, decision.fewest_groups, decision.bound, not is_fetching)
        if not self._groups.costs:
            return [[] for _ in range(target)]
        if not is_fetching:
            return matching.split_costliest(self._groups, target)
        return matching.fullest_groups(self._window, matching.step_costs(quantiles, target), now=now, latest=latest)
