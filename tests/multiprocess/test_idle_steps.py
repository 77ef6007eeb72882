"""Nothing of an idle step stays: not in gradients, random numbers or metrics, and it hangs no collective of the user's."""

from __future__ import annotations

import math
from itertools import chain, islice
from typing import Any

import pytest

from tests.multiprocess.fitting import ByCase, run_group
from tests.multiprocess.idle_cases import SHARDS

GROUPS = [["ddp"], ["zero0", "zero1", "zero2", "zero3"], ["fsdp2"]]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]


@pytest.fixture(scope="module", params=[strategy for group in GROUPS for strategy in group])
def fits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ByCase:
    """Per case the result of each rank."""
    folder = tmp_path_factory.mktemp(request.param)
    return run_group("tests.multiprocess.idle_cases:all_cases", GROUPS, request.param, folder, seconds=180)


@pytest.mark.parametrize("case", SHARDS)
def test_ranks_are_idle_in_between_or_first(fits: Any, case: str) -> None:
    idle, other = (rank["is_idle"] for rank in (fits[case] if "rank 0" in case else fits[case][::-1]))
    if "step 0" in case:
        assert (idle, other) == ([[True] * 3, [False] * 3], [[False] * 3, [False] * 2 + [True]])
    else:
        assert (idle, other) == ([[False] + [True] * 3, [False] * 2], [[False] * 4, [False] * 2])


@pytest.mark.parametrize("case", SHARDS)
def test_infinity_and_nan_of_an_idle_step_stay_out_of_the_parameters(fits: Any, case: str) -> None:
    for rank in fits[case]:
        assert rank["error"] < 2e-6
        assert rank["spread"] == 0.0
        assert all(abs(value) < 100.0 for value in rank["metrics"].values()), "nor are they logged"


@pytest.mark.parametrize("case", SHARDS)
def test_random_numbers_are_those_of_a_run_without_idle_steps(fits: Any, case: str) -> None:
    """Of torch (a dropout mask, too), numpy and Python; in the step, and where the batch comes to the device."""
    for rank in fits[case]:
        assert rank["drawn"] == rank["undisturbed"]
        assert len(rank["drawn"]) == 2 * sum(not idle for epoch in rank["is_idle"] for idle in epoch)


@pytest.mark.parametrize("case", SHARDS)
def test_metrics_of_the_module_count_nothing(fits: Any, case: str) -> None:
    """Idle steps would add rows of 99."""
    for rank in fits[case]:
        assert rank["counted"] == [rank["rows"], rank["rows"]]
        assert rank["metrics"]["mean_of_rows"] == 1.0
        assert rank["counted_by_hooks"] == 3 * rank["rows"], (
            "by updates in the transfer and before the step, and a call after it"
        )


@pytest.mark.parametrize("case", SHARDS)
def test_metrics_computed_or_synced_within_a_step_are_those_of_the_active_ranks(fits: Any, case: str) -> None:
    """The step's value of one with `dist_sync_on_step`; another's of all steps so far, in the step and in the hook after it;
    and the mean at an epoch's end."""
    first, second = fits[case]
    expected: list[list[float]] = []
    sizes, so_far = iter(first["sizes"]), 0.0
    for is_idle in first["is_idle"]:
        for rows in islice(sizes, len(is_idle)):
            so_far += rows
            expected.append([float(rows), so_far, so_far])
        expected.append([1.0])
    assert first["computed"] == second["computed"] == expected


@pytest.mark.parametrize("case", SHARDS)
def test_a_reset_in_an_idle_step_holds(fits: Any, case: str) -> None:
    for rank in fits[case]:
        assert rank["left"] == rank["rows_since_reset"]


@pytest.mark.parametrize("case", SHARDS)
def test_buffers_are_put_back(fits: Any, case: str, request: pytest.FixtureRequest) -> None:
    """Changed in place, and by an assignment."""
    strategy = request.node.callspec.params["fits"]
    for rank in fits[case][: 1 if strategy == "ddp" else 2]:  # where each step begins with those of rank 0
        assert rank["buffers"] == [rank["is_active"].count(True)] * 2


@pytest.mark.parametrize("case", SHARDS)
def test_logs_and_reductions_are_those_of_the_active_ranks(fits: Any, case: str) -> None:
    """Of a hook after the step, and a product."""
    first, second = fits[case]
    for rank in (first, second):
        assert {rank["metrics"][name] for name in ("by_hook", "by_hook_step", "by_hook_epoch")} == {1.0}
        assert rank["reduced"] == [2.0 ** (a + b) for a, b in zip(first["is_active"], second["is_active"], strict=True)]


@pytest.mark.parametrize("case", SHARDS)
def test_what_a_rank_logs_of_its_own_is_there_from_the_first_step_on(fits: Any, case: str) -> None:
    """Without `sync_dist`: that of its last active step of the epoch, and NaN before the first."""
    for rank in fits[case]:
        expected: list[float] = []
        for epoch in rank["is_idle"]:
            last = math.nan
            for step, is_idle in enumerate(epoch):
                last = last if is_idle else float(step)
                expected.append(last)
        assert rank["logged"] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("case", SHARDS)
def test_collectives_of_the_training_step_are_made_by_every_rank(fits: Any, case: str) -> None:
    """An all_reduce of who is idle, and an all_gather of the ranks' numbers."""
    first, second = fits[case]
    steps = zip(chain(*first["is_idle"]), chain(*second["is_idle"]), strict=True)
    assert first["gathered"] == second["gathered"] == [[float(one or two), 0.0, 1.0] for one, two in steps]
