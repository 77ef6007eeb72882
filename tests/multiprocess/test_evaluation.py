"""Validation and prediction see each sample once, whatever the ranks' shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.evaluation_cases import expected_predictions
from tests.multiprocess.ranks import run_ranks

SHARDS = [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [12]]


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("shards", [SHARDS, SHARDS[::-1]], ids=["rank 1 idle", "rank 0 idle"])
def test_idle_ranks_take_part_and_count_nothing(strategy: str, shards: list[list[int]], tmp_path: Path) -> None:
    ranks = run_ranks(
        "tests.multiprocess.evaluation_cases:evaluate", 2, tmp_path, seconds=150, strategy=strategy, shards=shards
    )
    for rank, shard in zip(ranks, shards, strict=True):
        assert rank.value["val_loss"] == pytest.approx(rank.value["expected"], rel=1e-5)
        if strategy == "ddp":
            predicted = [row for rows in rank.value["predictions"] if rows is not None for row in rows]
            assert sorted(predicted) == expected_predictions(shard)
