"""What the ranks of tests/multiprocess/test_field_cases.py do."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, Dataset

from odb_lightning import ODBDataModule, ODBDDPStrategy, ODBDeepSpeedStrategy
from tests.loader_data import Lengths, collate
from tests.multiprocess.trainers import make_trainer

GROUP_SECONDS = 6
"""Of the training's own process group."""
SLOW_SECONDS = 9


class Model(lightning.LightningModule):
    """Notes the samples it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 64)
        self.ids: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        step = self.trainer.strategy.step_info  # type: ignore[attr-defined]
        self.ids += step.sample_ids
        logits = self.embedding(batch["input_ids"] % 64)[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten() % 64)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class UsersModule(lightning.LightningDataModule):
    """A project as it was before: counts how often it is asked for its loader."""

    def __init__(self, batch_size: int | None) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.calls = 0

    def train_dataloader(self) -> DataLoader[Any]:
        self.calls += 1
        dataset: Any = Lengths([4] * 12)
        if self.batch_size is None:
            return DataLoader(dataset, batch_size=None, collate_fn=collate)
        return DataLoader(dataset, batch_size=self.batch_size, shuffle=True, collate_fn=collate)


class SlowToBegin(Dataset[Any]):
    """Its first 16 samples take `SLOW_SECONDS` in all."""

    def __init__(self) -> None:
        self.samples = Lengths([4] * 40)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        time.sleep(SLOW_SECONDS / 8 if index < 16 and index % 2 else 0.0)
        return self.samples[index]


def _fit(strategy: Any, datamodule: Any) -> list[int]:
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(strategy).fit(model, datamodule=datamodule)
    return model.ids


def existing_project(stage: int | None, batch_size: int | None) -> dict[str, Any]:
    """Two lines move it: with DDP, or ZeRO of a stage."""
    limit = timedelta(seconds=40)
    strategy = ODBDDPStrategy(timeout=limit) if stage is None else ODBDeepSpeedStrategy(stage=stage, timeout=limit)
    datamodule: Any = ODBDataModule.from_datamodule(UsersModule(batch_size), l_max=8, num_workers=0)
    return {"ids": _fit(strategy, datamodule), "calls": datamodule.calls}


def slow_first_fill() -> list[int]:
    """Rank 1 alone has the slow samples, the odd ones, and needs them all for its first window."""
    datamodule = ODBDataModule(
        SlowToBegin(), l_max=8, collate_fn=collate, shuffle=False, buffer_size=16, num_workers=1, multiprocessing_context="fork"
    )
    return _fit(ODBDDPStrategy(timeout=timedelta(seconds=GROUP_SECONDS)), datamodule)
