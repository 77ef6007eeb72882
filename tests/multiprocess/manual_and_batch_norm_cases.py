"""Manual optimization, and BatchNorm on idle ranks, run by every rank (see ranks.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from tests.multiprocess.exact_fits import LIMIT, Batch, Model, fit, odb_loader, outcome, plain_loader, refusal
from tests.multiprocess.fitting import make, num_ranks, shard_for
from tests.multiprocess.strategy_variant_cases import FSDP1Model, FSDP1OnCPU
from tests.multiprocess.training_cases import VOCABULARY, make_network

# --- manual optimization ---


class ManualModel(Model):
    """Steps at the end of each window of the loader's."""

    shares = (1.0,)
    """Of the loss, each with a forward and a backward of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for share in self.shares:
            total, weight = self.objective(self.network, batch)
            self.manual_backward(total / weight * share)
        if self.trainer.strategy.ends_window:
            optimizer.step()
            optimizer.zero_grad()


class Counting(nn.Sequential):
    """Counts its forwards in a buffer."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(ids)


def make_counting(dtype: torch.dtype = torch.float32) -> nn.Module:
    return Counting(*make_network()).to(dtype)


class TwoBackwards(ManualModel):
    shares = (0.25, 0.75)


class StepsEveryBatch(ManualModel):
    """As DeepSpeed's own loops do, whose engine knows which of the steps are to be made."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        total, weight = self.objective(self.network, batch)
        self.manual_backward(total / weight)
        self.optimizers().step()


MANUAL: dict[str, dict[str, Any]] = {
    "each step an update": {"shards": [[0, 1, 2, 3, 4, 8, 9], [10, 7]]},
    "k=3, short last windows": {"shards": [[10, 7], [0, 1, 2, 3, 4]], "accumulate": 3, "max_epochs": 2},
    "windows without targets": {"shards": [[5, 0, 13], [6, 10]], "max_epochs": 2},
    "windows without targets, k=2": {"shards": [[5, 5, 5, 0, 1], [6, 6]], "accumulate": 2, "max_epochs": 2},
}
"""Samples 5 and 6 have no target."""


def manual(strategy: str) -> dict[str, Any]:
    """On one device with the samples of both ranks."""
    results = {}
    for name, case in MANUAL.items():
        shards = case["shards"] if num_ranks(strategy) == 2 else [[index for shard in case["shards"] for index in shard]]
        options = {"max_epochs": case.get("max_epochs", 1), "devices": num_ranks(strategy)}
        model = ManualModel(shard=shard_for(strategy))
        trainer = fit(make(strategy), model, odb_loader(shards, accumulate=case.get("accumulate")), **options)
        results[name] = outcome(trainer, model, accumulate=case.get("accumulate", 1))
    if strategy.startswith("zero"):
        model = StepsEveryBatch()
        trainer = fit(make(strategy), model, odb_loader(MANUAL["each step an update"]["shards"], accumulate=2))
        results["steps every batch"] = outcome(trainer, model, accumulate=2)
    return results


def manual_with_ddp() -> dict[str, Any]:
    """What does not depend on how gradients are exchanged."""
    return {"two backwards": _two_backwards(), "counted by the strategy": _counted_by_the_strategy()}


def _two_backwards() -> dict[str, Any]:
    model = TwoBackwards(network=make_counting)
    loader = odb_loader([[0, 1, 2, 3, 4, 8, 9], [10, 7]])
    trainer = fit(make("ddp", broadcast_buffers=False), model, loader)
    return outcome(trainer, model, network=make_counting) | {"calls": int(model.network.calls)}


class StepsEverySecond(ManualModel):
    """Of which the loader knows nothing."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        total, weight = self.objective(self.network, batch)
        self.manual_backward(total / weight)
        if batch_idx % 2:
            self.optimizers().step()


def refusals_of_deepspeed() -> dict[str, str]:
    kinds = {"two backwards": TwoBackwards, "steps every second": StepsEverySecond}
    return {
        f"{strategy}, {name}": refusal(lambda s=strategy, k=kind: fit(make(s), k(), odb_loader([[0, 1], [10]])))
        for strategy in ("zero2", "zero3")
        for name, kind in kinds.items()
    }


def _counted_by_the_strategy() -> dict[str, Any]:
    model = ManualModel()
    loader = plain_loader([[[7], [9, 8, 11], [3, 2, 1]], [[10, 12, 13], [7, 9], [1]]])
    return outcome(fit(make("ddp", denominator="strategy"), model, loader), model)


# --- BatchNorm ---


class Normed(nn.Module):
    """With a BatchNorm over the tokens of a batch, or over its rows, where it refuses a single one in training mode."""

    def __init__(self, over_rows: bool) -> None:
        super().__init__()
        self.embed, self.first, self.last = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Linear(8, VOCABULARY)
        self.norm = nn.BatchNorm1d(8)
        self.over_rows = over_rows

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.first(self.embed(ids))
        if self.over_rows:
            return self.last(self.norm(hidden.sum(1)))
        return self.last(self.norm(hidden.flatten(0, 1)).view_as(hidden).sum(1))


def make_normed_by_rows(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return Normed(over_rows=True).to(dtype)


def make_normed_by_tokens(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return Normed(over_rows=False).to(dtype)


def classification(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    first = batch["input_ids"][:, 0]
    return cross_entropy(network(batch["input_ids"]), first, reduction="sum"), torch.tensor(len(first))


BATCH_NORM: dict[str, tuple[Any, list[list[int]]]] = {
    "rank 1 idle": (make_normed_by_tokens, [[0, 1, 2, 3, 4, 8, 9, 10], [7, 11]]),
    "rank 1 idle throughout, of rows": (make_normed_by_rows, [[0, 4, 10, 13], []]),
    "rank 0 idle throughout, of rows": (make_normed_by_rows, [[], [0, 4, 10, 13]]),
}


def _shard_whole(model: Any) -> None:
    fully_shard(model.network, mesh=model.device_mesh["data_parallel"])


def batch_norm(strategy: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (network, shards) in BATCH_NORM.items():
        model = Model(classification, network=network, shard=_shard_whole if strategy == "fsdp2" else None)
        # A real batch of a single row is the user's own affair.
        loader = odb_loader(shards, l_max=24, max_rows=2, num_supervised_fn=lambda batch: len(batch["index"]))
        trainer = fit(make(strategy), model, loader)
        results[name] = outcome(trainer, model, network=network, by_batch=True) | {
            "tracked": int(model.network.norm.num_batches_tracked)
        }
    return results


class Synced(Model):
    def __init__(self) -> None:
        super().__init__(network=lambda: nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.SyncBatchNorm(8)))


def sync_batch_norm() -> dict[str, Any]:
    """The refusals."""
    shards = [[0, 1], [2]]
    converted = FSDP1Model(network=make_normed_by_rows)
    return {  # DDP refuses it on CPU by itself
        "in the module": refusal(lambda: fit(make("zero2"), Synced(), odb_loader(shards))),
        "by the trainer": refusal(lambda: fit(FSDP1OnCPU(timeout=LIMIT), converted, odb_loader(shards), sync_batchnorm=True)),
    }
