"""The update is exact on four ranks as it is on two, here under ZeRO-2."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiprocess.four_rank_cases import ACCUMULATE, SHARDS
from tests.multiprocess.ranks import run_ranks
from tests.multiprocess.test_precision import check_clipped

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    results = run_ranks("tests.multiprocess.four_rank_cases:all_cases", 4, folder, seconds=180, strategy="zero2")
    return [result.value for result in results]


@pytest.mark.parametrize("case", ACCUMULATE)
def test_parameters_equal_those_of_a_single_process_in_float64(ranks: list[dict[str, Any]], case: str) -> None:
    samples = [index for shard in SHARDS for epoch in shard for index in epoch]
    for rank in ranks:
        assert rank[case]["error"] < 1e-5
        assert rank[case]["spread"] == 0.0
        assert rank[case]["trained"] == sorted(samples)
        assert rank[case]["updates"] == sum(-(-steps // ACCUMULATE[case]) for steps in (5, 5))


def test_ranks_are_idle_first_last_in_between_and_always(ranks: list[dict[str, Any]]) -> None:
    one, two, three, four = (rank["k=1"]["is_idle"] for rank in ranks)
    assert one == [[False] * 5, [False] * 2 + [True] * 3]
    assert two == [[True] * 5, [False] * 5]
    assert three == [[False] * 3 + [True] * 2, [False] * 2 + [True] * 3]
    assert four == [[True] * 5] * 2


def test_clipping_sees_the_gradient_of_the_whole_batch(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        check_clipped(rank["clipped"])
    assert sum(rank["clipped"]["idle"] for rank in ranks) > 0
