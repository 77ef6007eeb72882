"""The exchange of a round: ten integers per rank and what the alignment adds, one maximum, the same conclusion everywhere."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from odb_lightning.plan import Outcome, RankReport, decide_round, encode_report, target_group_count
from odb_lightning.plan.protocol import INF, REPORT_SIZE, RoundDecision

FINISHED = RankReport(num_groups=0, capacity=0, num_samples=0, free_slots=0, is_finished=True, had_views=True)
NEVER_HAD_VIEWS = replace(FINISHED, had_views=False)
ACTIVE = RankReport(num_groups=3, capacity=INF, num_samples=7, free_slots=INF, is_finished=False, had_views=True)
WAITING = RankReport(num_groups=0, capacity=INF, num_samples=0, free_slots=INF, is_finished=False, had_views=False)


def reduce_max(encoded: list[list[int]]) -> list[int]:
    return [max(column) for column in zip(*encoded, strict=True)]


def emit(target: int, most: int, fewest: int, bound: int) -> RoundDecision:
    return RoundDecision(Outcome.EMIT, target, most_groups=most, fewest_groups=fewest, bound=bound)


def decide(*reports: RankReport, fingerprints: tuple[int, ...] | None = None, joins: bool = True) -> RoundDecision:
    prints = fingerprints or (5,) * len(reports)
    encoded = [encode_report(report, print_) for report, print_ in zip(reports, prints, strict=True)]
    return decide_round(reduce_max(encoded), joins=joins)


@st.composite
def rank_reports(draw: st.DrawFn, stop_codes: st.SearchStrategy[int] | None = None) -> RankReport:
    stop_code = 0 if stop_codes is None else draw(stop_codes)
    if draw(st.integers(0, 3)) == 0:
        # what a finished rank says of its capacity must not count, so it is arbitrary here
        slots, had_views = draw(st.integers(0, 20)), draw(st.booleans())
        return replace(FINISHED, capacity=slots, free_slots=slots, had_views=had_views, stop_code=stop_code)
    groups = draw(st.integers(0, 30))
    slots = draw(st.integers(0, 20) | st.just(INF))
    samples = groups + draw(st.integers(0, 50)) if groups else 0
    return RankReport(groups, slots, samples, slots, is_finished=False, had_views=True, stop_code=stop_code)


@given(st.lists(rank_reports(), min_size=1, max_size=8))
def test_the_reduction_gives_the_target_group_count_of_all_ranks(reports: list[RankReport]) -> None:
    assume(any(report.num_groups for report in reports))
    assume(all(report.free_slots for report in reports if not report.is_finished))
    decision = decide(*reports)
    expected = target_group_count(
        [report.num_groups for report in reports],
        [report.capacity for report in reports],
        [report.num_samples for report in reports],
    )
    active = [report for report in reports if report.num_groups]
    groups = [report.num_groups for report in active]
    bound = min(*(report.num_samples for report in active), *(report.capacity for report in active))
    assert decision == emit(expected, max(groups), min(groups), bound)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9) | st.just(INF), st.integers(0, 9)), min_size=1, max_size=8).filter(
        lambda ranks: any(groups for groups, _, _ in ranks)
    )
)
def test_zero_capacities_and_counts_of_ranks_do_not_bound_the_target(ranks: list[tuple[int, int, int]]) -> None:
    reports = [RankReport(g, c, s, free_slots=1, is_finished=False, had_views=True) for g, c, s in ranks]
    assert decide(*reports).target == target_group_count(*(list(column) for column in zip(*ranks, strict=True)))


@given(
    st.lists(rank_reports(stop_codes=st.sampled_from([0, 0, 0, 1, 4])), min_size=1, max_size=6),
    st.sampled_from([0, 0, 0, 1]),
    st.booleans(),
)
def test_order_of_outcomes(reports: list[RankReport], shift: int, joins: bool) -> None:
    """Divergence, stop, pass end, end, skip, emit: the first that holds, written as the design words it."""
    fingerprints = (9 + shift, *(9 for _ in reports[1:]))
    unfinished = [report for report in reports if not report.is_finished]
    if len(set(fingerprints)) > 1:
        expected = Outcome.DIVERGED
    elif any(report.stop_code for report in reports):
        expected = Outcome.STOP
    elif not joins and any(report.is_finished and report.had_views for report in reports):
        expected = Outcome.PASS_END
    elif not unfinished:
        expected = Outcome.END
    elif min(report.free_slots for report in unfinished) == 0 or not any(report.num_groups for report in unfinished):
        expected = Outcome.SKIP
    else:
        expected = Outcome.EMIT
    decision = decide(*reports, fingerprints=fingerprints, joins=joins)
    assert decision.outcome is expected
    assert decision.stop_code == (max(report.stop_code for report in reports) if expected is Outcome.STOP else 0)
    assert (decision.target > 0) == (expected is Outcome.EMIT)
    if expected is not Outcome.EMIT:
        assert decision == RoundDecision(expected, stop_code=decision.stop_code), "nothing else is said"


def test_the_end_needs_every_rank_finished() -> None:
    assert decide(FINISHED, FINISHED).outcome is Outcome.END
    assert decide(FINISHED, ACTIVE) == emit(target=3, most=3, fewest=3, bound=7)
    assert decide(FINISHED, WAITING).outcome is Outcome.SKIP
    assert decide(NEVER_HAD_VIEWS, NEVER_HAD_VIEWS).outcome is Outcome.END
    assert decide(NEVER_HAD_VIEWS, ACTIVE).outcome is Outcome.EMIT


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        pytest.param([FINISHED, ACTIVE], RoundDecision(Outcome.PASS_END), id="one-has-finished"),
        pytest.param([ACTIVE, FINISHED], RoundDecision(Outcome.PASS_END), id="another-has-finished"),
        pytest.param([FINISHED, FINISHED], RoundDecision(Outcome.PASS_END), id="all-have-finished"),
        pytest.param([FINISHED, WAITING], RoundDecision(Outcome.PASS_END), id="finished-beside-one-without-data"),
        pytest.param([FINISHED, NEVER_HAD_VIEWS], RoundDecision(Outcome.PASS_END), id="finished-beside-one-that-had-no-view"),
        pytest.param([NEVER_HAD_VIEWS, ACTIVE], emit(3, 3, 3, 7), id="who-had-no-view-does-not-end-a-pass"),
        pytest.param([NEVER_HAD_VIEWS, NEVER_HAD_VIEWS], RoundDecision(Outcome.END), id="nobody-had-a-view"),
        pytest.param([NEVER_HAD_VIEWS, WAITING], RoundDecision(Outcome.SKIP), id="nobody-has-data"),
        pytest.param([ACTIVE, replace(ACTIVE, num_groups=5)], emit(5, 5, 3, 7), id="all-are-active"),
    ],
)
def test_non_join(reports: list[RankReport], expected: RoundDecision) -> None:
    assert decide(*reports, joins=False) == expected


def test_the_end_of_a_pass_comes_after_a_stop_and_divergence_and_before_a_skip() -> None:
    full = replace(ACTIVE, capacity=0, free_slots=0)
    assert decide(FINISHED, full, joins=False).outcome is Outcome.PASS_END
    assert decide(FINISHED, replace(full, stop_code=4), joins=False) == RoundDecision(Outcome.STOP, stop_code=4)
    assert decide(replace(FINISHED, stop_code=4), ACTIVE, joins=False) == RoundDecision(Outcome.STOP, stop_code=4)
    assert decide(FINISHED, ACTIVE, joins=False, fingerprints=(1, 2)) == RoundDecision(Outcome.DIVERGED)


def test_a_pass_never_ends_in_join() -> None:
    assert decide(FINISHED, ACTIVE).outcome is Outcome.EMIT
    assert decide(FINISHED, FINISHED).outcome is Outcome.END


@given(st.lists(rank_reports(stop_codes=st.sampled_from([0, 0, 0, 3])), min_size=1, max_size=8))
def test_join_and_non_join_differ_only_where_a_rank_has_finished(reports: list[RankReport]) -> None:
    has_finished = any(report.is_finished and report.had_views for report in reports)
    is_stopped = any(report.stop_code for report in reports)
    assert (decide(*reports) != decide(*reports, joins=False)) == (has_finished and not is_stopped)


def test_a_finished_rank_without_slots_blocks_nobody_but_an_unfinished_one_does() -> None:
    full = replace(ACTIVE, capacity=0, free_slots=0)
    assert decide(FINISHED, ACTIVE).outcome is Outcome.EMIT
    assert decide(full, ACTIVE).outcome is Outcome.SKIP
    assert decide(replace(WAITING, free_slots=0), ACTIVE).outcome is Outcome.SKIP


def test_a_stop_comes_before_the_end_and_the_largest_code_wins() -> None:
    assert decide(replace(FINISHED, stop_code=2), replace(FINISHED, stop_code=7)) == RoundDecision(Outcome.STOP, stop_code=7)
    assert decide(replace(FINISHED, stop_code=1), ACTIVE) == RoundDecision(Outcome.STOP, stop_code=1)


@pytest.mark.parametrize("fingerprints", [(1, 2), (2, 1), (0, 1), (0, 2**62 - 1)])
def test_a_different_fingerprint_is_divergence_whatever_else_holds(fingerprints: tuple[int, int]) -> None:
    stopping = replace(FINISHED, stop_code=9)
    assert decide(stopping, stopping, fingerprints=fingerprints) == RoundDecision(Outcome.DIVERGED)
    assert decide(ACTIVE, ACTIVE, fingerprints=fingerprints) == RoundDecision(Outcome.DIVERGED)


@given(rank_reports(stop_codes=st.integers(0, 9)), st.integers(0, 2**62 - 1))
def test_a_report_is_ten_integers_that_fit_into_int64(report: RankReport, fingerprint: int) -> None:
    encoded = encode_report(report, fingerprint)
    assert len(encoded) == REPORT_SIZE == 10
    assert all(type(value) is int and -(2**63) <= value < 2**63 for value in encoded)


@given(
    st.lists(rank_reports(stop_codes=st.sampled_from([0, 0, 0, 3])), min_size=1, max_size=8),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
    st.booleans(),
)
def test_integers_that_follow_change_nothing(reports: list[RankReport], more: list[int], joins: bool) -> None:
    reduced = reduce_max([encode_report(report, 5) for report in reports])
    assert decide_round([*reduced, *more], joins=joins) == decide_round(reduced, joins=joins)


def test_the_layout_of_a_report_is_the_one_of_the_design() -> None:
    report = RankReport(num_groups=4, capacity=6, num_samples=9, free_slots=5, is_finished=False, had_views=True, stop_code=2)
    assert encode_report(report, 77) == [4, -4, -6, -9, -5, 1, 0, 2, 77, -77]
    assert encode_report(FINISHED, 77) == [0, -INF, -INF, -INF, -INF, 0, 1, 0, 77, -77]
    assert encode_report(replace(FINISHED, had_views=False), 77)[6] == 0


@given(st.lists(rank_reports(stop_codes=st.sampled_from([0, 0, 3])), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_the_conclusion_does_not_depend_on_who_is_which_rank(reports: list[RankReport], rng: random.Random) -> None:
    for joins in (True, False):
        assert decide(*rng.sample(reports, len(reports)), joins=joins) == decide(*reports, joins=joins)
