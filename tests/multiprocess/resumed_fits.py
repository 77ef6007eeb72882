"""Fits that are stopped and gone on with, run by every rank (see ranks.py)."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from odb_lightning import ODBDataLoader
from tests.multiprocess.trainers import make_trainer
from tests.multiprocess.training_cases import VOCABULARY, _whole, make_strategy, pad, token_losses

NUM_SAMPLES = 46


class RandomSamples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Their length follows from their index, their content from the random state, too."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = 2 + 7 * index % 11
        ids = torch.randint(1, VOCABULARY, (length,))
        ids[0] = random.randrange(1, VOCABULARY)
        return {"input_ids": ids, "labels": ids.clone()}


class Model(lightning.LightningModule):
    """With dropout, Adam and a schedule by step; saves where it is told to."""

    def __init__(self, is_sharded: bool, reads_number_of_steps: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(
            nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Dropout(0.3), nn.LayerNorm(8), nn.Linear(8, VOCABULARY)
        )
        self.is_sharded = is_sharded
        self.reads_number_of_steps = reads_number_of_steps
        self.seen: list[Any] = []
        self.final: list[float] | None = None

    def configure_model(self) -> None:
        if self.is_sharded and not isinstance(self.network, FSDPModule):
            fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = token_losses(self.network, batch, "mean")
        info = self.trainer.strategy.step_info
        self.seen.append((info.epoch, info.step, batch_idx, list(info.sample_ids), loss.item() if not info.is_idle else 0.0))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        token_losses(self.network, batch, "mean")

    def configure_optimizers(self) -> Any:
        steps = self.trainer.estimated_stepping_batches if self.reads_number_of_steps else 100
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step / min(steps, 100)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_end(self) -> None:
        self.final = _whole(list(self.network.parameters())).tolist()


class Saves(Callback):
    """After each batch of `batches` (counted over epochs), and at the ends of epochs."""

    def __init__(self, folder: Path, batches: list[int]) -> None:
        self.folder, self.batches, self.number = folder, batches, 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.number in self.batches:
            trainer.save_checkpoint(self.folder / f"batch-{self.number}")
        self.number += 1

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.batches:
            trainer.save_checkpoint(self.folder / f"epoch-{trainer.current_epoch}")


class Preempted(Callback):
    """A signal comes to one of the ranks while it trains a batch."""

    def __init__(self, rank: int, batch: int, number: int) -> None:
        self.rank, self.batch, self.number = rank, batch, number

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank and len(pl_module.seen) == self.batch + 1:
            os.kill(os.getpid(), self.number)


def fit(
    strategy: str,
    size: int,
    folder: Path,
    batches: list[int],
    *,
    checkpoint: str | None = None,
    accumulate: int = 1,
    num_workers: int = 0,
    preempted: Any = None,
    requeued: Any = None,
    with_validation: bool = False,
    reads_number_of_steps: bool = False,
    scheduled: dict[str, int] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What was trained, and the parameters and the number of updates at the end."""
    lightning.seed_everything(7, verbose=False)
    loader = ODBDataLoader(RandomSamples(), l_max=24, collate_fn=pad, num_workers=num_workers, buffer_size=8)
    val_loader = ODBDataLoader(RandomSamples(), l_max=24, collate_fn=pad, num_workers=0, shuffle=False)
    model = Model(strategy == "fsdp2", reads_number_of_steps)
    more: list[Callback] = []
    if scheduled is not None:
        more = [GradientAccumulationScheduler({int(epoch): number for epoch, number in scheduled.items()})]
    if preempted is not None:
        more += [Preempted(*preempted), ModelCheckpoint(folder)]
    elif requeued is not None:
        more += [Preempted(*requeued)]
    trainer = make_trainer(
        make_strategy(strategy, "token", False) if strategy != "odb" else "odb",
        devices=size,
        accumulate_grad_batches=accumulate,
        callbacks=[Saves(folder, batches), *more],
        enable_checkpointing=preempted is not None,
        plugins=[] if requeued is None else [SLURMEnvironment(auto_requeue=True)],
        **({"max_epochs": 3} | options),
    )
    ended = contextlib.nullcontext() if preempted is None else pytest.raises(SIGTERMException)
    with warnings.catch_warnings(), ended:
        warnings.simplefilter("ignore")
        trainer.fit(
            model,
            loader,
            val_loader if with_validation else None,
            ckpt_path=None if checkpoint is None else folder / checkpoint,
            weights_only=True,
        )
    rate = trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0]
    return {"seen": model.seen, "final": model.final, "updates": trainer.global_step, "rate": rate}


