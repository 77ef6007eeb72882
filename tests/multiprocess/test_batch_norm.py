"""BatchNorm in training mode on idle ranks, whose stand-in is of one sample; SyncBatchNorm is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.fitting import ByCase, run_group
from tests.multiprocess.manual_and_batch_norm_cases import BATCH_NORM
from tests.multiprocess.ranks import run_ranks

CASES_FILE = "tests.multiprocess.manual_and_batch_norm_cases"
GROUPS = [["ddp"], ["zero0", "zero1", "zero2", "zero3"], ["fsdp2"]]
ROUNDING = 1e-5  # float32 against float64; of two rows a BatchNorm makes almost signs

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(100)]


@pytest.fixture(scope="module", params=[strategy for group in GROUPS for strategy in group])
def fits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ByCase]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, run_group(f"{CASES_FILE}:batch_norm", GROUPS, request.param, folder, seconds=90)


@pytest.mark.parametrize("case", BATCH_NORM)
def test_an_idle_rank_takes_part_and_its_stand_in_goes_into_no_statistics(fits: tuple[str, ByCase], case: str) -> None:
    strategy, results = fits
    for rank, result in enumerate(results[case]):
        assert result["error"] < ROUNDING
        assert result["moved"] > 1e-2
        assert any(result["idle"]) == (f"rank {rank} idle" in case)
        if strategy == "ddp" and rank > 0:
            continue  # which has rank 0's, from before its last steps
        assert result["tracked"] == result["idle"].count(False)


def test_sync_batch_norm_is_refused_before_the_first_step(tmp_path: Path) -> None:
    for rank in run_ranks(f"{CASES_FILE}:sync_batch_norm", 2, tmp_path, seconds=60):
        for message in rank.value.values():
            assert message.startswith("ValueError: SyncBatchNorm can't be used with an ODBDataLoader on several ranks")
