"""Accumulation windows: every micro-batch leaves with the sums of its whole window, and in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_lightning.plan import AccumulationWindows, exchange_blocks
from odb_lightning.plan.accumulation import SummedStep


def run_epoch(
    steps: list[tuple[int, int]], accumulate: int, max_steps: int | None = None, quota: int | None = None
) -> list[list[SummedStep[int]]]:
    """What each `add` released, and last what the end of the epoch released; items are the numbers of the steps."""
    windows: AccumulationWindows[int] = AccumulationWindows(accumulate, max_steps, quota)
    released = []
    for number, (targets, samples) in enumerate(steps):
        if windows.is_full:
            break
        released.append(windows.add(number, targets, samples))
    return [*released, windows.flush()]


def test_a_window_is_released_whole_by_its_last_step() -> None:
    released = run_epoch([(5, 1), (0, 2), (7, 3), (1, 1)], accumulate=2)
    assert released == [
        [],
        [SummedStep(0, 5, 1, 5, 3), SummedStep(1, 0, 2, 5, 3)],
        [],
        [SummedStep(2, 7, 3, 8, 4), SummedStep(3, 1, 1, 8, 4)],
        [],
    ]


def test_the_end_of_the_epoch_makes_a_short_window() -> None:
    released = run_epoch([(1, 1)] * 5, accumulate=4)
    assert [len(steps) for steps in released] == [0, 0, 0, 4, 0, 1]
    assert released[3][0].window_targets == 4
    assert released[5] == [SummedStep(4, 1, 1, 1, 1)]


def test_a_limit_of_steps_ends_the_window_there() -> None:
    """limit_train_batches=5 with k = 4 steps the optimizer after 4 and after 1."""
    released = run_epoch([(1, 1)] * 9, accumulate=4, max_steps=5)
    assert [len(steps) for steps in released] == [0, 0, 0, 4, 1, 0]
    assert released[4][0].window_targets == 1


def test_a_quota_reached_within_a_window_ends_it_there() -> None:
    """3 + 4 + 2 samples are enough: the second window has one step, and its own sums."""
    released = run_epoch([(10, 3), (20, 4), (30, 2), (40, 5)], accumulate=2, quota=8)
    assert released == [
        [],
        [SummedStep(0, 10, 3, 30, 7), SummedStep(1, 20, 4, 30, 7)],
        [SummedStep(2, 30, 2, 30, 2)],
        [],
    ]


def test_a_quota_reached_exactly_is_reached() -> None:
    released = run_epoch([(1, 4), (1, 4), (1, 4), (1, 4)], accumulate=3, quota=8)
    assert [[step.item for step in steps] for steps in released] == [[], [0, 1], []]
    assert released[1][0].window_samples == 8


def test_one_sample_short_of_the_quota_the_window_goes_on() -> None:
    released = run_epoch([(1, 4), (1, 3), (1, 4), (1, 4)], accumulate=3, quota=8)
    assert [[step.item for step in steps] for steps in released] == [[], [], [0, 1, 2], []]


def test_a_quota_reached_by_the_last_step_of_a_window_leaves_no_short_one() -> None:
    released = run_epoch([(1, 1)] * 9, accumulate=3, quota=6)
    assert [len(steps) for steps in released] == [0, 0, 3, 0, 0, 3, 0]


@pytest.mark.parametrize(
    ("max_steps", "quota", "sizes"),
    [
        pytest.param(7, 10, [0, 0, 3, 0, 2, 0], id="quota-first"),
        pytest.param(4, 10, [0, 0, 3, 1, 0], id="steps-first"),
        pytest.param(5, 10, [0, 0, 3, 0, 2, 0], id="both-at-once"),
        pytest.param(6, 12, [0, 0, 3, 0, 0, 3, 0], id="both-at-the-end-of-a-window"),
        pytest.param(None, 10, [0, 0, 3, 0, 2, 0], id="quota-alone"),
        pytest.param(7, None, [0, 0, 3, 0, 0, 3, 1, 0], id="steps-alone"),
        pytest.param(7, 999, [0, 0, 3, 0, 0, 3, 1, 0], id="quota-out-of-reach"),
        pytest.param(2, 1, [1, 0], id="quota-of-one"),
    ],
)
def test_a_quota_and_a_limit_of_steps_end_the_epoch_whichever_is_first(
    max_steps: int | None, quota: int | None, sizes: list[int]
) -> None:
    """Nine steps of two samples, three of them to an update."""
    assert [len(steps) for steps in run_epoch([(5, 2)] * 9, 3, max_steps, quota)] == sizes


def test_idle_steps_bring_a_quota_no_nearer() -> None:
    released = run_epoch([(0, 0)] * 4 + [(3, 1)], accumulate=2, quota=1)
    assert [len(steps) for steps in released] == [0, 2, 0, 2, 1, 0]


def test_without_accumulation_nothing_waits() -> None:
    assert [len(steps) for steps in run_epoch([(2, 1)] * 3, accumulate=1)] == [1, 1, 1, 0]


def test_flush_empties_the_window() -> None:
    windows: AccumulationWindows[str] = AccumulationWindows(3)
    windows.add("a", 1, 1)
    assert [step.item for step in windows.flush()] == ["a"]
    assert windows.flush() == []


@pytest.mark.parametrize(("max_steps", "expected"), [(None, False), (3, False), (2, True), (1, True)])
def test_is_full_says_that_the_epoch_has_all_its_steps(max_steps: int | None, expected: bool) -> None:
    windows: AccumulationWindows[int] = AccumulationWindows(4, max_steps)
    assert not windows.is_full
    for number in range(2):
        windows.add(number, 1, 1)
    assert windows.is_full is expected


@pytest.mark.parametrize(("quota", "expected"), [(None, False), (7, False), (6, True), (5, True)])
def test_is_full_says_that_the_epoch_has_all_its_samples(quota: int | None, expected: bool) -> None:
    windows: AccumulationWindows[int] = AccumulationWindows(4, quota=quota)
    assert not windows.is_full
    for number in range(2):
        windows.add(number, 100, 3)
    assert windows.is_full is expected
    windows.flush()
    assert windows.is_full is expected
    assert (windows.num_steps, windows.num_samples) == (2, 6)


def test_weights_that_are_fractions_are_summed_as_they_are() -> None:
    released = run_epoch([(0.25, 1), (0.5, 1)], accumulate=2)[1]  # type: ignore[list-item]
    assert [step.window_targets for step in released] == [0.75, 0.75]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=30),
    st.integers(1, 6),
    st.none() | st.integers(1, 30),
    st.none() | st.integers(1, 150),
)
def test_each_step_once_in_order_with_the_sums_of_its_own_window(
    steps: list[tuple[int, int]], accumulate: int, max_steps: int | None, quota: int | None
) -> None:
    num_steps = len(steps) if max_steps is None else min(len(steps), max_steps)
    if quota is not None:
        enough = [number for number in range(len(steps) + 1) if sum(samples for _, samples in steps[:number]) >= quota]
        num_steps = min([num_steps, *enough])
    released = run_epoch(steps, accumulate, max_steps, quota)
    flat = [step for released_steps in released for step in released_steps]
    assert [step.item for step in flat] == list(range(num_steps))
    for step in flat:
        first = step.item // accumulate * accumulate
        window = steps[first : min(first + accumulate, num_steps)]
        assert (step.global_targets, step.global_samples) == steps[step.item]
        assert (step.window_targets, step.window_samples) == (sum(t for t, _ in window), sum(s for _, s in window))
    waiting = [number - sum(map(len, released[:number])) for number in range(num_steps + 1)]
    assert max(waiting) <= accumulate - 1
    assert len(released[-1]) == waiting[-1]
    if num_steps == max_steps or (quota is not None and sum(samples for _, samples in steps[:num_steps]) >= quota):
        assert waiting[-1] == 0


@given(st.integers(0, 500), st.integers(1, 40), st.integers(1, 40))
def test_exchange_blocks_are_whole_windows_and_add_up(num_steps: int, accumulate: int, at_least: int) -> None:
    blocks = list(exchange_blocks(num_steps, accumulate, at_least))
    assert sum(blocks) == num_steps
    assert all(block > 0 for block in blocks)
    assert all(block % accumulate == 0 and at_least <= block < at_least + accumulate for block in blocks[:-1])
    assert not blocks or blocks[-1] <= at_least + accumulate - 1


@pytest.mark.parametrize(
    ("num_steps", "accumulate", "expected"),
    [(0, 4, []), (5, 4, [5]), (40, 4, [16, 16, 8]), (40, 3, [18, 18, 4]), (40, 32, [32, 8])],
)
def test_exchange_block_examples(num_steps: int, accumulate: int, expected: list[int]) -> None:
    assert list(exchange_blocks(num_steps, accumulate)) == expected
