"""Nothing of an idle step stays: not in gradients, random numbers or metrics, and it hangs no collective of the user's."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from tests.multiprocess.idle_cases import SHARDS
from tests.multiprocess.ranks import run_ranks

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp2"]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]


@pytest.fixture(scope="module", params=STRATEGIES)
def fits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Per case the result of each rank."""
    folder = tmp_path_factory.mktemp(request.param)
    ranks = run_ranks("tests.multiprocess.idle_cases:all_cases", 2, folder, seconds=150, strategy=request.param)
    return {name: [rank.value[name] for rank in ranks] for name in ranks[0].value}


@pytest.mark.parametrize("case", SHARDS)
def test_ranks_are_idle_in_between_or_first(fits: Any, case: str) -> None:
    idle, other = (rank["is_idle"] for rank in (fits[case] if "rank 0" in case else fits[case][::-1]))
    if "step 0" in case:
        assert (idle, other) == ([[True] * 3, [False] * 3], [[False] * 3, [False] * 2 + [True]])
    else:
        assert (idle, other) == ([[False] + [True] * 3, [False] * 2], [[False] * 4, [False] * 2])


@pytest.mark.parametrize("case", SHARDS)
def test_infinity_and_nan_of_an_idle_step_stay_out_of_the_parameters(fits: Any, case: str) -> None:
    for rank in fits[case]:
        assert rank["error"] < 2e-6
        assert rank["spread"] == 0.0
        assert all(abs(value) < 100.0 for value in rank["metrics"].values()), "nor are they logged"


@pytest.mark.parametrize("case", SHARDS)
def test_random_numbers_are_those_of_a_run_without_idle_steps(fits: Any, case: str) -> None:
    """Of torch (a dropout mask, too), numpy and Python."""
    for rank in fits[case]:
        assert rank["drawn"] == rank["undisturbed"]
        assert len(rank["drawn"]) == sum(not idle for epoch in rank["is_idle"] for idle in epoch)


@pytest.mark.parametrize("case", SHARDS)
def test_metrics_of_the_module_count_nothing(fits: Any, case: str) -> None:
    """Idle steps would add rows of 99."""
    for rank in fits[case]:
        assert rank["counted"] == [rank["rows"], rank["rows"]]
        assert rank["metrics"]["mean_of_rows"] == 1.0


@pytest.mark.parametrize("case", SHARDS)
def test_collectives_of_the_training_step_are_made_by_every_rank(fits: Any, case: str) -> None:
    """An all_reduce of who is idle, and an all_gather of the ranks' numbers."""
    first, second = fits[case]
    steps = zip(chain(*first["is_idle"]), chain(*second["is_idle"]), strict=True)
    assert first["gathered"] == second["gathered"] == [[float(one or two), 0.0, 1.0] for one, two in steps]
