"""The update is exact under variants of the strategies, for other objectives, and for windows that change between epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiprocess.fitting import ByCase, run_group
from tests.multiprocess.ranks import run_ranks
from tests.multiprocess.strategy_variant_cases import CASES, OBJECTIVES, VARIANTS, can_run

ROUNDING = 2e-6  # float32 parameters against a float64 reference, a few updates
CASES_FILE = "tests.multiprocess.strategy_variant_cases"
GROUPS = [["single"], ["ddp"], ["zero0", "zero1", "zero2", "zero3"], ["fsdp2"]]
"""Those that can, share processes."""

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(160)]


def _results(function: str, folder: Path, **arguments: Any) -> ByCase:
    ranks = run_ranks(f"{CASES_FILE}:{function}", 2, folder, seconds=150, **arguments)
    return {name: [rank.value[name] for rank in ranks] for name in ranks[0].value}


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> ByCase:
    """Those that can, share processes."""
    results: ByCase = {}
    for number, kinds in enumerate((("DDP", "FSDP1"), ("ZeRO",))):
        chosen = [variant for variant in VARIANTS if any(kind in variant for kind in kinds)]
        results |= _results("all_cases", tmp_path_factory.mktemp(str(number)), variants=chosen)
    return results


@pytest.fixture(scope="module", params=[strategy for group in GROUPS for strategy in group])
def objectives(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ByCase]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, run_group(f"{CASES_FILE}:objectives", GROUPS, request.param, folder, seconds=150)


@pytest.mark.parametrize(
    ("variant", "case"), [(variant, case) for variant in VARIANTS for case in CASES if can_run(variant, CASES[case])]
)
def test_the_update_is_the_mean_over_all_its_targets(fits: ByCase, variant: str, case: str) -> None:
    result = fits[f"{variant}: {case}"]
    for rank in result:
        assert rank["error"] < ROUNDING
        assert rank["spread"] == 0.0
        assert rank["moved"] > 1e-2
    assert any(any(rank["idle"]) for rank in result)


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if "offloaded" in variant])
def test_what_is_offloaded_is(fits: ByCase, variant: str) -> None:
    expected = ["offload_optimizer"] if "ZeRO 3" in variant else ["cpu_offload"]
    expected += ["offload_param"] if "parameters" in variant else []
    assert fits[f"{variant}: k=1, rank 1 idle"][0]["offloaded"] == expected


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_other_objectives(objectives: tuple[str, ByCase], objective: str) -> None:
    ranks = objectives[1][objective]
    for rank in ranks:
        assert rank["error"] < ROUNDING
        assert rank["spread"] == 0.0
        assert rank["moved"] > 1e-2
    assert any(any(rank["idle"]) for rank in ranks) == (objectives[0] != "single")


def test_windows_follow_the_scheduler(objectives: tuple[str, ByCase]) -> None:
    """DeepSpeed has none: see below."""
    strategy, results = objectives
    assert ("scheduled" in results) == (not strategy.startswith("zero"))
    for rank in results.get("scheduled", []):
        assert rank["error"] < ROUNDING
        assert rank["moved"] > 1e-2
        num_steps = [sum(at == epoch for at, _, _ in rank["steps"]) for epoch in range(4)]
        assert rank["updates"] == sum(-(-steps // k) for steps, k in zip(num_steps, (3, 3, 1, 2), strict=True))
        assert rank["global_step"] == rank["updates"]


def test_an_unscaled_loss_is_trained_on_as_by_lightning(objectives: tuple[str, ByCase]) -> None:
    """`loss_scaling="none"`: the mean over ranks and micro-batches, which have unequal numbers of targets."""
    strategy, results = objectives
    for rank in results["unscaled"]:
        assert rank["from_lightning"] < (ROUNDING if strategy.startswith("zero") else 1e-12)
        assert rank["error"] > 1e3 * ROUNDING, "is that of the mean over targets"
        assert rank["spread"] == 0.0
        assert rank["moved"] > 1e-2
        assert len(rank["steps"]) == 3 and not any(rank["idle"])


def test_deepspeed_with_a_scheduler_is_refused_before_the_first_step(tmp_path: Path) -> None:
    for rank in run_ranks(f"{CASES_FILE}:deepspeed_and_a_schedule", 2, tmp_path, seconds=90):
        assert "does not support `accumulate_grad_batches` changing between epochs" in rank.value


def test_gradients_under_manual_optimization_where_parameters_may_be_unused(tmp_path: Path) -> None:
    """One that is kept for the update of a later step stays, though a rank is idle there; of what only stand-ins use there is
    none, whatever a toggled optimizer has frozen."""
    for rank, result in enumerate(run_ranks(f"{CASES_FILE}:manual_with_unused", 2, tmp_path, seconds=90)):
        kept = result.value["kept"]
        assert kept["error"] < ROUNDING
        assert kept["spread"] == 0.0
        assert kept["moved"] > 1e-2
        assert result.value["is_idle"] == [False] + [rank == 1] * 3
        assert min(result.value["head"]) > 1e-2
        assert result.value["extra"] == [0.0, 0.0]
        first, second, third = result.value["overfitted"]
        assert any(first) and first == second == third, "though each epoch's only window is the same one"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="FSDP1 on two GPUs")
def test_fsdp_on_gpus(tmp_path: Path) -> None:
    """What the variants named FSDP1 above do on a stand-in for the accelerator."""
    results = _results("on_gpus", tmp_path)
    assert results
    for name, ranks in results.items():
        for rank in ranks:
            assert rank["error"] < 1e-5, name
            assert rank["moved"] > 1e-2
            assert rank["spread"] == 0.0