def preempted(strategy: str, place: str, rank: int, batch: int) -> dict[str, Any]:
    """The uninterrupted run, one that got a SIGTERM, and the one that went on from its checkpoint."""
    size, folder = int(os.environ["WORLD_SIZE"]), Path(place)
    options: dict[str, Any] = {"accumulate": 3, "max_epochs": 2, "num_workers": 1}
    whole = fit(strategy, size, folder, [], **options)
    handler = signal.getsignal(signal.SIGTERM)
    ended = fit(strategy, size, folder, [], preempted=(rank, batch, signal.SIGTERM), **options)
    signal.signal(signal.SIGTERM, handler)
    resumed = fit(strategy, size, folder, [], checkpoint="preempted.ckpt", **options)
    return {"whole": whole, "ended": ended, "resumed": resumed}


def requeued(place: str, rank: int, batch: int) -> dict[str, Any]:
    """The uninterrupted run, one that SLURM tells that its time is nearly over, and the one that goes on in its new job."""
    size, folder = int(os.environ["WORLD_SIZE"]), Path(place)
    os.environ |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "fit", "SLURM_NTASKS": str(size)}
    os.environ |= {"SLURM_NTASKS_PER_NODE": str(size), "SLURM_NODELIST": "127.0.0.1"}
    os.environ |= {"SLURM_PROCID": os.environ["RANK"], "SLURM_LOCALID": os.environ["RANK"], "SLURM_NODEID": "0"}
    os.environ |= {"PATH": f"{folder}/bin:{os.environ['PATH']}", "MASTER_ADDR": "127.0.0.1"}
    options: dict[str, Any] = {"accumulate": 3, "max_epochs": 2, "default_root_dir": folder}
    whole = fit("ddp", size, folder, [], **options)
    told = fit("ddp", size, folder, [], requeued=(rank, batch, signal.SIGUSR1), **options)
    resumed = fit("ddp", size, folder, [], checkpoint="hpc_ckpt_1.ckpt", **options)
    return {"whole": whole, "told": told, "resumed": resumed}


def stopped_early(strategy: str, place: str, first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """The uninterrupted run, one that comes to its own end inside an epoch, and one that goes on from there."""
    size, folder = int(os.environ["WORLD_SIZE"]), Path(place)
    whole = fit(strategy, size, folder, [], **then)
    ended = fit(strategy, size, folder, [1000], **(then | first))
    name = max(path.name for path in folder.iterdir())
    return {"whole": whole, "ended": ended, "resumed": fit(strategy, size, folder, [], checkpoint=name, **then)}


def stopped(strategy: str, place: str, cases: list[dict[str, Any]], batches: list[int]) -> list[dict[str, Any]]:
    """Per case: the uninterrupted run, and those that went on from each of its checkpoints, by the checkpoint's name."""
    results, size = [], int(os.environ["WORLD_SIZE"])  # Lightning removes it at the end of a fit
    for number, case in enumerate(cases):
        folder = Path(place) / str(number)
        whole = fit(strategy, size, folder, batches, **case)
        if dist.is_initialized():
            dist.barrier()
        names = sorted(path.name for path in folder.iterdir())
        found = {name: fit(strategy, size, folder, [], checkpoint=name, **case) for name in names}
        results.append({"whole": whole, "resumed": found})
    return results
