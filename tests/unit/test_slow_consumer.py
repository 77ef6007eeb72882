"""A training process that is slower than the loader, as it is in real use, loses nothing by it."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from odb_lightning import ODBDataLoader, ODBLoaderError


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.fails_at:
            raise ValueError("bad sample")
        return {"input_ids": torch.ones(8, dtype=torch.int64)}


def stack(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.stack([sample["input_ids"] for sample in samples])}


def taken_late(loader: ODBDataLoader) -> list[Any]:
    """All batches of an epoch; each is taken when the loader's process has come to rest, with all sent that it can send."""
    taken = []
    for batch in loader:
        wait_for_rest()
        taken.append(batch)
    return taken


def wait_for_rest() -> None:
    """Returns when the collate process has used no processor time for a while."""
    process = next(child for child in multiprocessing.active_children() if child.name == "odb-collate")
    stat = Path(f"/proc/{process.pid}/stat")
    deadline, used = time.monotonic() + 10, None
    while time.monotonic() < deadline:
        now = stat.read_text().rpartition(")")[2].split()[11:13]
        if now == used:
            return
        used = now
        time.sleep(0.05)
    raise AssertionError("the collate process does not come to rest")


@pytest.mark.parametrize("persistent_workers", [True, False])
def test_every_batch_arrives_although_the_loader_was_done_long_before(persistent_workers: bool) -> None:
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": persistent_workers, "num_supervised_fn": "causal"}
    with ODBDataLoader(Samples(), l_max=80, collate_fn=stack, **options) as loader:
        for _ in range(2):
            assert sum(batch.step.num_samples for batch in taken_late(loader)) == 40


def test_a_failure_arrives_behind_the_batches_before_it() -> None:
    with ODBDataLoader(Samples(fails_at=30), l_max=16, collate_fn=stack, num_workers=1, shuffle=False, buffer_size=8) as loader:
        taken: list[int] = []
        with pytest.raises(ODBLoaderError, match=r"dataset\[30\]: ValueError: bad sample"):
            for batch in loader:
                taken += batch.step.sample_ids
                wait_for_rest()
        assert sorted(taken) == list(range(24))  # all rounds before the one with the bad sample
