"""Fits of modules, loaders and strategies of any kind on each rank, compared with their single-process reference in float64."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from odb_lightning import ODBDataLoader
from odb_lightning.batch import StepInfo
from tests.multiprocess.trainers import everyone, make_trainer
from tests.multiprocess.training_cases import (
    LEARNING_RATE,
    MOMENTUM,
    VOCABULARY,
    Samples,
    _whole,
    make_network,
    make_sample,
    pad,
)

LIMIT = timedelta(seconds=40)

Batch = dict[str, Tensor]
Objective = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]
"""The sum over the targets of a batch, and the number (or weight) of them."""
Steps = list[tuple[int, int, list[int]]]
"""Epoch, step and sample ids of each micro-batch of a rank."""


class NumberedSamples(Samples):
    """A sample says which it is."""

    def __getitem__(self, index: int) -> Batch:
        return number(index)


def number(index: int) -> Batch:
    return make_sample(index) | {"index": torch.tensor(index)}


def collate(samples: list[Batch]) -> Batch:
    return pad(samples) | {"index": torch.stack([sample["index"] for sample in samples])}


def causal(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    labels = batch["labels"][:, 1:]
    logits = network(batch["input_ids"])[:, :-1]
    return cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), reduction="sum"), (labels != -100).sum()


def unshifted(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    logits = network(batch["input_ids"])
    return cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), reduction="sum"), (labels != -100).sum()


def weighted(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    losses = cross_entropy(network(batch["input_ids"]).transpose(1, 2), batch["labels"], reduction="none")
    weights = target_weights(batch).to(losses.dtype)
    return (losses * weights).sum(), weights.sum()


def target_weights(batch: Batch) -> Tensor:
    return torch.where(batch["labels"] == -100, 0.0, (batch["input_ids"] % 3 + 1) / 4)


def per_sample(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of each sample the mean over its targets."""
    losses = cross_entropy(network(batch["input_ids"]).transpose(1, 2), batch["labels"], reduction="none")
    means = losses.sum(1) / (batch["labels"] != -100).sum(1)
    return means.sum(), torch.tensor(float(len(means)))


class Model(lightning.LightningModule):
    """Returns the mean, or what `returns` makes of the sum over the targets and their number."""

    momentum = MOMENTUM

    def __init__(
        self,
        objective: Objective = causal,
        returns: Callable[[Tensor, Tensor], Any] = lambda total, weight: total / weight,
        network: Callable[[], nn.Module] = make_network,
        shard: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__()
        self.network = network()
        self.objective, self.returns = objective, returns
        self.shard = shard
        self.steps: Steps = []
        self.infos: list[StepInfo] = []

    def configure_model(self) -> None:
        if self.shard is not None:
            self.shard(self)
            self.shard = None

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.returns(*self.objective(self.network, batch))

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        info = self.trainer.strategy.step_info
        self.infos.append(info)
        self.steps.append((info.epoch, info.step, [] if info.is_idle else batch["index"].tolist()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=self.momentum)

    def on_train_end(self) -> None:
        self.final = _whole(list(self.network.parameters()))


def odb_loader(shards: list[list[int]], **options: Any) -> ODBDataLoader:
    """Of this rank's shard."""
    defaults: dict[str, Any] = {"l_max": 12, "num_workers": 0, "buffer_size": 16, "collate_fn": collate}
    return ODBDataLoader(NumberedSamples(), sampler=shards[int(os.environ["RANK"])], **(defaults | options))


class Bucketed(IterableDataset[list[int]]):
    """Batches of samples of like lengths, as given."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter([collate([number(index) for index in batch]) for batch in self.batches])


def plain_loader(batches: list[list[list[int]]], is_sized: bool = True) -> DataLoader[Any]:
    """A torch DataLoader with this rank's batches."""
    mine = batches[int(os.environ["RANK"])]
    if is_sized:
        return DataLoader(NumberedSamples(), batch_sampler=mine, collate_fn=collate)  # type: ignore[arg-type]
    return DataLoader(Bucketed(mine), batch_size=None)


def fit(strategy: Any, model: Model, loader: Any, **options: Any) -> lightning.Trainer:
    """On two ranks, if the options do not say otherwise."""
    trainer = make_trainer(strategy, use_distributed_sampler=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, loader)
    return trainer


def outcome(
    trainer: lightning.Trainer,
    model: Model,
    *,
    accumulate: Callable[[int], int] | int = 1,
    clip: float | None = None,
    network: Callable[..., nn.Module] = make_network,
    by_batch: bool = False,
) -> dict[str, Any]:
    """How far the parameters are from the reference's, and what was trained."""
    ranks, finals = zip(*everyone((model.steps, model.final)), strict=True)
    expected, num_updates = reference(list(ranks), model, accumulate, clip, network, by_batch)
    start = torch.cat([parameter.detach().flatten() for parameter in network(torch.float64).parameters()])
    return {
        "error": float((model.final.double() - expected).abs().max()),
        "moved": float((expected - start).abs().max()),
        "spread": float(max((final - finals[0]).abs().max() for final in finals)),
        "steps": model.steps,
        "idle": [info.is_idle for info in model.infos],
        "global_step": trainer.global_step,
        "updates": num_updates,
    }


def reference(
    ranks: list[Steps],
    trained: Model,
    accumulate: Callable[[int], int] | int,
    clip: float | None,
    network: Callable[..., nn.Module],
    by_batch: bool,
) -> tuple[Tensor, int]:
    """The parameters after the same updates in one process and float64, and the number of updates: each one the mean over all
    targets of all ranks and micro-batches, sample by sample or, where the samples of a batch are mixed, batch by batch."""
    model = network(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=trained.momentum)
    windows: dict[tuple[int, int], list[list[int]]] = {}
    for steps in ranks:
        for epoch, step, ids in steps:
            size = accumulate if isinstance(accumulate, int) else accumulate(epoch)
            groups = [ids] if by_batch else [[index] for index in ids]
            windows.setdefault((epoch, step // size), []).extend(group for group in groups if group)
    num_updates = 0
    for _, groups in sorted(windows.items()):
        optimizer.zero_grad()
        parts = [trained.objective(model, collate([number(index) for index in group])) for group in groups]
        weight = sum(float(part) for _, part in parts)
        if weight == 0:
            continue
        (sum(total for total, _ in parts) / weight).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        num_updates += 1
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), num_updates


def refusal(run: Callable[[], Any]) -> str:
    """The text of the error that ends the run on this rank."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
