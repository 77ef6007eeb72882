"""Small fits under each strategy, run by every rank (see ranks.py), and the single-process reference for them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from odb_lightning import ODBDataLoader, ODBDDPStrategy, ODBDeepSpeedStrategy, ODBModelParallelStrategy
from odb_lightning.batch import StepInfo
from tests.multiprocess.trainers import everyone, make_trainer

VOCABULARY = 17
LEARNING_RATE, MOMENTUM = 0.2, 0.9

# The lengths and, per sample, how many of its tokens (from the end) are labelled. Sample 2 has a target in column 0 only, which
# a causal model does not train on; sample 5 and 6 have none at all.
LENGTHS = [12, 9, 8, 7, 12, 10, 12, 3, 6, 4, 12, 5, 11, 12]
LABELLED = [3, 9, 8, 1, 12, 0, 0, 2, 1, 4, 12, 2, 5, 7]


def make_sample(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(1, VOCABULARY, (LENGTHS[index],), generator=generator)
    labels = ids.clone()
    labels[: LENGTHS[index] - LABELLED[index]] = -100
    return {"input_ids": ids, "labels": labels}


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return make_sample(index)


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        key: nn.utils.rnn.pad_sequence([sample[key] for sample in samples], batch_first=True, padding_value=value)
        for key, value in (("input_ids", 0), ("labels", -100))
    }


def make_network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """With a LayerNorm: its gradients arrive in another order than its parameters stand in."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, VOCABULARY)
    )
    return network.to(dtype)


def token_losses(network: nn.Module, batch: dict[str, Tensor], reduction: str) -> Tensor:
    """NaN for the mean over a batch without targets, as plain cross entropy is."""
    logits = network(batch["input_ids"])[:, :-1]
    return cross_entropy(logits.reshape(-1, VOCABULARY), batch["labels"][:, 1:].reshape(-1), reduction=reduction)


def logged_value(rank: int, step: int) -> float:
    """What an active rank logs."""
    return 1.0 + step + 10 * rank


def log_in_every_way(module: lightning.LightningModule, loss: Tensor, value: Tensor, rows: int) -> None:
    """`value_of_batch` for as many rows as Lightning finds in the batch."""
    module.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
    module.log("value", value, on_step=True, on_epoch=True, sync_dist=True, batch_size=rows)
    module.log("value_of_batch", value, on_step=True, on_epoch=True, sync_dist=True)
    for name, reduced, reduction in (("largest", value, "max"), ("rows", torch.tensor(float(rows)), "sum")):
        module.log(name, reduced, on_step=True, on_epoch=True, sync_dist=True, reduce_fx=reduction)


