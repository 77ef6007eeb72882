"""Fits gone on with by another number of ranks: what is left of the epoch is dealt anew, each sample once."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.ranks import run_ranks
from tests.multiprocess.resumed_fits import NUM_SAMPLES

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]


def go_on(strategy: str, size: int, folder: Path, checkpoint: str | None, batch: int | None, accumulate: int) -> list[Any]:
    ranks = run_ranks(
        "tests.multiprocess.world_size_fits:go_on",
        size,
        folder,
        seconds=90,
        strategy=strategy,
        place=str(folder / "checkpoints"),
        checkpoint=checkpoint,
        batches=[] if batch is None else [batch],
        accumulate=accumulate,
    )
    return [rank.value for rank in ranks]


@pytest.mark.parametrize(
    ("strategy", "accumulate", "parts"),
    [
        ("ddp", 1, [(2, 1), (1, 3), (2, 0), (4, None)]),
        ("ddp", 3, [(1, 4), (2, None)]),
        ("fsdp2", 1, [(2, 2), (1, None)]),
    ],
)
def test_each_sample_is_trained_once_in_an_epoch_whatever_the_number_of_ranks(
    strategy: str, accumulate: int, parts: list[tuple[int, int | None]], tmp_path: Path
) -> None:
    """`parts`: the number of ranks, and the batch after which the next part goes on."""
    trained: Counter[tuple[int, int]] = Counter()
    checkpoint, begin = None, 0
    for size, batch in parts:
        ranks = go_on(strategy, size, tmp_path, checkpoint, batch, accumulate)
        steps = [[tuple(step[:2]) for step in rank["seen"]] for rank in ranks]
        assert all(of_rank == steps[0] for of_rank in steps), "all ranks make the same steps"
        assert steps[0][0] == (0, begin) and {epoch for epoch, _ in steps[0]} == {0, 1}
        # What follows the checkpoint is trained by the next part; inside an accumulation window, the window is.
        begin = len(steps[0]) if batch is None else begin + (batch + 1) // accumulate * accumulate
        kept = [step for rank in ranks for step in rank["seen"] if batch is None or (step[0] == 0 and step[1] < begin)]
        trained.update((step[0], sample) for step in kept for sample in step[3])
        checkpoint = f"batch-{batch}"
    assert trained == Counter((epoch, sample) for epoch in (0, 1) for sample in range(NUM_SAMPLES))
    assert all(rank["final"] == ranks[0]["final"] for rank in ranks)
    num_steps = [1 + max(step for of, step in steps[0] if of == epoch) for epoch in (0, 1)]
    assert {rank["updates"] for rank in ranks} == {sum(math.ceil(number / accumulate) for number in num_steps)}


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_another_number_of_ranks_is_refused_under_zero_with_advice(strategy: str, tmp_path: Path) -> None:
    """And the advice can be followed: the weights alone, or a universal checkpoint, with which the rest is dealt anew."""
    place = tmp_path / "checkpoints"
    first = go_on(strategy, 2, tmp_path, None, 2, 1)
    refusal, resumed = (
        run_ranks(
            f"tests.multiprocess.world_size_fits:{name}", 1, tmp_path, strategy=strategy, place=str(place), checkpoint="batch-2"
        )[0].value
        for name in ("refused", "universal")
    )
    assert "was saved by 2 ranks" in refusal["error"] and "this run has 1" in refusal["error"]
    for advice in ("convert_zero_checkpoint_to_fp32_state_dict", "ds_to_universal --inject_missing_state", "load_universal"):
        assert advice in refusal["error"]
    assert refusal["weights"] == resumed["weights"]
    trained = Counter(sample for rank in first for step in rank["seen"][:3] for sample in step[3])
    trained.update(sample for step in resumed["seen"] if step[0] == 0 for sample in step[3])
    assert trained == Counter(range(NUM_SAMPLES))
    assert resumed["updates"] == 3 + len(resumed["seen"])
