"""Fits go on from a checkpoint as if they had not been stopped: the same batches, losses and parameters, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

ONE_DEVICE: list[dict[str, Any]] = [
    {},
    {"accumulate": 3, "with_validation": True},
    {"accumulate": 3, "max_epochs": -1, "max_steps": 14},
    {"accumulate": 3, "limit_train_batches": 8},
    {"reads_number_of_steps": True, "max_epochs": -1, "max_steps": 40},
    {"accumulate": 2, "num_workers": 2, "max_epochs": 2},
    {"scheduled": {"0": 2, "1": 3}, "max_epochs": 2},
]
STRATEGIES = ["ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2"]


def check(result: dict[str, Any], accumulate: Callable[[int], int]) -> None:
    """`accumulate`: micro-batches per update in an epoch."""
    whole = result["whole"]
    steps = whole["seen"]
    first_of_epoch = {step[0]: index for index, step in reversed(list(enumerate(steps)))}
    for name, resumed in result["resumed"].items():
        kind, number = name.split("-")
        if kind == "batch":
            trained = int(number) + 1
            epoch = steps[trained - 1][0]
            begin, size = first_of_epoch[epoch], accumulate(epoch)
            is_last = trained == len(steps) or trained in first_of_epoch.values()
            start = trained if is_last else begin + (trained - begin) // size * size
        else:
            start = first_of_epoch.get(int(number) + 1, len(steps))
        assert resumed["seen"] == steps[start:], name
        if resumed["seen"]:
            assert resumed["final"] == whole["final"], name
        assert (resumed["updates"], resumed["rate"]) == (whole["updates"], whole["rate"]), name


@pytest.mark.parametrize("case", ONE_DEVICE, ids=str)
def test_a_fit_on_one_device_goes_on_wherever_it_was_stopped(case: dict[str, Any], tmp_path: Path) -> None:
    """Between windows and inside of them, after an epoch's last batch and at its end, with workers and without."""
    batches = [0, 1, 4, 5, 11, 15, 16, 22, 28, 29, 30, 31, 39]
    (rank,) = run_ranks(
        "tests.multiprocess.resumed_fits:stopped",
        1,
        tmp_path,
        seconds=120,
        strategy="odb",
        place=str(tmp_path / "checkpoints"),
        cases=[case],
        batches=batches,
    )
    (result,) = rank.value
    assert len(result["resumed"]) > 7
    check(result, lambda epoch: case.get("scheduled", {}).get(str(epoch), case.get("accumulate", 1)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_fit_on_two_ranks_goes_on_in_the_middle_of_a_window(strategy: str, tmp_path: Path) -> None:
    ranks = run_ranks(
        "tests.multiprocess.resumed_fits:stopped",
        2,
        tmp_path,
        seconds=200,
        strategy=strategy,
        place=str(tmp_path / "checkpoints"),
        cases=[{"accumulate": 3, "max_epochs": 2}],
        batches=[4],
    )
    for rank in ranks:
        (result,) = rank.value
        assert sorted(result["resumed"]) == ["batch-4", "epoch-0", "epoch-1"]
        check(result, lambda _: 3)


@pytest.mark.parametrize("first", [{"max_steps": 4}, {"max_steps": 12}], ids=str)
def test_a_fit_that_came_to_its_end_inside_an_epoch_goes_on_with_the_rest_of_it(first: dict[str, Any], tmp_path: Path) -> None:
    """In the first epoch, and in the second."""
    (rank,) = run_ranks(
        "tests.multiprocess.resumed_fits:stopped_early",
        1,
        tmp_path,
        seconds=100,
        strategy="odb",
        place=str(tmp_path / "checkpoints"),
        first=first,
        then={"accumulate": 3, "max_epochs": 2},
    )
    whole, ended, resumed = (rank.value[name] for name in ("whole", "ended", "resumed"))
    assert ended["updates"] == first["max_steps"]
    assert ended["seen"] + resumed["seen"] == whole["seen"]
    assert (resumed["final"], resumed["updates"]) == (whole["final"], whole["updates"])


@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 0), ("ddp", 1), ("zero2", 1)])
def test_sigterm_to_any_rank_makes_a_checkpoint_before_the_next_update(strategy: str, rank: int, tmp_path: Path) -> None:
    """It comes in the second batch of a window of three: that update is finished, and the run goes on with the next."""
    place = str(tmp_path / "checkpoints")
    ranks = run_ranks(
        "tests.multiprocess.resumed_fits:preempted",
        2,
        tmp_path,
        seconds=150,
        strategy=strategy,
        place=place,
        rank=rank,
        batch=4,
    )
    for result in ranks:
        whole, ended, resumed = (result.value[name] for name in ("whole", "ended", "resumed"))
        assert ended["seen"] == whole["seen"][:6] and ended["final"] is None
        assert resumed["seen"] == whole["seen"][6:]
        assert resumed["final"] == whole["final"]


def test_slurms_signal_to_any_rank_waits_for_the_next_update(tmp_path: Path) -> None:
    """Lightning's answer to it is a checkpoint by all ranks, and a new job."""
    place = tmp_path / "job"
    (place / "bin").mkdir(parents=True)
    scontrol = place / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {place}/requeued\n')
    scontrol.chmod(0o755)
    ranks = run_ranks("tests.multiprocess.resumed_fits:requeued", 2, tmp_path, seconds=150, place=str(place), rank=1, batch=4)
    assert (place / "requeued").read_text() == "requeue 7\n"
    for result in ranks:
        whole, told, resumed = (result.value[name] for name in ("whole", "told", "resumed"))
        assert told == whole
        assert resumed["seen"] == whole["seen"][6:]
        assert resumed["final"] == whole["final"]
