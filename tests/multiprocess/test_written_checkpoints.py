"""A checkpoint that was being written when its run was killed leaves the one whole that it was to replace."""

from __future__ import annotations

from pathlib import Path

import pytest

from odb_lightning.checkpoints import fault_of
from tests.multiprocess.ranks import run_ranks
from tests.multiprocess.written_checkpoints import BATCHES, NAME

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]


@pytest.mark.parametrize(("strategy", "victim"), [("ddp", 0), ("zero3", 1), ("fsdp2", 0)])
def test_the_checkpoint_before_is_whole_and_gone_on_from(strategy: str, victim: int, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    functions = "tests.multiprocess.written_checkpoints"
    options = {"strategy": strategy, "place": str(place)}
    ranks = run_ranks(f"{functions}:killed", 2, tmp_path, check=False, rank=victim, **options)
    assert ranks[victim].status == -9 and ranks[1 - victim].status != 0
    assert sorted(path.name for path in place.iterdir()) == [NAME, f"{NAME}.part"]
    assert fault_of(place / NAME) is None and fault_of(place / f"{NAME}.part") is not None

    for rank in run_ranks(f"{functions}:whole_and_resumed", 2, tmp_path, **options):
        whole, resumed = rank.value
        assert resumed["seen"] == whole["seen"][BATCHES[0] + 1 :] and resumed["final"] == whole["final"]
