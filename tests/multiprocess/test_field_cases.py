"""What went wrong for people elsewhere, on real ranks: rows of a list of cases that no other file holds."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest

from odb_lightning import ODBDataModule
from tests.loader_data import Lengths, collate
from tests.multiprocess.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


@pytest.mark.parametrize(("batch_size", "stage"), [(2, None), (None, 2)])
def test_an_existing_project_is_dealt_out_once(tmp_path: Path, batch_size: int | None, stage: int | None) -> None:
    """C24, C25: twelve samples are twelve in all, and the user's loader is built once a rank."""
    results = run_ranks("tests.multiprocess.field_cases:existing_project", 2, tmp_path, stage=stage, batch_size=batch_size)
    assert sorted(index for result in results for index in result.value["ids"]) == list(range(12))
    assert [result.value["calls"] for result in results] == [1, 1]


def test_a_slow_first_window_does_not_exhaust_the_patience_of_the_training(tmp_path: Path) -> None:
    """C23"""
    results = run_ranks("tests.multiprocess.field_cases:slow_first_fill", 2, tmp_path)
    assert sorted(index for result in results for index in result.value) == list(range(40))


@pytest.mark.parametrize(("oversize", "seen", "dropped"), [("emit", [0, 1, 2], {}), ("drop", [1, 2], {"oversize": 1})])
def test_a_sample_over_the_budget_in_validation(oversize: str, seen: list[int], dropped: dict[str, int]) -> None:
    """C01"""
    groups: list[list[int]] = []

    class Validated(lightning.LightningModule):
        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            groups.append(batch["input_ids"][:, 0].tolist())

    lengths = [513, 10, 10]
    datamodule = ODBDataModule(
        val_dataset=Lengths(lengths),
        l_max=512,
        collate_fn=collate,
        oversize=oversize,
        num_workers=0,
        multiprocessing_context="fork",
    )
    trainer = lightning.Trainer(strategy="odb", accelerator="cpu", logger=False, enable_progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.validate(Validated(), datamodule=datamodule, verbose=False)
    assert sorted(index for group in groups for index in group) == seen
    assert [0] in groups or oversize == "drop", "alone"
    assert datamodule.val_loader is not None
    stats = datamodule.val_loader.stats
    assert (stats.over_budget, stats.dropped) == (int(oversize == "emit"), dropped)
