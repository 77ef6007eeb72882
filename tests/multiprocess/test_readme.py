"""The README's code runs as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import odb_lightning
from tests.helpers import run_command
from tests.multiprocess.ranks import ROOT, run_ranks

pytestmark = pytest.mark.distributed

PROJECT = """
import lightning
import torch
from torch.utils.data import DataLoader

from tests.multiprocess.training_cases import LENGTHS, Model, Samples, pad


class MyModule(Model):
    def on_train_end(self):
        seen = [list(info.sample_ids) for info in self.infos]
        print("TRAINED", self.global_rank, sorted(sum(seen, [])), self.trainer.strategy.world_size, self.describe(), flush=True)

    def describe(self):
        return self.trainer.datamodule.my_own_method(), self.trainer.datamodule.transfers


class MyDataModule(lightning.LightningDataModule):
    transfers = 0

    def train_dataloader(self):
        return DataLoader(Samples(), batch_size=1, shuffle=True, collate_fn=pad)

    def val_dataloader(self):
        return DataLoader(Samples(), batch_size=1, collate_fn=pad)

    def my_own_method(self):
        return "mine"

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.transfers += 1
        return batch
"""


def readme_block(name: str) -> str:
    """The Python block below the comment `<!-- test: name -->`."""
    found = re.search(rf"<!-- test: {name} -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found, name
    return found.group(1)


def test_two_lines_move_an_existing_project(tmp_path: Path) -> None:
    script = tmp_path / "project.py"
    script.write_text(PROJECT + readme_block("existing project"))
    result = run_command([sys.executable, str(script)], cwd=tmp_path, seconds=100, environment={"PYTHONPATH": str(ROOT)})
    assert result.status == 0, result.output
    trained = re.findall(r"TRAINED (\d) (\[.*?\]) (\d) \('mine', (\d+)\)", result.output)
    assert sorted(rank for rank, *_ in trained) == ["0", "1"], result.output
    samples = [index for _, ids, *_ in trained for index in eval(ids)]
    assert sorted(samples) == list(range(14))  # each once, over both ranks
    assert all(int(transfers) > 0 for *_, transfers in trained)


def test_own_loop_gives_the_exact_update(tmp_path: Path) -> None:
    ranks = run_ranks(
        "tests.multiprocess.training_cases:own_loop",
        2,
        tmp_path,
        seconds=90,
        code=readme_block("own loop").replace("4096", "12"),
    )
    for rank in ranks:
        assert rank.value["error"] < 1e-6
        assert rank.value["moved"] > 1e-2
    assert any(rank.value["idle_steps"] for rank in ranks)


def test_a_data_set_that_splits_itself() -> None:
    scope = {
        "IterableDataset": IterableDataset,
        "odb_lightning": odb_lightning,
        "files": [range(start, start + 4) for start in range(0, 24, 4)],
        "read": lambda file: ({"input_ids": torch.tensor([index])} for index in file),
    }
    exec(readme_block("own shards"), scope)
    with odb_lightning.ODBDataLoader(scope["Files"](), l_max=8, sharding="dataset", multiprocessing_context="fork") as loader:
        trained = [int(index) for batch in loader for index in batch.data["input_ids"]]
    assert sorted(trained) == list(range(24))


def test_the_tests_that_hold_the_guarantees_are_there() -> None:
    table = (ROOT / "README.md").read_text().partition("## What is guaranteed")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+/test_\w+\.py)`", table)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / "tests" / name).exists()] == []


def test_own_loop_goes_on_from_its_state() -> None:
    """Broken off in its fourth batch, then gone on with: the rest of the epoch, each sample once."""
    code = readme_block("own state").replace("l_max=4096", "l_max=4096, max_rows=1, num_workers=0, num_supervised_fn=len")
    trained: list[int] = []

    class BrokenOff(Exception):
        pass

    def train_three(batch: Any) -> None:
        if len(trained) == 3:
            raise BrokenOff
        trained.extend(batch.step.sample_ids)

    scope: dict[str, Any] = {
        "ODBDataLoader": odb_lightning.ODBDataLoader,
        "dataset": [{"input_ids": torch.arange(3)}] * 9,
        "collate_fn": list,
        "model": torch.nn.Linear(1, 1),
        "checkpoint": None,
    }
    scope["train"] = train_three
    with pytest.raises(BrokenOff):
        exec(code, scope)  # which leaves its last checkpoint in the scope
    scope["train"] = lambda batch: trained.extend(batch.step.sample_ids)
    exec(code, scope)
    assert sorted(trained) == list(range(9))
