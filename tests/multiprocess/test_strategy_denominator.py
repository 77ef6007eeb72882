"""`denominator="strategy"`: plain loaders with uneven batches, and still the mean over all targets of an update."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.fitting import ByCase, run_group
from tests.multiprocess.ranks import run_ranks
from tests.multiprocess.strategy_denominator_cases import CASES

CASES_FILE = "tests.multiprocess.strategy_denominator_cases"
GROUPS = [["single"], ["ddp"], ["zero0", "zero1", "zero2", "zero3"], ["fsdp2"]]

ROUNDING = 2e-6  # float32 parameters against a float64 reference, a few updates

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(160)]


@pytest.fixture(scope="module", params=[strategy for group in GROUPS for strategy in group])
def fits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ByCase:
    """Per case the result of each rank."""
    return run_group(f"{CASES_FILE}:all_cases", GROUPS, request.param, tmp_path_factory.mktemp(request.param), seconds=150)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> ByCase:
    ranks = run_ranks(f"{CASES_FILE}:more_cases", 2, tmp_path_factory.mktemp("more"), seconds=150)
    return {name: [rank.value[name] for rank in ranks] for name in ranks[0].value}


@pytest.mark.parametrize("case", CASES)
def test_the_update_is_the_mean_over_all_its_targets(fits: ByCase, case: str) -> None:
    for rank in fits[case]:
        assert rank["error"] < ROUNDING, case
        assert rank["spread"] == 0.0
        assert rank["moved"] > 1e-2


def test_windows_end_where_the_trainers_do(fits: ByCase) -> None:
    """Steps are those of the trainer, which counts windows without targets, too."""
    num_steps = {name: (len(result[0]["steps"]), result[0]["global_step"]) for name, result in fits.items()}
    assert num_steps == {
        "k=1": (10, 10),
        "k=2, a short last window of unknown length": (10, 6),
        "k=4, a short last window, clipped": (12, 4),
        "a limit inside a window": (6, 2),
        "a limit above the steps of an epoch": (12, 4),
        "max_steps": (8, 4),
        "windows with and without targets": (8, 4),
        "none": (6, 3),
    }
    assert fits["windows with and without targets"][0]["updates"] == 2


def test_without_counts_it_is_another_gradient(fits: ByCase) -> None:
    """The comparison above can fail."""
    assert fits["none"][0]["error"] > 1e3 * ROUNDING


@pytest.mark.parametrize(
    "case", ["samples", "samples without labels", "unshifted", "weighted", "a sum", "an ODBDataLoader", "scheduled"]
)
def test_other_objectives_and_loaders(more: ByCase, case: str) -> None:
    for rank in more[case]:
        assert rank["error"] < ROUNDING
        assert rank["moved"] > 1e-2
    assert any(more["an ODBDataLoader"][1]["idle"])


@pytest.mark.parametrize(
    ("case", "difference"),
    [
        ("unequal", "steps of an epoch by rank: 6, 5"),
        ("unequal, of unknown length", "number of batches by rank: 1, 0"),
    ],
)
def test_ranks_with_unequal_steps_are_told_so_on_each(more: ByCase, case: str, difference: str) -> None:
    for message in more[case]:
        assert message.startswith(f"RuntimeError: the training loaders of the ranks differ: {difference}.")
        assert "drop_last" in message


def test_a_rank_whose_loader_fails_ends_the_others(more: ByCase) -> None:
    waiting, failed = more["a failing loader"]
    assert failed.startswith("IndexError")
    assert waiting.startswith("RuntimeError: a rank took no part in counting the targets")


def test_four_ranks(tmp_path: Path) -> None:
    for rank in run_ranks(f"{CASES_FILE}:four_ranks", 4, tmp_path, seconds=60):
        assert rank.value["error"] < ROUNDING
        assert rank.value["moved"] > 1e-2
        assert rank.value["spread"] == 0.0
