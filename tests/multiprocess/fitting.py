"""Strategies by name, fits under several of them in the same processes, and one fit on given shards."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from odb_lightning import (
    ODBDataLoader,
    ODBDDPStrategy,
    ODBDeepSpeedStrategy,
    ODBModelParallelStrategy,
    ODBSingleDeviceStrategy,
)
from odb_lightning.batch import StepInfo
from tests.multiprocess.exact_fits import LIMIT
from tests.multiprocess.trainers import everyone, make_trainer
from tests.multiprocess.training_cases import _whole

Groups = Sequence[Sequence[str]]
"""Names of strategies; those of a group are run one after the other in the same processes."""
ByCase = dict[str, list[Any]]
"""The result of each rank."""
Shard = list[list[int]]
"""A rank's samples, epoch by epoch."""

_done: dict[tuple[str, str], ByCase] = {}


def run_group(cases: str, groups: Groups, strategy: str, folder: Path, *, seconds: float) -> ByCase:
    """What `module:function(strategy)` returned; with the first strategy of a group all of it is run, on the ranks it needs.

    Starting ranks and importing DeepSpeed and transformers takes longer than most fits.
    """
    from tests.multiprocess.ranks import run_ranks  # the tests' side, which the ranks, who import this file, need not load

    if (cases, strategy) not in _done:
        (group,) = (group for group in groups if strategy in group)
        ranks = run_ranks(
            f"{__name__}:under_each", num_ranks(strategy), folder, seconds=seconds, cases=cases, strategies=list(group)
        )
        for name in group:
            _done[cases, name] = {case: [rank.value[name][case] for rank in ranks] for case in ranks[0].value[name]}
    return _done[cases, strategy]


def under_each(cases: str, strategies: list[str]) -> dict[str, Any]:
    """Run by every rank (see ranks.py)."""
    module, function = cases.split(":")
    run = getattr(importlib.import_module(module), function)
    return {strategy: run(strategy) for strategy in strategies}


def num_ranks(strategy: str) -> int:
    return 1 if strategy == "single" else 2


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


def make(strategy: str, **options: Any) -> Any:
    """An ODB strategy: "single", "ddp", "fsdp2", or "zero" with its stage. ZeRO-3 shards the smallest parameters, too."""
    if strategy == "single":
        return ODBSingleDeviceStrategy(**options)
    options = {"timeout": LIMIT} | options
    if strategy == "ddp":
        return ODBDDPStrategy(**options)
    if strategy == "fsdp2":
        return ODBModelParallelStrategy(**options)
    made = ODBDeepSpeedStrategy(stage=int(strategy.removeprefix("zero")), **options)
    made.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return made


def shard_for(strategy: str) -> Any:
    """What shards a module with `make_network` in its `configure_model`, if the strategy wants it sharded there."""
    return _shard if strategy == "fsdp2" else None


def _shard(module: Any) -> None:
    for part in (module.network[1], module.network):
        fully_shard(part, mesh=module.device_mesh["data_parallel"])


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
        make(strategy, loss_scaling=loss_scaling) if isinstance(strategy, str) else strategy,
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
    windows: dict[tuple[int, int], list[int]] = {}
    for steps in everyone([(info.epoch, info.step, list(info.sample_ids)) for info in watch.infos]):
        for epoch, step, sample_ids in steps:
            windows.setdefault((epoch, step // accumulate), []).extend(sample_ids)
    finals = everyone(watch.final)
    return Fit(
        windows=[windows[key] for key in sorted(windows)],
        is_idle=[[info.is_idle for info in watch.infos if info.epoch == epoch] for epoch in range(len(shards[0]))],
        final=watch.final,
        spread=float(max((final.double() - finals[0].double()).abs().max() for final in finals)),
        trainer=trainer,
    )
