"""What the ranks of tests/multiprocess/test_loss_cases.py do: fits whose exact gradients and losses are known by hand."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from odb_lightning import ODBDataLoader, ODBDDPStrategy, ODBDeepSpeedStrategy
from odb_lightning.batch import StepInfo
from odb_lightning.callbacks import RunSummary
from odb_lightning.models import CausalLM
from odb_lightning.models.causal_lm import mean_cross_entropy
from odb_lightning.strategies import deepspeed
from tests.loader_data import IGNORED
from tests.multiprocess import training_cases
from tests.multiprocess.evaluation_cases import TINY, pad_with_mask
from tests.multiprocess.exact_fits import LIMIT
from tests.multiprocess.fitting import ByEpoch, Shard, fit, make
from tests.multiprocess.trainers import make_trainer

VOCABULARY = 17

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Sample:
    """`targets` of a sample's last tokens are labelled; `mean` is what its loss is to be."""

    length: int
    targets: int
    mean: float = 0.0

    def tensors(self, index: int) -> Batch:
        ids = (torch.arange(self.length) * 7 + 3 * index) % (VOCABULARY - 1) + 1
        labels = ids.clone()
        labels[: self.length - self.targets] = IGNORED
        return {"input_ids": ids, "labels": labels, "mean": torch.tensor(self.mean)}


class Samples:
    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Batch:
        return self.samples[index].tensors(index)


def collate(samples: list[Batch]) -> Batch:
    return pad_with_mask(samples) | {"mean": torch.stack([sample["mean"] for sample in samples])}


class Recorded(lightning.LightningModule):
    """Keeps each step's info, weights and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.infos: list[StepInfo] = []
        self.weights: list[Tensor] = []
        self.losses: list[float] = []

    def on_train_start(self) -> None:
        self.weights.append(_flat(self))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.infos.append(self.trainer.strategy.step_info)
        self.weights.append(_flat(self))
        self.losses.append(float(outputs["loss"]))


class Stated(Recorded):
    """The mean over the targets is what the samples state, times a weight: an update takes from the weight what the mean over
    all its targets is. NaN for a batch without targets, as plain cross entropy is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        targets = (batch["labels"][:, 1:] != IGNORED).sum(1)
        return (self.weight * (targets * batch["mean"]).sum() / targets.sum()).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.LayerNorm(8), nn.Linear(8, VOCABULARY))


class Supervised(Recorded):
    """A masked mean, over nothing NaN with NaN as its gradient, or our module's, which is a zero. Momentum and weight decay."""

    learning_rate = 0.1

    def __init__(self, is_plain: bool = True) -> None:
        super().__init__()
        self.network = make_network()
        self.is_plain = is_plain

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits, targets = self.network(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        if self.is_plain:
            mask = (targets != IGNORED).float()
            losses = cross_entropy(logits.transpose(1, 2), targets.clamp(min=0), reduction="none")
            loss = (losses * mask).sum() / mask.sum()
        else:
            loss = mean_cross_entropy(logits[targets != IGNORED], targets[targets != IGNORED])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9, weight_decay=0.1)


def _flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in module.parameters()])


@dataclass
class Trained:
    trainer: lightning.Trainer
    loader: ODBDataLoader
    told: list[str]


def train(
    strategy: str, module: Any, shards: list[Shard], samples: list[Sample], *, l_max: int, accumulate: int = 1, **options: Any
) -> Trained:
    """Trains as many epochs as a shard has."""
    loader = ODBDataLoader(
        Samples(samples),
        l_max=l_max,
        collate_fn=collate,
        sampler=ByEpoch(shards[int(os.environ["RANK"])]),
        num_workers=0,
        buffer_size=16,
        num_supervised_fn="causal",
    )
    trainer = make_trainer(
        make(strategy), devices=len(shards), max_epochs=len(shards[0]), accumulate_grad_batches=accumulate, **options
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader)
    return Trained(trainer, loader, [str(warning.message) for warning in caught])


# --- means that are stated: C28, C29, C31, C32 ---

SKEWED = [Sample(10, 9, 2.0), Sample(10, 1, 8.0)]
STATED: dict[str, dict[str, Any]] = {
    "C28": {"samples": [Sample(8, 1, 4.0), Sample(8, 7, 1.0)], "shards": [[[0]], [[1]]], "l_max": 8},
    "C29": {
        "samples": [Sample(100, 10, 1.0), *[Sample(20, 12, 3.0)] * 5],
        "shards": [[[0]], [[1, 2, 3, 4, 5]]],
        "l_max": 100,
    },
    "C31": {"samples": SKEWED, "shards": [[[0, 1]]], "l_max": 10, "accumulate": 2},
    "C31, one batch": {"samples": SKEWED, "shards": [[[0, 1]]], "l_max": 20},
    "C31, two ranks": {"samples": SKEWED, "shards": [[[0, 1]], [[1, 0]]], "l_max": 10, "accumulate": 2},
    "C32": {"samples": [Sample(8, 5, 1.0)] * 5, "shards": [[list(range(5))]], "l_max": 8, "accumulate": 4},
    "C32, two ranks": {
        "samples": [Sample(8, 5, 1.0)] * 10,
        "shards": [[[0, 1, 2, 3, 4]], [[5, 6, 7, 8, 9]]],
        "l_max": 8,
        "accumulate": 4,
    },
}


