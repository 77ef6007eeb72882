"""What an ODB strategy refuses, and what it says, on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch.utils.data import DataLoader

from odb_lightning import ODBDataLoader, ODBDDPStrategy, ODBSingleDeviceStrategy

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*`dataloader_iter`"),
]


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((4,), index), "labels": torch.full((4,), index)}


def stack(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        info = self.trainer.strategy.step_info
        self.seen.append((info.epoch, info.step))
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TakesAnIterator(Model):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:
        next(dataloader_iter)
        return self.weight * 1.0


def make_loader(**options: Any) -> ODBDataLoader:
    return ODBDataLoader(Samples(), l_max=8, collate_fn=stack, num_workers=0, num_supervised_fn="causal", **options)


def make_trainer(folder: Path, **options: Any) -> lightning.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "strategy": "odb",
        "max_epochs": 1,
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(**(defaults | options))


def test_a_loader_without_counts_is_refused_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="from_dataloader"):
        make_trainer(tmp_path).fit(Model(), DataLoader(Samples(), batch_size=2))


def test_several_training_loaders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trains on one ODBDataLoader, but there are 2"):
        make_trainer(tmp_path).fit(Model(), [make_loader(), make_loader()])


def test_a_training_step_that_takes_an_iterator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="not a dataloader_iter"):
        make_trainer(tmp_path).fit(TakesAnIterator(), make_loader())


def test_a_changed_accumulation_is_refused(tmp_path: Path) -> None:
    scheduler = GradientAccumulationScheduler({0: 1, 1: 2})
    with pytest.raises(RuntimeError, match="GradientAccumulationScheduler can't be used"):
        make_trainer(tmp_path, max_epochs=2, callbacks=[scheduler]).fit(Model(), make_loader())


def test_an_accumulation_of_the_loaders_own_has_to_be_the_trainers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="accumulate=3"):
        make_trainer(tmp_path, accumulate_grad_batches=2).fit(Model(), make_loader(accumulate=3))


def test_one_device_is_one_device(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="odb_ddp"):
        make_trainer(tmp_path, devices=2)


@pytest.mark.parametrize("strategy", [ODBSingleDeviceStrategy, ODBDDPStrategy])
def test_an_unknown_loss_scaling_is_refused(strategy: Any) -> None:
    with pytest.raises(ValueError, match="loss_scaling='tokens'"):
        strategy(loss_scaling="tokens")


def test_epochs_are_the_trainers_after_a_resume_between_epochs(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
    make_trainer(tmp_path, enable_checkpointing=True, callbacks=[saves]).fit(Model(), make_loader())
    resumed = Model()
    make_trainer(tmp_path, max_epochs=2).fit(resumed, make_loader(), ckpt_path=tmp_path / "last.ckpt")
    assert {epoch for epoch, _ in resumed.seen} == {1}


def test_a_resume_inside_an_epoch_says_that_samples_are_trained_again(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=2, filename="{step}")
    make_trainer(tmp_path, enable_checkpointing=True, callbacks=[saves]).fit(Model(), make_loader())
    with pytest.warns(UserWarning, match="lies inside epoch 0"):
        make_trainer(tmp_path).fit(Model(), make_loader(), ckpt_path=tmp_path / "step=2.ckpt")
