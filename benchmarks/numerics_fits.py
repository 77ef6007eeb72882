"""Fits of odb_lightning under Lightning's trainer for the numerics page, run by each rank; numerics.py starts them.

`gradients`: the error of each update's gradient. `curves`: the training loss of each update, on groups given beforehand.
Rank 0 writes what all ranks did as JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from measuring import leave, of_all_ranks
from numerics_reference import Network, Reference, Sample, Samples, flat, network_for, num_targets, pad

from odb_lightning import ODBDataLoader, ODBDDPStrategy, ODBSingleDeviceStrategy

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # at first: a trainer's end takes them
L_MAX, BUFFER_SIZE = 1024, 64
SGD_RATE, SGD_MOMENTUM, ADAM_RATE = 0.1, 0.9, 2e-3
_SECONDS = timedelta(seconds=240)


def shards_of(name: str, num_samples: int, world_size: int) -> list[list[int]]:
    """Equal ones, or unequal: the first rank has three quarters, so that the other is idle for many steps."""
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(1)).tolist()
    if name == "equal":
        return [order[rank::world_size] for rank in range(world_size)]
    cut = 3 * num_samples // 4
    return [order[:cut], order[cut:]]


class Module(lightning.LightningModule):
    """Returns the mean over its batch's targets, as modules do, and knows nothing of the loader. Remembers its losses."""

    def __init__(self, network: Network, rate: float | None = None) -> None:
        super().__init__()
        self.network = network
        self.rate = rate
        self.losses: list[dict[str, Any]] = []

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        loss = self.network.mean_loss(batch)
        info = self.trainer.strategy.step_info
        targets = 0 if info.is_idle else num_targets(batch)
        self.losses.append({"epoch": info.epoch, "step": info.step, "sum": loss.item() * targets, "targets": targets})
        self.losses[-1] |= {"ids": list(info.sample_ids), "is_idle": info.is_idle}
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.rate is None:
            return torch.optim.SGD(self.parameters(), lr=SGD_RATE, momentum=SGD_MOMENTUM)
        return torch.optim.AdamW(self.parameters(), lr=self.rate)


class Errors(lightning.Callback):
    """Compares each update's gradient with the right one."""

    def __init__(self, samples: Samples, accumulate: int) -> None:
        self.reference = Reference(samples)
        self.accumulate = accumulate
        self.errors: list[float | None] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        last = pl_module.losses[-1]
        window = (last["epoch"], last["step"] // self.accumulate)
        mine = [step["ids"] for step in pl_module.losses if (step["epoch"], step["step"] // self.accumulate) == window]
        sample_ids = [index for ranks in of_all_ranks(mine) for step in ranks for index in step]
        if trainer.is_global_zero:
            self.errors.append(self.reference.error(pl_module.network, sample_ids))


def fit(module: Module, loader: ODBDataLoader, callbacks: Sequence[Any] = (), **options: Any) -> None:
    scaling = options.pop("loss_scaling", "token")
    if WORLD_SIZE == 1:
        strategy: Any = ODBSingleDeviceStrategy(device="cpu", loss_scaling=scaling)
    else:
        strategy = ODBDDPStrategy(loss_scaling=scaling, timeout=_SECONDS)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=WORLD_SIZE, callbacks=list(callbacks), **quiet, **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader)


def gradient_errors(
    samples: Samples, shards: str, accumulate: int, precision: str, loss_scaling: str, l_max: int = L_MAX
) -> dict[str, Any]:
    """Of one epoch with ODB's own batches."""
    module, errors = Module(network_for(samples)), Errors(samples, accumulate)
    loader = ODBDataLoader(
        samples,
        l_max=l_max,
        collate_fn=pad,
        sampler=shards_of(shards, len(samples), WORLD_SIZE)[RANK],
        buffer_size=BUFFER_SIZE,
        num_workers=0,
    )
    options = {"precision": precision, "loss_scaling": loss_scaling, "accumulate_grad_batches": accumulate, "max_epochs": 1}
    fit(module, loader, [errors], **options)
    ranks = of_all_ranks([step["is_idle"] for step in module.losses])
    return {
        "loader": "odb_lightning",
        "mode": loss_scaling,
        "precision": precision,
        "shards": shards,
        "k": accumulate,
        "steps": len(ranks[0]),
        "idle_steps": sum(map(sum, ranks)),
        "trained": sum(len(step) for ids in of_all_ranks([step["ids"] for step in module.losses]) for step in ids),
        "errors": errors.errors,
    }


class Groups(torch.utils.data.Dataset[list[Sample]]):
    """An item is a whole group."""

    def __init__(self, samples: Samples, groups: list[list[int]]) -> None:
        self.samples = samples
        self.groups = groups

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> list[Sample]:
        return [self.samples[position] for position in self.groups[index]]


def pad_group(items: list[list[Sample]]) -> Sample:
    (group,) = items
    return pad(group)


def _whole_budget(_: Any) -> int:
    return L_MAX


def loss_curve(samples: Samples, groups: list[list[int]], per_update: int, max_epochs: int, precision: str) -> dict[str, Any]:
    """The training loss of each update of `per_update` groups over all ranks and micro-batches, and the final weights.

    The loader gets the groups in their order: each fills the budget, and its window holds one.
    """
    module = Module(network_for(samples), rate=ADAM_RATE)
    loader = ODBDataLoader(
        Groups(samples, groups),
        l_max=L_MAX,
        length_fn=_whole_budget,
        collate_fn=pad_group,
        sampler=list(range(len(groups)))[RANK::WORLD_SIZE],
        buffer_size=1,
        num_workers=0,
    )
    fit(
        module,
        loader,
        precision=precision,
        accumulate_grad_batches=per_update // WORLD_SIZE,
        max_epochs=max_epochs,
    )
    windows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for steps in of_all_ranks(module.losses):
        for step in steps:
            windows.setdefault((step["epoch"], step["step"] * WORLD_SIZE // per_update), []).append(step)
    updates = [steps for _, steps in sorted(windows.items())]
    return {
        "world_size": WORLD_SIZE,
        "k": per_update // WORLD_SIZE,
        "precision": precision,
        "losses": [sum(step["sum"] for step in steps) / sum(step["targets"] for step in steps) for steps in updates],
        "samples": [sorted(index for step in steps for group in step["ids"] for index in groups[group]) for steps in updates],
        "idle_steps": sum(step["is_idle"] for steps in updates for step in steps),
        "weights": flat(module.network.parameters()),
    }


def reference_curve(samples: Samples, groups: list[list[int]], per_update: int, max_epochs: int) -> dict[str, Any]:
    """The same updates in float64 without loader, trainer, ranks or padding."""
    reference = Reference(samples)
    optimizer = torch.optim.AdamW(reference.network.parameters(), lr=ADAM_RATE)
    losses, updates = [], [groups[begin : begin + per_update] for begin in range(0, len(groups), per_update)]
    for update in updates * max_epochs:
        losses.append(reference.backward(index for group in update for index in group))
        optimizer.step()
    return {"losses": losses, "weights": flat(reference.network.parameters())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("gradients", "curves"))
    parser.add_argument("--samples", type=Path, required=True, help="written by Samples.save")
    parser.add_argument("--cells", type=json.loads, required=True, help="arguments of each fit, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="for rank 0")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    samples = Samples.load(options.samples)
    run = gradient_errors if options.what == "gradients" else loss_curve
    found = [run(samples, **cell) for cell in options.cells]
    if RANK == 0:
        torch.save(found, options.out)
    if dist.is_initialized():
        dist.barrier()
    leave()


if __name__ == "__main__":
    main()