def _stated(strategy: str, **case: Any) -> dict[str, Any]:
    module, summary = Stated(), RunSummary()
    done = train(strategy, module, callbacks=[summary], **case)
    weights = torch.stack(module.weights)[:, 0]
    return {
        "gradients": (weights[:-1] - weights[1:]).tolist(),
        "multipliers": [info.loss_multiplier() for info in module.infos],
        "sizes": [info.num_samples for info in module.infos],
        "global_step": done.trainer.global_step,
        "updates": summary.figures["updates"],
    }


# --- batches without targets: C33, C34 ---

TARGETS, NONE = Sample(6, 4), Sample(6, 0)


MASKED: dict[int, list[Shard]] = {1: [[[0], [1, 2], [1, 2]]], 2: [[[0], [1], [1]], [[0], [2], [2]]]}
"""By the number of ranks: momentum is gathered in the first epoch; then no rank has a target, twice."""


def _without_targets(strategy: str, shards: list[Shard], is_plain: bool) -> dict[str, Any]:
    """C33"""
    module = Supervised(is_plain)
    done = train(strategy, module, shards, [TARGETS, NONE, NONE], l_max=12)
    before = module.weights[1]
    return {
        "moved_first": float((before - module.weights[0]).abs().max()),
        "moved_then": float(max((weights - before).abs().max() for weights in module.weights[2:])),
        "spread": _spread(module.weights[-1]),
        "losses": module.losses,
        "logged": {key: float(value) for key, value in done.trainer.callback_metrics.items()},
        "multipliers": [info.loss_multiplier() for info in module.infos],
        "sizes": [info.num_samples for info in module.infos],
        "samples": sum(info.global_num_samples for info in module.infos),
        "counted": done.loader.stats.batches_without_targets,
        "told": [text for text in done.told if "no target" in text],
    }


EIGHT_AND_FIVE = [Sample(8, 0), Sample(6, 5)]


def _without_targets_on_one_rank(strategy: str) -> dict[str, Any]:
    """C34. One update from known weights, and what it would be on rank 1's batch alone."""
    module = Supervised()
    done = train(strategy, module, [[[0]], [[1]]], EIGHT_AND_FIVE, l_max=8)
    alone = Supervised()
    batch = collate([EIGHT_AND_FIVE[1].tensors(1)])
    loss = cross_entropy(alone.network(batch["input_ids"])[0, :-1], batch["labels"][0, 1:])
    loss.backward()
    optimizer: Any = alone.configure_optimizers()
    optimizer.step()
    return {
        "targets": [info.num_tokens_supervised for info in module.infos],
        "multipliers": [info.loss_multiplier() for info in module.infos],
        "error": float((module.weights[-1] - _flat(alone)).abs().max()),
        "moved": float((module.weights[-1] - module.weights[0]).abs().max()),
        "spread": _spread(module.weights[-1]),
        "logged": {key: float(value) for key, value in done.trainer.callback_metrics.items()},
        "mean": float(loss),
    }


def _spread(values: Tensor) -> float:
    """How far ranks are apart."""
    if not dist.is_initialized():
        return 0.0
    everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, values)
    return float(max((other - values).abs().max() for other in everyone))


def by_hand(strategy: str, size: int) -> dict[str, Any]:
    """All of the above that is for so many ranks."""
    results = {name: _stated(strategy, **case) for name, case in STATED.items() if len(case["shards"]) == size}
    for name, is_plain in (("C33, plain", True), ("C33, ours", False)):
        results[name] = _without_targets(strategy, MASKED[size], is_plain)
    if size == 2:
        results["C34"] = _without_targets_on_one_rank(strategy)
    return results


# --- adapters of a rank that is idle at first: C37 ---


class Adapted(CausalLM):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.idle = [*getattr(self, "idle", []), self.trainer.strategy.step_info.is_idle]


