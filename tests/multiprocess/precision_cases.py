"""Small fits in each precision, run by every rank (see ranks.py), against one process in float64."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from odb_lightning.callbacks import RunSummary
from odb_lightning.models import CausalLM
from tests.multiprocess.evaluation_cases import TINY, pad_with_mask
from tests.multiprocess.fitting import fit, make, num_ranks
from tests.multiprocess.trainers import schedule_of
from tests.multiprocess.training_cases import LENGTHS, Model, Samples, _flat, make_network, pad, reference, token_losses

# Rank 1 has fewer; in one process one after the other.
SHARDS = {1: [[[0, 1, 2, 3, 4, 8, 9, 10, 7]] * 2], 2: [[[0, 1, 2, 3, 4, 8, 9]] * 2, [[10, 7]] * 2]}
ACCUMULATE = 2

GLOBAL_BATCH = {
    1: [[0, 1, 2, 3, 4, 10, 12, 13]],
    2: [[0, 1, 2, 3, 4], [10, 12, 13]],
    4: [[0, 1, 2], [3, 4], [10], [12, 13]],
}
"""Eight samples of which no two fit in a batch, over as many ranks."""
MICRO_BATCHES = {1: 8, 2: 5, 4: 3}
"""Of each rank, so that they are all one update; with two ranks and more, some are idle in some."""
CLIP = 0.3


class InFloat32(Model):
    """Its loss is float32 whatever the network is."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.network(batch["input_ids"])[:, :-1].float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
        return loss


FIRST, SECOND = 0, 1
"""Two samples, of which one is longer."""


def is_first(batch: dict[str, Tensor]) -> bool:
    return batch["input_ids"].shape[1] == LENGTHS[FIRST]


class Line(lightning.LightningModule):
    """A parameter that only the first sample has a gradient for: 1.5 times the loss multiplier."""

    def __init__(self, is_sharded: bool) -> None:
        super().__init__()
        self.part = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(self.part.weight)
        self.is_sharded = is_sharded

    def configure_model(self) -> None:
        if self.is_sharded and not isinstance(self.part, FSDPModule):
            fully_shard(self.part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        dtype = next(self.part.parameters()).dtype
        share = 1.5 if is_first(batch) else 0.0
        return self.part(torch.ones(1, 4, dtype=dtype)).float().sum() * share

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Norms(lightning.Callback):
    """The norm of the gradient of each update, before it is clipped; under ZeRO, but for stage 0, as the engine found it."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: lightning.Trainer, pl_module: Any, optimizer: Any) -> None:
        if _sharding_engine(trainer) is None:
            norm = nn.utils.get_total_norm([parameter.grad for parameter in pl_module.parameters()])
            self.norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        engine = _sharding_engine(trainer)
        if engine is not None and len(self.norms) < engine.global_steps:
            self.norms.append(float(engine.get_global_grad_norm()))


def _sharding_engine(trainer: lightning.Trainer) -> Any:
    engine = getattr(trainer.strategy, "deepspeed_engine", None)
    return engine if engine is not None and engine.zero_optimization_stage() > 0 else None


class Overflowing(CausalLM):
    """Its third batch has an infinite gradient, on one rank."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 2 and self.global_rank == 0 else loss


def all_cases(strategy: str) -> dict[str, Any]:
    """Every precision that the strategy has on CPU; without scale under DDP alone, to see what the comparison can tell."""
    ranks = num_ranks(strategy)
    results: dict[str, Any] = {"clipped": clipped(strategy, ranks)}
    precisions = ["32-true", "bf16-mixed", "bf16-true"] + (["16-mixed"] if strategy in ("single", "ddp") else [])
    for precision in precisions:
        results[precision] = exactness(strategy, ranks, precision)
        if strategy == "ddp":
            results[f"{precision}, no scale"] = exactness(strategy, ranks, precision, loss_scaling="none")
        results[f"{precision}, multiplier"] = multiplier(strategy, ranks, precision)
    if strategy not in ("fsdp2", "zero0"):  # which look for none without a scaler, and have none on CPU
        results["overflow"] = overflow(strategy, ranks)
    if strategy.startswith("zero"):
        try:
            exactness(strategy, ranks, "16-mixed")
        except ValueError as error:
            results["refusal of 16-mixed"] = str(error)
    return results


def in_precision(strategy: str, precision: str) -> dict[str, Any]:
    """Of 16-mixed the trainer makes bf16-mixed on CPU, unless the plugin itself is handed over."""
    if precision != "16-mixed" or strategy not in ("single", "ddp"):
        return {"precision": precision}
    # The scale that it begins with by itself is too large for some of these gradients.
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))]}


