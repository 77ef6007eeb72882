"""Fits with a module that an idle step could spoil in every way, run by every rank (see ranks.py)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, SumMetric

from tests.multiprocess.fitting import Shard, fit
from tests.multiprocess.training_cases import Model, Samples, _flat, make_network, pad, reference

# By epoch: idle at the end and in between, or in all of the first epoch and not in the second.
SHARDS: dict[str, list[Shard]] = {
    "rank 1 idle": [[[0, 1, 2, 3], [4, 8]], [[10], [12, 13]]],
    "rank 0 idle": [[[10], [12, 13]], [[0, 1, 2, 3], [4, 8]]],
    "rank 0 idle at step 0": [[[], [12, 13, 4]], [[0, 1, 2], [3, 8]]],
}


class Delicate(Model):
    """Draws random numbers, updates metrics, and has a collective of its own in each step; an idle step's loss is `bad`."""

    def __init__(self, is_sharded: bool, bad: float) -> None:
        super().__init__(is_sharded)
        self.bad = bad
        self.mean, self.sum, self.cat = MeanMetric(), SumMetric(), CatMetric()
        self.dropout = nn.Dropout(0.5)
        self.drawn: list[list[float]] = []
        self.gathered: list[list[float]] = []
        self.rows = 0

    def on_train_start(self) -> None:
        seed(self.global_rank)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        is_idle = self.trainer.strategy.step_info.is_idle
        logits = self.network(batch["input_ids"]) * (self.bad if is_idle else 1.0)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
        drawn = draw(self.dropout)
        rows = torch.ones(len(batch["input_ids"])) * (99.0 if is_idle else 1.0)
        for metric in (self.mean, self.sum, self.cat):
            metric.update(rows)
        self.log("mean_of_rows", self.mean, on_step=False, on_epoch=True)
        total = torch.tensor([float(is_idle)])
        dist.all_reduce(total)
        self.gathered.append([*total.tolist(), *self.all_gather(torch.tensor(float(self.global_rank))).tolist()])
        if not is_idle:
            self.drawn.append(drawn)
            self.rows += len(rows)
        return loss


def seed(rank: int) -> None:
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)


def draw(dropout: nn.Module) -> list[float]:
    return [*dropout(torch.ones(8)).tolist(), torch.rand(()).item(), np.random.rand(), random.random()]


def all_cases(strategy: str) -> dict[str, Any]:
    cases = {
        "rank 1 idle": float("inf"),
        "rank 0 idle": float("nan"),
        "rank 0 idle at step 0": float("inf"),
    }
    return {name: _case(strategy, name, bad) for name, bad in cases.items()}


def _case(strategy: str, name: str, bad: float) -> dict[str, Any]:
    module = Delicate(is_sharded=strategy == "fsdp2", bad=bad)
    done = fit(module, strategy, SHARDS[name], Samples(), pad)
    steps = [[(0, number, ids) for number, ids in enumerate(done.windows)]]
    rank = dist.get_rank()
    seed(rank)
    undisturbed = [draw(nn.Dropout(0.5)) for _ in module.drawn]
    return {
        "error": done.error(reference(steps, 1, None), _flat(make_network())),
        "spread": done.spread,
        "is_idle": done.is_idle,
        "drawn": module.drawn,
        "undisturbed": undisturbed,
        "gathered": module.gathered,
        "rows": module.rows,
        "counted": [float(module.sum.sum_value), len(torch.cat(module.cat.value))],
        "metrics": {key: float(value) for key, value in done.trainer.callback_metrics.items()},
    }
