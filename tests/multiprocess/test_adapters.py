"""Adapters and partly frozen models are trained exactly, idle ranks and gradient checkpointing included."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiprocess.adapter_cases import cases_under
from tests.multiprocess.fitting import ByCase, run_group

GROUPS = [["single"], ["ddp"], ["zero0", "zero1", "zero2", "zero3"], ["fsdp2"]]

pytest.importorskip("peft")
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]


@pytest.fixture(scope="module", params=[strategy for group in GROUPS for strategy in group])
def fits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ByCase]:
    """Per case the result of each rank."""
    folder = tmp_path_factory.mktemp(request.param)
    cases = "tests.multiprocess.adapter_cases:all_cases"
    return request.param, run_group(cases, GROUPS, request.param, folder, seconds=180)


def test_what_is_trainable_moves_exactly_and_alike_on_all_ranks(fits: Any) -> None:
    strategy, results = fits
    assert list(results) == cases_under(strategy)
    for case, ranks in results.items():
        for rank in ranks:
            assert rank["trainable_moved"] > 0.99, "all but what rounding keeps"
            assert rank["error"] < 2e-5, case
            assert rank["spread"] == 0.0


def test_what_is_frozen_stays_to_the_bit(fits: Any) -> None:
    for case, ranks in fits[1].items():
        for rank in ranks:
            assert rank["frozen"] > 1000
            assert rank["frozen_moved"] == 0.0, case


def test_idle_steps_run_the_module_and_checkpoints_run_it_again(fits: Any) -> None:
    for case, ranks in fits[1].items():
        assert {rank["runs_per_step"] for rank in ranks} == {2 if "checkpointing" in case else 1}


def test_the_cases_hold_what_they_are_named_for(fits: Any) -> None:
    """On one device no step is idle, and an update has two batches, but for a last one."""
    strategy, results = fits
    for case, ranks in results.items():
        if strategy == "single":
            assert ranks[0]["is_idle"] == ([[False] * 2] * 2 if "never" in case else [[False] * 2, [False] * 3])
            assert ranks[0]["updates"] == (2 if "never" in case else 3)
            continue
        first, second = (rank["is_idle"] for rank in ranks)
        if "rank 1 idle at step 0" in case:
            assert second == [[True] * 2, [False] * 2] and first == [[False] * 2, [False, True]]
        elif "rank 0 idle at step 0" in case:
            assert first == [[True] * 2, [False] * 2]
        else:
            assert first == [[True] * 2] * 2 and second == [[False] * 2] * 2