class Model(lightning.LightningModule):
    """Knows nothing of idle steps or of the loader."""

    def __init__(self, is_sharded: bool = False) -> None:
        super().__init__()
        self.network = make_network()
        self.is_sharded = is_sharded
        self.infos: list[StepInfo] = []
        self.losses: list[float] = []
        self.batch_keys: set[str] = set()

    def configure_model(self) -> None:
        if self.is_sharded and not isinstance(self.network, FSDPModule):
            for part in self.network:
                if isinstance(part, nn.Linear):
                    fully_shard(part, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.batch_keys |= set(batch)
        loss = token_losses(self.network, batch, "mean")
        rows = len(batch["input_ids"])
        self.losses.append(loss.item())
        idle = self.trainer.strategy.step_info.is_idle
        log_in_every_way(self, loss, torch.tensor(99.0 if idle else logged_value(self.global_rank, batch_idx)), rows)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.infos.append(self.trainer.strategy.step_info)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def on_train_end(self) -> None:
        # While parameters can still be gathered under ZeRO-3.
        self.final = _whole(list(self.network.parameters()))


def _whole(parameters: list[nn.Parameter]) -> Tensor:
    if hasattr(parameters[0], "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters):
            return torch.cat([parameter.detach().flatten().clone() for parameter in parameters])
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        assert all(isinstance(parameter, DTensor) for parameter in parameters), "left unsharded"
        return torch.cat([parameter.detach().full_tensor().flatten() for parameter in parameters])
    return torch.cat([parameter.detach().flatten().clone() for parameter in parameters])


def _cheap_zero(strategy: type) -> type:
    """The wrong way to be idle: a zero that is not made by running the module."""

    class CheapZero(strategy):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.step_info.is_idle:
                run, self.lightning_module.training_step = self.lightning_module.training_step, self._zero
                try:
                    return super().training_step(*args, **kwargs)
                finally:
                    self.lightning_module.training_step = run
            return super().training_step(*args, **kwargs)

        def _zero(self, *args: Any) -> Tensor:
            loss = sum(parameter.sum() * 0 for parameter in self.lightning_module.parameters())
            log_in_every_way(self.lightning_module, loss, torch.ones(()), 1)
            return loss

    return CheapZero


def make_strategy(name: str, loss_scaling: str, is_cheap: bool) -> Any:
    limit = timedelta(seconds=40)
    if name == "fsdp2":
        cls = _cheap_zero(ODBModelParallelStrategy) if is_cheap else ODBModelParallelStrategy
        return cls(loss_scaling=loss_scaling, timeout=limit)
    if name == "ddp":
        cls = _cheap_zero(ODBDDPStrategy) if is_cheap else ODBDDPStrategy
        return cls(loss_scaling=loss_scaling, timeout=limit)
    cls = _cheap_zero(ODBDeepSpeedStrategy) if is_cheap else ODBDeepSpeedStrategy
    strategy = cls(stage=int(name[-1]), loss_scaling=loss_scaling, timeout=limit)
    strategy.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return strategy


def fit(
    strategy: str,
    shards: list[list[int]],
    accumulate: int = 1,
    l_max: int = 12,
    max_epochs: int = 1,
    clip: float | None = None,
    count: Callable[[Any], float] | str = "causal",
    loss_scaling: str = "token",
    is_cheap: bool = False,
    limit: int | None = None,
) -> dict[str, Any]:
    """Trains on given shards; returns this rank's steps and how far the final parameters are from the reference's."""
    rank = int(os.environ["RANK"])
    loader = ODBDataLoader(
        Samples(), l_max=l_max, collate_fn=pad, sampler=shards[rank], num_workers=0, buffer_size=16, num_supervised_fn=count
    )
    model = Model(is_sharded=strategy == "fsdp2")
    trainer = make_trainer(
        make_strategy(strategy, loss_scaling, is_cheap),
        devices=len(shards),
        max_epochs=max_epochs,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        limit_train_batches=limit,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, loader)
    steps = [(info.epoch, info.step, list(info.sample_ids)) for info in model.infos]
    expected, finals = reference(everyone(steps), accumulate, clip), everyone(model.final)
    return {
        "steps": steps,
        "losses": model.losses,
        "idle": [info.is_idle for info in model.infos],
        "error": float((model.final.double() - expected).abs().max()),
        "moved": float((expected - _flat(make_network(torch.float64))).abs().max()),
        "spread": float(max((final - finals[0]).abs().max() for final in finals)),
        "global_step": trainer.global_step,
        "batch_keys": sorted(model.batch_keys),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "optimizer_state": _state_size(trainer.optimizers[0]),
        "zero_stage": trainer.strategy.deepspeed_engine.zero_optimization_stage() if strategy.startswith("zero") else None,
    }


def _state_size(optimizer: Any) -> int:
    """Elements of the optimizer's state on this rank."""
    inner = getattr(optimizer, "optimizer", optimizer)  # DeepSpeed's wraps the user's
    values = [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum((value.to_local() if isinstance(value, DTensor) else value).numel() for value in values)


def _flat(network: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def reference(ranks: list[list[tuple[int, int, list[int]]]], accumulate: int, clip: float | None) -> Tensor:
    """The parameters after the same updates in one process and float64: each one the mean over all targets of all ranks and
    micro-batches, computed sample by sample, without padding."""
    network = make_network(torch.float64)
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    windows: dict[tuple[int, int], list[int]] = {}
    for steps in ranks:
        for epoch, step, sample_ids in steps:
            windows.setdefault((epoch, step // accumulate), []).extend(sample_ids)
    for _, sample_ids in sorted(windows.items()):
        batches = [pad([make_sample(index)]) for index in sample_ids]
        num_targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        if num_targets == 0:
            continue
        optimizer.zero_grad()
        (sum(token_losses(network, batch, "sum") for batch in batches) / num_targets).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
    return _flat(network)


UNSHIFTED, LENGTH = "unshifted", "length"


def _count_length(batch: dict[str, Tensor]) -> float:
    return int((batch["input_ids"] != 0).sum())


CASES: dict[str, dict[str, Any]] = {
    "k=1, rank 1 idle": {"shards": [[0, 1, 2, 3, 4, 8, 9], [10, 7]]},
    "k=1, rank 0 idle": {"shards": [[10, 7], [0, 1, 2, 3, 4, 8, 9]]},
    "k=3": {"shards": [[0, 1, 2, 3, 4, 8, 9], [10, 7, 12, 11]], "accumulate": 3, "max_epochs": 2},
    "k=4, short last window": {"shards": [[10, 7], [0, 1, 2, 3, 4, 8]], "accumulate": 4, "max_epochs": 2},
    "a batch without targets": {"shards": [[5, 0, 1], [10, 12, 13]], "max_epochs": 2},
    "a window without targets": {"shards": [[5], [6]], "max_epochs": 2},
    "windows with and without targets": {"shards": [[5, 0, 13], [6, 10]], "max_epochs": 2},
    "clipped": {"shards": [[0, 1, 2, 3], [10]], "clip": 0.1, "accumulate": 2},
    "eight full batches against two": {"shards": [[0, 4, 10, 13, 0, 4, 10, 13], [0, 13]]},
    "a rank that never had a sample": {"shards": [[], [0, 1, 2]]},
    "limit inside a window": {"shards": [[0, 1, 2, 3, 4, 8, 9], [10, 7, 12]], "accumulate": 3, "limit": 5, "max_epochs": 2},
}

WRONG: dict[str, dict[str, Any]] = {
    "scale from input lengths": {"count": LENGTH},
    "scale from unshifted labels": {"count": UNSHIFTED},
    "no scale": {"loss_scaling": "none"},
}


def all_cases(strategy: str) -> dict[str, Any]:
    """Every case, one fit after the other in the same processes, and the wrong variants on the case with k = 3."""
    results = {name: fit(strategy, **case) for name, case in CASES.items()}
    counters = {LENGTH: _count_length}
    for name, change in WRONG.items():
        change = change | {"count": counters.get(change.get("count", "causal"), change.get("count", "causal"))}
        results[name] = fit(strategy, **CASES["k=3"], **change)
    return results


def cheap_zero(strategy: str) -> dict[str, Any]:
    """The case with idle steps, taken part in by a zero that is no run of the module."""
    return fit(strategy, **CASES["k=1, rank 1 idle"], is_cheap=True)


def own_loop(code: str) -> dict[str, Any]:
    """The README's loop under plain DDP, on a data set of which one rank runs out first."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    network = make_network()
    ddp = nn.parallel.DistributedDataParallel(network)
    steps: list[tuple[int, int, list[int]]] = []

    def mean_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        step = scope["step"]
        steps.append((step.epoch, step.step, list(step.sample_ids)))
        return token_losses(model, batch, "sum") / max(int((batch["labels"][:, 1:] != -100).sum()), 1)

    # Seven samples of which no two fit into a batch: one rank has four steps, the other three.
    alone = [index for index in range(len(LENGTHS)) if LENGTHS[index] > 6 and LABELLED[index]][:7]
    scope: dict[str, Any] = {
        "dataset": torch.utils.data.Subset(Samples(), alone),
        "collate_fn": pad,
        "model": ddp,
        "optimizer": torch.optim.SGD(network.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM),
        "mean_token_loss": mean_token_loss,
    }
    exec(code, scope)
    expected = reference(everyone([(e, s, [alone[i] for i in ids]) for e, s, ids in steps]), 1, None)
    dist.destroy_process_group()
    return {
        "error": float((_flat(network).double() - expected).abs().max()),
        "moved": float((expected - _flat(make_network(torch.float64))).abs().max()),
        "idle_steps": sum(not ids for _, _, ids in steps),
    }
