"""What ranks tell each other in a round, as one reduction of a few integers, and what each concludes from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

INF = 2**62
"""Stands where a rank has nothing to say; a minimum travels as the maximum of the negative."""

REPORT_SIZE = 10


class Outcome(Enum):
    """What a round comes to, the same on every rank."""

    EMIT = "emit"
    SKIP = "skip"
    PASS_END = "pass end"
    """Non-join: a rank has no view left, so a new pass begins on all of them."""
    END = "end"
    STOP = "stop"
    DIVERGED = "diverged"


@dataclass(frozen=True)
class RankReport:
    """One rank's state at the beginning of a round, in counts."""

    num_groups: int
    """G_r, groups formed from the window."""
    capacity: int
    """C_r, groups that may be emitted in a round: a planned constant, never the fill of a queue."""
    num_samples: int
    """S_r, samples in those groups."""
    free_slots: int
    """b_r; a round in which an unfinished rank has none emits nothing."""
    is_finished: bool
    """No view left in the sampler and none in the window."""
    had_views: bool
    """There was at least one view in this pass, carried over ones included."""
    stop_code: int = 0
    """0, or a reason to end for all ranks; the largest wins."""


@dataclass(frozen=True)
class RoundDecision:
    outcome: Outcome
    target: int = 0
    """T_grp of an EMIT round, else 0."""
    stop_code: int = 0
    most_groups: int = 0
    """Formed by a rank in an EMIT round, as the next two."""
    fewest_groups: int = 0
    """Formed by a rank that has any."""
    bound: int = 0
    """What no rank that has groups can exceed: its capacity, and its samples."""


def encode_report(report: RankReport, fingerprint: int) -> list[int]:
    """Ten integers for an elementwise maximum over all ranks. `fingerprint` (0 <= f < 2^62) must be the same on all of
    them; it stands for round, epoch and knobs, and shows ranks that have diverged."""
    is_active = report.num_groups > 0
    return [
        report.num_groups,
        -report.num_groups if is_active else -INF,
        -report.capacity if is_active and report.capacity > 0 else -INF,
        -report.num_samples if is_active and report.num_samples > 0 else -INF,
        -report.free_slots if not report.is_finished else -INF,
        int(not report.is_finished),
        int(report.is_finished and report.had_views),
        report.stop_code,
        fingerprint,
        -fingerprint,
    ]


def decide_round(reduced: Sequence[int], *, joins: bool = True) -> RoundDecision:
    """What the maximum of all ranks' `encode_report` comes to; more integers may follow. Every rank computes the same from
    the same integers, so all make the same sequence of exchanges.

    Join: the end is reached when nothing remains on any rank. Non-join (`joins=False`): the first rank that has finished ends
    the pass for all, unless it had no view to begin with; END is then a pass in which no rank had any.
    """
    most_groups, fewest_groups, capacity, samples, free_slots = reduced[:5]
    remains, has_finished, stop_code, high, low = reduced[5:REPORT_SIZE]
    if high != -low:
        return RoundDecision(Outcome.DIVERGED)
    if stop_code > 0:
        return RoundDecision(Outcome.STOP, stop_code=stop_code)
    if not joins and has_finished:
        return RoundDecision(Outcome.PASS_END)
    if not remains:
        return RoundDecision(Outcome.END)
    if free_slots == 0 or most_groups == 0:
        return RoundDecision(Outcome.SKIP)
    bound = min(-capacity, -samples)
    return RoundDecision(Outcome.EMIT, max(min(most_groups, bound), 1), 0, most_groups, -fewest_groups, bound)
