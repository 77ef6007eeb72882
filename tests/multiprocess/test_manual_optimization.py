"""Under manual optimization `manual_backward` is scaled as the automatic one is, windows and idle steps included."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.fitting import ByCase, run_group
from tests.multiprocess.manual_and_batch_norm_cases import MANUAL
from tests.multiprocess.ranks import run_ranks

CASES_FILE = "tests.multiprocess.manual_and_batch_norm_cases"
GROUPS = [["single"], ["ddp"], ["zero0", "zero1", "zero2", "zero3"], ["fsdp2"]]
ROUNDING = 2e-6  # float32 parameters against a float64 reference, a few updates

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(100)]


@pytest.fixture(scope="module", params=[strategy for group in GROUPS for strategy in group])
def fits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ByCase]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, run_group(f"{CASES_FILE}:manual", GROUPS, request.param, folder, seconds=90)


@pytest.fixture(scope="module")
def with_ddp(tmp_path_factory: pytest.TempPathFactory) -> ByCase:
    ranks = run_ranks(f"{CASES_FILE}:manual_with_ddp", 2, tmp_path_factory.mktemp("more"), seconds=90)
    return {name: [rank.value[name] for rank in ranks] for name in ranks[0].value}


@pytest.mark.parametrize("case", MANUAL)
def test_the_update_is_the_mean_over_all_its_targets(fits: tuple[str, ByCase], case: str) -> None:
    strategy, results = fits
    for rank in results[case]:
        assert rank["error"] < ROUNDING
        assert rank["spread"] == 0.0
        assert rank["moved"] > 1e-2
        windows = {(epoch, step // MANUAL[case].get("accumulate", 1)) for epoch, step, _ in rank["steps"]}
        assert (rank["updates"] < len(windows)) == ("without targets" in case)
    assert any(any(rank["idle"]) for rank in results[case]) == (strategy != "single")


def test_the_engine_of_deepspeed_says_which_steps_are_made(fits: tuple[str, ByCase]) -> None:
    strategy, results = fits
    assert ("steps every batch" in results) == strategy.startswith("zero")
    for rank in results.get("steps every batch", []):
        assert rank["error"] < ROUNDING
        assert rank["spread"] == 0.0
        assert rank["moved"] > 1e-2


def test_several_backwards_in_a_step(with_ddp: ByCase) -> None:
    """All of their forwards are without a trace in an idle step."""
    for rank in with_ddp["two backwards"]:
        assert rank["error"] < ROUNDING
        assert rank["calls"] == 2 * rank["idle"].count(False)
    assert any(with_ddp["two backwards"][1]["idle"])


def test_what_deepspeed_would_lose_is_refused(tmp_path: Path) -> None:
    """Of several backwards in a step the last alone would count, and under ZeRO 1 and 2 of those since the last update."""
    for rank in run_ranks(f"{CASES_FILE}:refusals_of_deepspeed", 2, tmp_path, seconds=60):
        for strategy in ("zero2", "zero3"):
            several = rank.value[f"{strategy}, two backwards"]
            assert several.startswith("RuntimeError: DeepSpeed takes one backward in a training_step")
            assert "Add the losses" in several
        by_hand = rank.value["zero2, steps every second"]
        assert by_hand.startswith("RuntimeError: this backward would replace gradients that no step of the optimizer has used")
        assert "give accumulate=k to the ODBDataLoader" in by_hand
        assert rank.value["zero3, steps every second"] == "", "which adds them"


def test_the_strategy_may_count(with_ddp: ByCase) -> None:
    for rank in with_ddp["counted by the strategy"]:
        assert rank["error"] < ROUNDING
        assert rank["moved"] > 1e-2