def adapters(strategy: str) -> dict[str, Any]:
    """Three steps, rank 1 idle in the first; with gradient checkpointing."""
    torch.manual_seed(0)
    lora = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    module = Adapted(config=TINY, lora=lora, gradient_checkpointing=True, lr=0.01)
    base = _frozen(module)
    train(strategy, module, [[[0], [0, 1]], [[], [1, 0]]], [Sample(8, 5), Sample(8, 6)], l_max=8)
    norms = {name: float(value.norm()) for name, value in module.named_parameters() if "lora_B" in name and value.requires_grad}
    trained = torch.cat([value.detach().flatten() for value in module.parameters() if value.requires_grad])
    return {
        "idle": module.idle,
        "smallest": min(norms.values()),
        "adapters": len(norms),
        "spread": _spread(trained),
        "base_moved": float((_frozen(module) - base).abs().max()),
    }


def _frozen(module: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten().clone() for value in module.parameters() if not value.requires_grad])


# --- a forward that takes what collate_fn returns, and nothing else: C40 ---


class Strict(lightning.LightningModule):
    """Every loop calls its forward with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.network = make_network()
        self.idle: dict[str, list[bool]] = {}
        self.types: set[str] = set()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        assert input_ids.shape == attention_mask.shape == labels.shape
        return cross_entropy(self.network(input_ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def _note(self, loop: str, batch: Any) -> None:
        strategy: Any = self.trainer.strategy
        info = strategy.step_info if loop == "train" else strategy.val_step_info
        self.idle.setdefault(loop, []).append(info.is_idle)
        self.types.add(type(batch).__name__)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self._note("train", batch)
        return self(**batch)  # type: ignore[no-any-return]

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._note("val", batch)
        self.log("val_loss", self(**batch), sync_dist=True, batch_size=len(batch["labels"]))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._note("test", batch)
        self(**batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> float:
        self._note("predict", batch)
        return float(self(**batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def strict_forward(strategy: str) -> dict[str, Any]:
    """Rank 1 is idle in training, rank 0 in the other loops."""
    train_shards, other_shards = [[0, 1, 2], [3]], [[3], [0, 1, 2]]

    def loader(shards: list[list[int]]) -> ODBDataLoader:
        options: dict[str, Any] = {"num_workers": 0, "num_supervised_fn": "causal"}
        sampler = shards[int(os.environ["RANK"])]
        return ODBDataLoader(
            Samples([Sample(8, 5)] * 4), l_max=8, collate_fn=collate_strictly, sampler=sampler, shuffle=False, **options
        )

    module, trainer = Strict(), make_trainer(make(strategy))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader(train_shards), loader(other_shards))
        val_loss = float(trainer.callback_metrics["val_loss"])
        trainer.test(module, loader(other_shards), verbose=False)
        trainer.predict(module, loader(other_shards))
    return {"idle": module.idle, "types": sorted(module.types), "val_loss": val_loss}


def collate_strictly(samples: list[Batch]) -> Batch:
    return pad_with_mask(samples)


# --- reductions over some of the ranks ---

GROUPS = [[0, 1], [2, 3]]
OF_RANKS: list[Shard] = [[[0, 1, 2]], [[0]], [[1, 2]], [[]]]
"""Rank 1 is idle after the first step, rank 2 in the third, and rank 3 always."""
REDUCTIONS = ["mean", "sum", "max", "min"]


def stated_value(rank: int, step: int) -> float:
    """What an active rank reduces."""
    return 1.0 + rank + 10 * step


class Grouped(Supervised):
    def on_train_start(self) -> None:
        super().on_train_start()
        groups = [dist.new_group(ranks) for ranks in GROUPS]
        self.group = groups[self.global_rank // 2]
        self.reduced: list[dict[str, float]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        is_idle = strategy.step_info.is_idle
        values = {}
        for operation in REDUCTIONS:
            value = torch.tensor(-999.0 if is_idle else stated_value(self.global_rank, batch_idx))
            value = -value if is_idle and operation == "max" else value  # which would win
            values[operation] = float(strategy.reduce(value, group=self.group, reduce_op=operation))
        self.reduced.append(values)
        return super().training_step(batch, batch_idx)


def reductions_in_groups() -> dict[str, Any]:
    module = Grouped()
    train("ddp", module, OF_RANKS, [Sample(8, 5)] * 3, l_max=8)
    return {
        "reduced": module.reduced,
        "idle": [info.is_idle for info in module.infos],
        "spread": _spread(module.weights[-1]),
        "is_finite": bool(module.weights[-1].isfinite().all()),
    }


# --- a part that not every update uses ---


class WithASpare(training_cases.Model):
    """A layer that some batches use; its gradient there is 1."""

    def __init__(self, used_in: Iterable[int]) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(self.spare.weight)
        self.used_in = used_in

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.spare(torch.ones(1, 4)).sum() if batch_idx in self.used_in else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


STAGES = {
    "1": (1, False, True),
    "1, no overlap": (1, False, False),
    "1, offloaded": (1, True, True),
    "2": (2, False, True),
    "2, offloaded": (2, True, True),
    "3": (3, False, True),
    "3, offloaded": (3, True, True),
}
"""Of ZeRO; whether the optimizer is offloaded, and gradients are reduced during the backward."""


def spares() -> dict[str, list[float]]:
    """The layer's weights after a fit of three updates of which the first uses it, by strategy."""
    results = {name: _spare_weights(make_stage(name), [0], 3) for name in STAGES}
    deepspeed._forget_gradients = lambda optimizer: None
    return results | {f"{name}, as it is": _spare_weights(make_stage(name), [0], 3) for name in STAGES}


