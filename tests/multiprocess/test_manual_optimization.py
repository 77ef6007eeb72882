"""Under manual optimization `manual_backward` is scaled as the automatic one is, windows and idle steps included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.manual_and_batch_norm_cases import MANUAL
from tests.multiprocess.ranks import run_ranks

ROUNDING = 2e-6  # float32 parameters against a float64 reference, a few updates

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(100)]


def _results(function: str, folder: Path, **arguments: Any) -> dict[str, list[Any]]:
    ranks = run_ranks(f"tests.multiprocess.manual_and_batch_norm_cases:{function}", 2, folder, seconds=90, **arguments)
    return {name: [rank.value[name] for rank in ranks] for name in ranks[0].value}


@pytest.fixture(scope="module", params=["ddp", "zero2", "fsdp2"])
def fits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return _results("manual", tmp_path_factory.mktemp(request.param), strategy=request.param)


@pytest.fixture(scope="module")
def with_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return _results("manual_with_ddp", tmp_path_factory.mktemp("more"))


@pytest.mark.parametrize("case", MANUAL)
def test_the_update_is_the_mean_over_all_its_targets(fits: dict[str, list[Any]], case: str) -> None:
    for rank in fits[case]:
        assert rank["error"] < ROUNDING
        assert rank["spread"] == 0.0
        assert rank["moved"] > 1e-2
    assert any(any(rank["idle"]) for rank in fits[case])


def test_several_backwards_in_a_step(with_ddp: dict[str, list[Any]]) -> None:
    """All of their forwards are without a trace in an idle step."""
    for rank in with_ddp["two backwards"]:
        assert rank["error"] < ROUNDING
        assert rank["calls"] == 2 * rank["idle"].count(False)
    assert any(with_ddp["two backwards"][1]["idle"])


def test_several_backwards_in_a_step_are_refused_under_deepspeed(tmp_path: Path) -> None:
    """Of which the last alone would count."""
    function = "tests.multiprocess.manual_and_batch_norm_cases:two_backwards_with_deepspeed"
    for rank in run_ranks(function, 2, tmp_path, seconds=60):
        assert rank.value.startswith("RuntimeError: DeepSpeed takes one backward in a training_step")
        assert "Add the losses" in rank.value


def test_the_strategy_may_count(with_ddp: dict[str, list[Any]]) -> None:
    for rank in with_ddp["counted by the strategy"]:
        assert rank["error"] < ROUNDING
        assert rank["moved"] > 1e-2
