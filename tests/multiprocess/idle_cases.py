"""Fits with a module that an idle step could spoil in every way, run by every rank (see ranks.py)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from torchmetrics import CatMetric, MeanMetric, SumMetric

from tests.multiprocess.fitting import Shard, fit
from tests.multiprocess.training_cases import Model, Samples, _flat, make_network, pad, reference

# By epoch: idle at the end and in between, or in all of the first epoch and not in the second.
SHARDS: dict[str, list[Shard]] = {
    "rank 1 idle": [[[0, 1, 2, 3], [4, 8]], [[10], [12, 13]]],
    "rank 0 idle": [[[10], [12, 13]], [[0, 1, 2, 3], [4, 8]]],
    "rank 0 idle at step 0": [[[], [12, 13, 4]], [[0, 1, 2], [3, 8]]],
}


class Head(nn.Module):
    """Used by another method than its forward."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def logits(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden)


class WithHead(nn.Module):
    """No forward enters the head, and the graph of the loss does not show what is run again in the backward."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.body, self.head = network[:-1], Head(network[-1])

    def forward(self, ids: Tensor) -> Tensor:
        hidden = checkpoint(self.body[1:], self.body[0](ids), use_reentrant=True)
        return self.head.logits(hidden)


class Delicate(Model):
    """Draws random numbers, updates metrics and buffers, and has collectives of its own in each step; an idle step's loss is
    `bad`, and what it counts and logs is 99 times as much."""

    def __init__(self, is_sharded: bool, bad: float) -> None:
        super().__init__(is_sharded)
        self.bad = bad
        self.mean, self.sum, self.cat = MeanMetric(), SumMetric(), CatMetric()
        self.of_step, self.since_reset = SumMetric(dist_sync_on_step=True), SumMetric(sync_on_compute=False)
        self.by_hook = SumMetric()
        self.register_buffer("added", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(()))
        self.computed: list[list[float]] = []
        self.reduced: list[float] = []
        self.logged: list[float] = []
        self.dropout = nn.Dropout(0.5)
        self.drawn: list[list[float]] = []
        self.gathered: list[list[float]] = []
        self.rows = self.rows_since_reset = 0

    def configure_model(self) -> None:
        if self.is_sharded and not isinstance(self.network, WithHead):
            self.network = WithHead(self.network)
            mesh = self.device_mesh["data_parallel"]
            for part in (self.network.body[1], self.network.head):
                fully_shard(part, mesh=mesh)
            register_fsdp_forward_method(self.network.head, "logits")
            fully_shard(self.network, mesh=mesh)

    def on_train_start(self) -> None:
        seed(self.global_rank)

    def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        """Augments, and so draws; counts, too."""
        self.drawn_before = draw(self.dropout)
        self.by_hook.update(len(batch["input_ids"]))
        return batch

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.by_hook.update(len(batch["input_ids"]))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        is_idle = self.trainer.strategy.step_info.is_idle
        logits = self.network(batch["input_ids"]) * (self.bad if is_idle else 1.0)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
        drawn = draw(self.dropout)
        one = 99.0 if is_idle else 1.0
        self.log("of_rank", 99.0 if is_idle else float(batch_idx), on_step=True, on_epoch=False, batch_size=1)
        rows = torch.ones(len(batch["input_ids"])) * one
        for metric in (self.mean, self.sum, self.cat, self.since_reset):
            metric.update(rows)
        self.computed.append([float(self.of_step(rows)), float(self.sum.compute())])
        self.added += one
        self.assigned = self.assigned + one
        self.reduced.append(float(self.trainer.strategy.reduce(torch.tensor(2.0 * one), reduce_op=dist.ReduceOp.PRODUCT)))
        self.log("mean_of_rows", self.mean, on_step=False, on_epoch=True)
        assert self.trainer.strategy.reduce_boolean_decision(True, all=True), "of all ranks, idle or not"
        total = torch.tensor([float(is_idle)])
        dist.all_reduce(total)
        self.gathered.append([*total.tolist(), *self.all_gather(torch.tensor(float(self.global_rank))).tolist()])
        if not is_idle:
            self.drawn += [self.drawn_before, drawn]
            self.rows += len(rows)
            self.rows_since_reset += len(rows)
        if batch_idx == 1:
            self.since_reset.reset()
            self.rows_since_reset = 0
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        is_idle = self.trainer.strategy.step_info.is_idle
        self.log("by_hook", 99.0 if is_idle else 1.0, on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
        assert self.trainer.strategy.reduce_boolean_decision(True, all=True)
        self.by_hook(len(batch["input_ids"]))
        self.logged.append(float(self.trainer.callback_metrics.get("of_rank", -1.0)))
        self.computed[-1].append(float(self.sum.compute()))  # cached on all ranks or on none

    def on_train_epoch_end(self) -> None:
        self.computed.append([float(self.mean.compute())])


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
        "is_active": [not idle for epoch in done.is_idle for idle in epoch],
        "sizes": [len(window) for window in done.windows],
        "rows_since_reset": module.rows_since_reset,
        "rows": module.rows,
        "computed": module.computed,
        "reduced": module.reduced,
        "logged": module.logged,
        "left": float(module.since_reset.compute()),
        "buffers": [float(module.added), float(module.assigned)],
        "counted": [float(module.sum.sum_value), len(torch.cat(module.cat.value))],
        "counted_by_hooks": float(module.by_hook.sum_value),
        "metrics": {key: float(value) for key, value in done.trainer.callback_metrics.items()},
    }
