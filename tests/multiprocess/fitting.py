"""One fit on given shards, and what all ranks did in it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch import Tensor

from odb_lightning import ODBDataLoader, ODBSingleDeviceStrategy
from odb_lightning.batch import StepInfo
from tests.multiprocess.trainers import make_trainer
from tests.multiprocess.training_cases import _whole, make_strategy

Shard = list[list[int]]
"""A rank's samples, epoch by epoch."""


class ByEpoch:
    """A sampler with a list of samples for each epoch."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.shard[self.epoch])


class Watch(lightning.Callback):
    """Keeps each step's info, and the parameters at the end, whole."""

    def __init__(self) -> None:
        self.infos: list[StepInfo] = []
        self.names: list[str] = []
        self.final = torch.empty(0)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.names = [name for name, _ in pl_module.named_parameters()]

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.infos.append(trainer.strategy.step_info)  # type: ignore[attr-defined]

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        # While parameters can still be gathered under ZeRO-3.
        self.final = _whole(list(pl_module.parameters())).cpu()


@dataclass(frozen=True)
class Fit:
    """`windows`: the samples of each update, over all ranks and micro-batches. `is_idle`: of this rank's steps, by epoch.
    `final`: all parameters, in order. `spread`: the largest difference of any between ranks."""

    windows: list[list[int]]
    is_idle: list[list[bool]]
    final: Tensor
    spread: float
    trainer: lightning.Trainer

    def error(self, expected: Tensor, initial: Tensor) -> float:
        """How far the parameters are from the expected ones, as a share of how far those have moved."""
        expected, initial = expected.double(), initial.double()
        return float((self.final.double() - expected).norm() / (expected - initial).norm())


def make(strategy: str, loss_scaling: str = "token") -> Any:
    """One of `make_strategy`, or "single"."""
    if strategy == "single":
        return ODBSingleDeviceStrategy(loss_scaling=loss_scaling)  # type: ignore[arg-type]
    return make_strategy(strategy, loss_scaling, False)


def fit(
    module: lightning.LightningModule,
    strategy: Any,
    shards: list[Shard],
    dataset: Any,
    collate_fn: Any,
    *,
    l_max: int = 12,
    accumulate: int = 1,
    loss_scaling: str = "token",
    count: Any = "causal",
    callbacks: list[Any] | None = None,
    **options: Any,
) -> Fit:
    """Trains as many epochs as a shard has, under a strategy or what `make` makes of its name."""
    rank = int(os.environ["RANK"])
    watch = Watch()
    trainer = make_trainer(
        make(strategy, loss_scaling) if isinstance(strategy, str) else strategy,
        devices=len(shards),
        max_epochs=len(shards[0]),
        accumulate_grad_batches=accumulate,
        callbacks=[watch, *(callbacks or [])],
        **options,
    )
    loader = ODBDataLoader(
        dataset,
        l_max=l_max,
        collate_fn=collate_fn,
        sampler=ByEpoch(shards[rank]),
        num_workers=0,
        buffer_size=16,
        num_supervised_fn=count,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader)
    everyone = _everyone([(info.epoch, info.step, list(info.sample_ids)) for info in watch.infos])
    windows: dict[tuple[int, int], list[int]] = {}
    for steps in everyone:
        for epoch, step, sample_ids in steps:
            windows.setdefault((epoch, step // accumulate), []).extend(sample_ids)
    finals = _everyone(watch.final)
    return Fit(
        windows=[windows[key] for key in sorted(windows)],
        is_idle=[[info.is_idle for info in watch.infos if info.epoch == epoch] for epoch in range(len(shards[0]))],
        final=watch.final,
        spread=float(max((final.double() - finals[0].double()).abs().max() for final in finals)),
        trainer=trainer,
    )


def _everyone(value: Any) -> list[Any]:
    """Each rank's."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