def spares_in_windows() -> dict[str, list[float] | str]:
    """The same after two windows of two, by strategy and batches that use the layer; or what the fit ended with."""
    results: dict[str, list[float] | str] = {}
    for used_in in ([0], [1], [0, 1]):
        results[f"ddp {used_in}"] = _spare_weights(ODBDDPStrategy(find_unused_parameters=True, timeout=LIMIT), used_in, 4)
        for name in STAGES:
            try:
                results[f"{name} {used_in}"] = _spare_weights(make_stage(name), used_in, 4)
            except RuntimeError as error:
                results[f"{name} {used_in}"] = str(error)
    return results


def make_stage(name: str) -> ODBDeepSpeedStrategy:
    stage, is_offloaded, overlaps = STAGES[name]
    strategy = ODBDeepSpeedStrategy(stage=stage, offload_optimizer=is_offloaded, overlap_comm=overlaps, timeout=LIMIT)
    strategy.config["zero_force_ds_cpu_optimizer"] = False
    strategy.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return strategy


def _spare_weights(strategy: Any, used_in: list[int], num_batches: int) -> list[float]:
    shards: list[Shard] = [[[0, 4, 10, 13][:num_batches]], [[13, 4, 0, 10][:num_batches]]]
    accumulate = 2 if num_batches == 4 else 1
    done = fit(WithASpare(used_in), strategy, shards, training_cases.Samples(), training_cases.pad, accumulate=accumulate)
    return done.final[-4:].tolist()


class OfRanks(WithASpare):
    """Each rank has a layer of its own."""

    def __init__(self) -> None:
        super().__init__(())
        self.other = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(self.other.weight)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = training_cases.Model.training_step(self, batch, batch_idx)
        return loss + (self.other if self.global_rank else self.spare)(torch.ones(1, 4)).sum()


def layers_of_ranks() -> dict[str, list[float] | str]:
    """The weights of both layers after an update, or what the fit ended with."""
    strategies = {"ddp": lambda: ODBDDPStrategy(find_unused_parameters=True, timeout=LIMIT), "0": lambda: make("zero0")}
    strategies |= {name: partial(make_stage, name) for name in ("1", "1, no overlap", "2", "2, offloaded")}
    results: dict[str, list[float] | str] = {}
    for name, strategy in strategies.items():
        try:
            done = fit(OfRanks(), strategy(), [[[0]], [[13]]], training_cases.Samples(), training_cases.pad)
            results[name] = done.final[-8:].tolist()
        except RuntimeError as error:
            results[name] = str(error)
    return results


# --- an epoch that a hook ends inside a window ---


class Impatient(training_cases.Model):
    """Leaves its first epoch at the fourth batch, where a window of two has one."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 3 else None


class ImpatientElsewhere(Impatient):
    """With a loader that the strategy knows nothing of."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return training_cases.token_losses(self.network, batch, "mean")


def _left_elsewhere(strategy: str) -> list[float]:
    shard = [[0, 1, 2, 3, 4], [10, 12, 13, 7, 9]][int(os.environ["RANK"])]
    samples = torch.utils.data.Subset(training_cases.Samples(), shard)
    loader = torch.utils.data.DataLoader(samples, collate_fn=training_cases.pad)
    options = {"accumulate_grad_batches": 2, "max_epochs": 2, "use_distributed_sampler": False}
    module = ImpatientElsewhere()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(make(strategy, loss_scaling="none"), **options).fit(module, loader)
    return module.final.tolist()


def left_inside_a_window() -> dict[str, list[float]]:
    """The parameters after a second epoch, by strategy."""
    shards: list[Shard] = [[[0, 1, 2, 3, 4], [8, 9, 10, 7]], [[10, 12, 13, 7, 9], [12, 13, 1, 4]]]
    results = {
        strategy: fit(Impatient(), strategy, shards, training_cases.Samples(), training_cases.pad, accumulate=2).final.tolist()
        for strategy in ("ddp", "zero2")
    }
    return results | {f"{strategy}, elsewhere": _left_elsewhere(strategy) for strategy in ("ddp", "zero2")}