def exactness(strategy: str, num_ranks: int, precision: str, loss_scaling: str = "token") -> dict[str, Any]:
    done = fit(
        InFloat32(is_sharded=strategy == "fsdp2"),
        strategy,
        SHARDS[num_ranks],
        Samples(),
        pad,
        accumulate=ACCUMULATE,
        loss_scaling=loss_scaling,
        **in_precision(strategy, precision),
    )
    steps = [[(0, ACCUMULATE * number, ids) for number, ids in enumerate(done.windows)]]
    return {
        "error": done.error(reference(steps, ACCUMULATE, None), _flat(make_network())),
        "spread": done.spread,
        "dtype": str(done.final.dtype),
        "idle": sum(map(sum, done.is_idle)),
    }


def multiplier(strategy: str, num_ranks: int, precision: str) -> float:
    """Where a batch has 257 of 512 targets, its multiplier is 257/256, for which bfloat16 has only 1."""
    done = fit(
        Line(is_sharded=strategy == "fsdp2"),
        strategy,
        [[[FIRST, SECOND]]] if num_ranks == 1 else [[[FIRST]], [[SECOND]]],
        Samples(),
        pad,
        accumulate=2 // num_ranks,
        count=lambda batch: 257.0 if is_first(batch) else 255.0,
        **in_precision(strategy, precision),
    )
    return float(-done.final[0])


def clipped(strategy: str, num_ranks: int) -> dict[str, Any]:
    """Three updates, each of the same eight samples, however many ranks share them."""
    norms = Norms()
    done = fit(
        Model(is_sharded=strategy == "fsdp2"),
        strategy,
        [[shard] * 3 for shard in GLOBAL_BATCH[num_ranks]],
        Samples(),
        pad,
        accumulate=MICRO_BATCHES[num_ranks],
        gradient_clip_val=CLIP,
        callbacks=[norms],
    )
    steps = [[(number, 0, ids) for number, ids in enumerate(done.windows)]]
    return {
        "norms": norms.norms,
        "error": done.error(reference(steps, 1, CLIP), _flat(make_network())),
        "spread": done.spread,
        "updates": len(done.windows),
        "idle": sum(map(sum, done.is_idle)),
    }


def reference_norms() -> list[float]:
    """Of the updates of `clipped`, in one process and float64."""
    network = make_network(torch.float64)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9)
    norms = []
    for _ in range(3):
        batches = [pad([Samples()[index]]) for index in GLOBAL_BATCH[1][0]]
        count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        optimizer.zero_grad()
        (sum(token_losses(network, batch, "sum") for batch in batches) / count).backward()
        norms.append(float(nn.utils.clip_grad_norm_(network.parameters(), CLIP)))
        optimizer.step()
    return norms


def overflow(strategy: str, num_ranks: int) -> dict[str, Any]:
    """Five batches, one of them with an infinite gradient: in float16 with a scaler, or under ZeRO, whose engine looks, too."""
    summary = RunSummary()
    torch.manual_seed(0)
    module = Overflowing(config=TINY, lr=0.1, schedule_samples=5 * num_ranks, min_lr_ratio=0.5)
    shards = [[[0, 1, 4, 10, 13]], [[0, 1, 4, 10, 13]]][:num_ranks]
    options = in_precision(strategy, "32-true" if strategy.startswith("zero") else "16-mixed")
    done = fit(module, strategy, shards, Samples(), pad_with_mask, callbacks=[summary], **options)
    return {
        "steps": summary.figures["steps"],
        "updates": summary.figures["updates"],
        "samples": schedule_of(done.trainer).samples,
        "lr": done.trainer.optimizers[0].param_groups[0]["lr"],
        "spread": done.spread,
        "is_finite": bool(done.final.isfinite().all()),
    }


def on_gpu(strategy: str) -> dict[str, Any]:
    """16-mixed on one GPU, where Lightning and DeepSpeed have it, with a scale that overflows nowhere here."""
    made = make(strategy)
    options: dict[str, Any] = {"precision": "16-mixed"}
    if strategy.startswith("zero"):
        made.initial_scale_power = 8
    else:
        options = {"plugins": [MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cuda", init_scale=256.0))]}
    done = fit(InFloat32(), made, SHARDS[1], Samples(), pad, accumulate=ACCUMULATE, accelerator="gpu", **options)
    steps = [[(0, ACCUMULATE * number, ids) for number, ids in enumerate(done.windows)]]
    return {"error": done.error(reference(steps, ACCUMULATE, None), _flat(make_network()))}
