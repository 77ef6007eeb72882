"""The update is the gradient of the mean over all supervised tokens of all ranks and micro-batches, in each strategy."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.ranks import run_ranks
from tests.multiprocess.training_cases import CASES, WRONG, logged_value, make_network

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp2"]
ROUNDING = 2e-6  # float32 parameters against a float64 reference, a few updates

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]


@pytest.fixture(scope="module", params=STRATEGIES)
def fits(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """Per case the result of each rank. A strategy's cases share one pair of processes: starting those takes longest."""
    ranks = run_ranks(
        "tests.multiprocess.training_cases:all_cases",
        2,
        tmp_path_factory.mktemp(request.param),
        seconds=180,
        strategy=request.param,
    )
    return request.param, {name: [rank.value[name] for rank in ranks] for name in ranks[0].value}


@pytest.mark.parametrize("case", CASES)
def test_parameters_equal_those_of_a_single_process_in_float64(fits: Any, case: str) -> None:
    strategy, results = fits
    for rank in results[case]:
        assert rank["error"] < ROUNDING, f"{strategy}, {case}"
        assert rank["spread"] == 0.0
        assert (rank["moved"] > 1e-2) == (case != "a window without targets")


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_make_equal_steps(fits: Any, case: str) -> None:
    _, results = fits
    first, second = results[case]
    assert [step[:2] for step in first["steps"]] == [step[:2] for step in second["steps"]]
    assert first["global_step"] == second["global_step"]
    assert not any(a and b for a, b in zip(first["idle"], second["idle"], strict=True))


@pytest.mark.parametrize("case", CASES)
def test_each_view_is_trained_once_an_epoch(fits: Any, case: str) -> None:
    _, results = fits
    if "limit" in CASES[case]:
        assert len(results[case][0]["steps"]) == CASES[case]["limit"] * CASES[case]["max_epochs"]
        return
    for rank, shard in zip(results[case], CASES[case]["shards"], strict=True):
        for epoch in range(CASES[case].get("max_epochs", 1)):
            seen = [index for at, _, sample_ids in rank["steps"] if at == epoch for index in sample_ids]
            assert sorted(seen) == sorted(shard)


def test_the_cases_hold_what_they_are_named_for(fits: Any) -> None:
    strategy, results = fits
    assert any(results["k=1, rank 1 idle"][1]["idle"]) and not any(results["k=1, rank 1 idle"][0]["idle"])
    assert any(results["k=1, rank 0 idle"][0]["idle"]) and not any(results["k=1, rank 0 idle"][1]["idle"])
    short = results["k=4, short last window"][0]
    assert len([step for step in short["steps"] if step[0] == 0]) % 4 != 0
    assert all(results["a rank that never had a sample"][0]["idle"])
    eight, two = results["eight full batches against two"]
    assert (len(eight["steps"]), len(two["steps"]), sum(eight["idle"]), sum(two["idle"])) == (8, 8, 0, 6)
    assert results["k=3"][0]["zero_stage"] == (int(strategy[-1]) if strategy.startswith("zero") else None)


def test_zero_really_divides_the_optimizer_state(fits: Any) -> None:
    strategy, results = fits
    num_parameters = sum(parameter.numel() for parameter in make_network().parameters())
    held = [rank["optimizer_state"] for rank in results["k=3"]]
    if strategy == "ddp":
        assert held == [num_parameters, num_parameters]
    else:
        assert all(size < 0.6 * num_parameters for size in held) and sum(held) >= num_parameters


def test_the_module_sees_what_collate_fn_returned(fits: Any) -> None:
    _, results = fits
    assert results["k=3"][0]["batch_keys"] == ["input_ids", "labels"]


LOGGED = ["k=1, rank 1 idle", "k=1, rank 0 idle", "k=4, short last window", "a rank that never had a sample"]


def _last_epoch(ranks: list[dict[str, Any]]) -> list[tuple[int, int, int, float]]:
    """Rank, step, rows and loss of each batch that was no stand-in."""
    last = ranks[0]["steps"][-1][0]
    return [
        (number, step, len(ids), loss)
        for number, rank in enumerate(ranks)
        for (epoch, step, ids), loss in zip(rank["steps"], rank["losses"], strict=True)
        if epoch == last and ids
    ]


@pytest.mark.parametrize("case", LOGGED)
def test_logged_values_are_those_of_the_active_ranks(fits: Any, case: str) -> None:
    """Idle ranks log 99, more than any other. The ranks have unequal numbers of real steps."""
    _, results = fits
    batches = _last_epoch(results[case])
    last = max(step for _, step, _, _ in batches)
    of_last_step = [logged_value(rank, step) for rank, step, _, _ in batches if step == last]
    num_rows = sum(map(len, CASES[case]["shards"]))
    weighted = sum(logged_value(rank, step) * rows for rank, step, rows, _ in batches)
    for rank in results[case]:
        metrics = rank["metrics"]
        for name in ("value", "value_of_batch"):
            assert metrics[f"{name}_step"] == pytest.approx(sum(of_last_step) / len(of_last_step))
            assert metrics[f"{name}_epoch"] == pytest.approx(weighted / num_rows)
        assert metrics["largest_step"] == max(of_last_step)
        assert metrics["largest_epoch"] == max(logged_value(rank, step) for rank, step, _, _ in batches)
        assert metrics["rows_step"] == sum(rows for _, step, rows, _ in batches if step == last)
        assert metrics["rows_epoch"] == num_rows


@pytest.mark.parametrize("case", [*LOGGED, "a batch without targets"])
def test_a_logged_loss_is_that_of_the_batches_with_targets(fits: Any, case: str) -> None:
    """Of one without it is NaN."""
    _, results = fits
    batches = _last_epoch(results[case])
    last = max(step for _, step, _, _ in batches)
    assert any(isnan(loss) for _, _, _, loss in batches) == (case == "a batch without targets")
    of_epoch = [loss for _, _, _, loss in batches if not isnan(loss)]
    of_last_step = [loss for _, step, _, loss in batches if step == last and not isnan(loss)]
    for rank in results[case]:
        assert rank["metrics"]["train_loss_epoch"] == pytest.approx(sum(of_epoch) / len(of_epoch))
        assert rank["metrics"]["train_loss_step"] == pytest.approx(sum(of_last_step) / len(of_last_step))


@pytest.mark.parametrize("change", WRONG)
def test_a_wrong_scale_is_noticed(fits: Any, change: str) -> None:
    """The comparison above can fail."""
    _, results = fits
    assert results[change][0]["error"] > 1e3 * ROUNDING


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_an_idle_rank_that_adds_a_cheap_zero_is_noticed(strategy: str, tmp_path: Path) -> None:
    """ZeRO fills its buckets in the order of gradient hooks, so a zero from elsewhere adds up different parameters."""
    for rank in run_ranks("tests.multiprocess.training_cases:cheap_zero", 2, tmp_path, seconds=90, strategy=strategy):
        assert rank.value["error"] > 1e3 * ROUNDING
