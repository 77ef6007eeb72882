"""The update is exact under variants of the strategies, for other objectives, and for windows that change between epochs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.multiprocess.ranks import run_ranks
from tests.multiprocess.strategy_variant_cases import CASES, OBJECTIVES, VARIANTS, can_run

ROUNDING = 2e-6  # float32 parameters against a float64 reference, a few updates
CASES_FILE = "tests.multiprocess.strategy_variant_cases"

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(160)]


def _results(function: str, folder: Any, **arguments: Any) -> dict[str, list[Any]]:
    ranks = run_ranks(f"{CASES_FILE}:{function}", 2, folder, seconds=150, **arguments)
    return {name: [rank.value[name] for rank in ranks] for name in ranks[0].value}


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Those that can, share processes."""
    results: dict[str, list[Any]] = {}
    for number, kinds in enumerate((("DDP", "FSDP1"), ("ZeRO",))):
        chosen = [variant for variant in VARIANTS if any(kind in variant for kind in kinds)]
        results |= _results("all_cases", tmp_path_factory.mktemp(str(number)), variants=chosen)
    return results


@pytest.fixture(scope="module")
def objectives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return _results("objectives", tmp_path_factory.mktemp("objectives"))


@pytest.mark.parametrize(
    ("variant", "case"), [(variant, case) for variant in VARIANTS for case in CASES if can_run(variant, CASES[case])]
)
def test_the_update_is_the_mean_over_all_its_targets(fits: dict[str, list[dict[str, Any]]], variant: str, case: str) -> None:
    result = fits[f"{variant}: {case}"]
    for rank in result:
        assert rank["error"] < ROUNDING
        assert rank["spread"] == 0.0
        assert rank["moved"] > 1e-2
    assert any(any(rank["idle"]) for rank in result)


@pytest.mark.parametrize("objective", [*OBJECTIVES, "scheduled"])
def test_other_objectives_and_changing_windows(objectives: dict[str, list[dict[str, Any]]], objective: str) -> None:
    for rank in objectives[objective]:
        assert rank["error"] < ROUNDING
        assert rank["moved"] > 1e-2
    assert any(objectives[objective][1]["idle"])


def test_windows_follow_the_scheduler(objectives: dict[str, list[dict[str, Any]]]) -> None:
    result = objectives["scheduled"][0]
    num_steps = [sum(at == epoch for at, _, _ in result["steps"]) for epoch in range(4)]
    assert result["updates"] == sum(-(-steps // k) for steps, k in zip(num_steps, (3, 3, 1, 2), strict=True))
    assert result["global_step"] == result["updates"]


def test_deepspeed_with_a_scheduler_is_refused_before_the_first_step(tmp_path: Any) -> None:
    for rank in run_ranks(f"{CASES_FILE}:deepspeed_and_a_schedule", 2, tmp_path, seconds=90):
        assert "does not support `accumulate_grad_batches` changing between epochs" in rank.value


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="FSDP1 on two GPUs")
def test_fsdp_on_gpus(tmp_path: Any) -> None:
    """What the variants named FSDP1 above do on a stand-in for the accelerator."""
    results = _results("on_gpus", tmp_path)
    assert results
    for name, ranks in results.items():
        for rank in ranks:
            assert rank["error"] < 1e-5, name
            assert rank["moved"] > 1e-2
            assert rank["spread"] == 0.0
