"""One rank's window through the rounds of an epoch."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from odb_lightning.plan.alignment import align_groups
from odb_lightning.plan.grouping import group_window
from odb_lightning.plan.protocol import INF, Outcome, RankReport, decide_round, encode_report


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
    A ticket is the number of a kept view of the epoch, from 0. State is the window (ticket -> length), the number of
    tickets given out and the number of rounds; what the window holds depends on counts and order only, never on timing.
    """

    def __init__(
        self,
        *,
        l_max: int,
        buffer_size: int,
        max_rows: int | None = None,
        capacity: int = INF,
        order_seed: str | None = None,
        knobs: str = "",
        joins: bool = True,
    ) -> None:
        """`order_seed` (the same on all ranks) shuffles the steps of each round, with one permutation for all ranks, so
        that groups of like length stay in the same step; None keeps the longest first. `knobs` goes into the fingerprint."""
        self.l_max = l_max
        self.buffer_size = buffer_size
        self.max_rows = max_rows
        self.capacity = capacity
        self.order_seed = order_seed
        self.knobs = knobs
        self.joins = joins
        self.window: dict[int, int] = {}
        self.num_observed = 0
        self.num_rounds = 0
        self._pass_start = 0
        """Tickets given out before this pass and used up by then."""
        self._groups: list[list[int]] = []

    @property
    def room(self) -> int:
        """Views that the window takes before the next round."""
        return self.buffer_size - len(self.window)

    def observe(self, length: int) -> int:
        """The ticket of a view that enters the window."""
        ticket = self.num_observed
        self.window[ticket] = length
        self.num_observed += 1
        return ticket

    def report(self, *, is_exhausted: bool, stop_code: int = 0) -> list[int]:
        """This rank's integers for the exchange of this round; `is_exhausted`: the sampler has no view left."""
        tickets, lengths = list(self.window), list(self.window.values())
        self._groups = [[tickets[i] for i in group] for group in group_window(lengths, self.l_max, self.max_rows)]
        report = RankReport(
            num_groups=len(self._groups),
            capacity=self.capacity,
            num_samples=len(tickets),
            free_slots=self.capacity,
            is_finished=is_exhausted and not tickets,
            had_views=self.num_observed > self._pass_start,
            stop_code=stop_code,
        )
        return encode_report(report, zlib.crc32(f"{self.num_rounds}/{self.knobs}".encode()))

    def settle(self, reduced: Sequence[int]) -> RoundPlan:
        """This rank's part of the round, from the maximum over all ranks; emitted tickets leave the window."""
        decision = decide_round(reduced, joins=self.joins)
        if decision.outcome is Outcome.PASS_END:
            self._pass_start = self.num_observed - len(self.window)
        groups: list[list[int]] = []
        if decision.outcome is Outcome.EMIT:
            if self._groups:
                groups, _ = align_groups(self._groups, decision.target)
            groups += [[] for _ in range(decision.target - len(groups))]
            if self.order_seed is not None:
                random.Random(f"{self.order_seed}/{self.num_rounds}").shuffle(groups)
            for group in groups:
                for ticket in group:
                    del self.window[ticket]
        self.num_rounds += 1
        return RoundPlan(decision.outcome, groups, decision.stop_code)
