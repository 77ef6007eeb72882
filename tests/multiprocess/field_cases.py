"""What the ranks of tests/multiprocess/test_field_cases.py do."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Literal

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchmetrics import CatMetric, MeanMetric, Metric
from torchmetrics.utilities.data import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from odb_lightning import ODBDataLoader, ODBDataModule, ODBDDPStrategy, ODBDeepSpeedStrategy
from odb_lightning.data import PadCollator
from odb_lightning.models import CausalLM
from tests.loader_data import IGNORED, Lengths, collate, pad
from tests.multiprocess.evaluation_cases import TINY
from tests.multiprocess.fitting import Shard, fit, make
from tests.multiprocess.trainers import make_trainer, schedule_of
from tests.multiprocess.training_cases import LEARNING_RATE, MOMENTUM

GROUP_SECONDS = 6
"""Of the training's own process group."""
SLOW_SECONDS = 9


class Model(lightning.LightningModule):
    """Notes the samples it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 64)
        self.ids: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        step = self.trainer.strategy.step_info  # type: ignore[attr-defined]
        self.ids += step.sample_ids
        logits = self.embedding(batch["input_ids"] % 64)[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten() % 64)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class UsersModule(lightning.LightningDataModule):
    """A project as it was before: counts how often it is asked for its loader."""

    def __init__(self, batch_size: int | None) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.calls = 0

    def train_dataloader(self) -> DataLoader[Any]:
        self.calls += 1
        dataset: Any = Lengths([4] * 12)
        if self.batch_size is None:
            return DataLoader(dataset, batch_size=None, collate_fn=collate)
        return DataLoader(dataset, batch_size=self.batch_size, shuffle=True, collate_fn=collate)


class SlowToBegin(Dataset[Any]):
    """Its first 16 samples take `SLOW_SECONDS` in all."""

    def __init__(self) -> None:
        self.samples = Lengths([4] * 40)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        time.sleep(SLOW_SECONDS / 8 if index < 16 and index % 2 else 0.0)
        return self.samples[index]


def _fit(strategy: Any, datamodule: Any) -> list[int]:
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(strategy).fit(model, datamodule=datamodule)
    return model.ids


def existing_project(stage: int | None, batch_size: int | None) -> dict[str, Any]:
    """Two lines move it: with DDP, or ZeRO of a stage."""
    limit = timedelta(seconds=40)
    strategy = ODBDDPStrategy(timeout=limit) if stage is None else ODBDeepSpeedStrategy(stage=stage, timeout=limit)
    datamodule: Any = ODBDataModule.from_datamodule(UsersModule(batch_size), l_max=8, num_workers=0)
    return {"ids": _fit(strategy, datamodule), "calls": datamodule.calls}


def slow_first_fill() -> list[int]:
    """Rank 1 alone has the slow samples, the odd ones, and needs them all for its first window."""
    datamodule = ODBDataModule(
        SlowToBegin(), l_max=8, collate_fn=collate, shuffle=False, buffer_size=16, num_workers=1, multiprocessing_context="fork"
    )
    return _fit(ODBDDPStrategy(timeout=timedelta(seconds=GROUP_SECONDS)), datamodule)


LIMIT = timedelta(seconds=40)


def _loader(dataset: Any, shards: list[list[int]], l_max: int, **options: Any) -> ODBDataLoader:
    """Of this rank's shard."""
    shard = shards[int(os.environ["RANK"])]
    defaults: dict[str, Any] = {"num_workers": 0, "num_supervised_fn": "causal", "collate_fn": collate}
    return ODBDataLoader(dataset, l_max=l_max, sampler=shard, **(defaults | options))


def _run(function: Any, *arguments: Any, **options: Any) -> Any:
    """Of a trainer, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments, **options)


# --- C21 ---


class Listed(Metric):
    """Keeps what it is given, in a list that is concatenated over the ranks or not."""

    def __init__(self, reduction: Literal["cat"] | None, kept: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx=reduction)
        self.kept = kept

    def update(self, ids: Tensor) -> None:
        self.values += self.kept(ids)

    def compute(self) -> Tensor:
        return dim_zero_cat(self.values)


LISTS: dict[str, tuple[Literal["cat"] | None, Callable[[Tensor], list[Tensor]]]] = {
    "integers": ("cat", lambda ids: [ids]),
    "scalars": ("cat", lambda ids: list(ids)),
    "not concatenated": (None, lambda ids: [ids]),
    "scalars, not concatenated": (None, lambda ids: list(ids)),
    "two each time, not concatenated": (None, lambda ids: [ids, torch.zeros(0, dtype=torch.int64)]),
}


class SyncsMore(Listed):
    """Has a method of its own for the sync of lists, as some of torchmetrics' have, and goes through the one it overrides."""

    def _sync_dist(self, dist_sync_fn: Any = gather_all_tensors, process_group: Any = None) -> None:
        super()._sync_dist(dist_sync_fn, process_group)


NOT_CONCATENATED = LISTS["not concatenated"]
LATER_LISTS = ["of a subclass", "made anew"]


class Measured(lightning.LightningModule):
    """Metrics of the usual kinds, computed by the user at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.lists = nn.ModuleDict({"floats": CatMetric()} | {name: Listed(*kind) for name, kind in LISTS.items()})
        self.lists["of a subclass"] = SyncsMore(*NOT_CONCATENATED)

    def on_validation_epoch_start(self) -> None:
        self.lists["made anew"] = Listed(*NOT_CONCATENATED)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        ids = batch["input_ids"][:, 0]
        self.mean.update(ids.float())
        self.log("mean", self.mean)
        for listed in self.lists.values():
            listed.update(ids)

    def on_validation_epoch_end(self) -> None:
        self.ids = {name: sorted(listed.compute().tolist()) for name, listed in self.lists.items()}
        self.held = {name: [value.dim() for value in listed.values] for name, listed in self.lists.items() if name != "floats"}


def metrics(shards: list[list[int]]) -> dict[str, Any]:
    """No two samples fit into a group."""
    module, trainer = Measured(), make_trainer(ODBDDPStrategy(timeout=LIMIT))
    (logged,) = _run(trainer.validate, module, _loader(Lengths([4] * 8), shards, 4), verbose=False)
    return {"mean": logged["mean"], "ids": module.ids, "held": module.held}


# --- C14 ---

GPT2 = {"model_type": "gpt2", "vocab_size": 17, "n_embd": 16, "n_layer": 2, "n_head": 2}
"""Positions are absolute."""


class Sentences(Lengths):
    """Each sample has tokens of its own, and the first is no target wherever it stands."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = self.lengths[index]
        ids = (torch.arange(length) * 5 + index * 3) % 16 + 1
        return {"input_ids": ids, "labels": torch.where(torch.arange(length) < self.masked, IGNORED, ids)}


class PaddedOnTheLeft(CausalLM):
    """Of a user who says where the tokens stand."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.masks: list[Any] = []
        self.positions: list[Any] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
        self.masks.append(attention_mask.tolist())
        self.positions.append(positions.tolist())
        options = {"attention_mask": attention_mask, "position_ids": positions, "use_cache": False}
        return self.model(input_ids=input_ids, **options).logits  # type: ignore[no-any-return]


def pad_on_the_left(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    def turned(name: str, value: int) -> Tensor:
        return pad([sample[name].flip(0) for sample in samples], value).flip(1)

    ones = [torch.ones_like(sample["input_ids"]) for sample in samples]
    return {
        "input_ids": turned("input_ids", 0),
        "labels": turned("labels", IGNORED),
        "attention_mask": pad(ones).flip(1),
    }


PAIR = [3, 5, 6]
"""The longest of a window is a group of its own."""


def group_mates() -> dict[str, Any]:
    """The loss of each sample grouped, and alone; and the group of two as it is padded on the left."""
    results: dict[str, Any] = {}
    for side, cls, collate_fn in (("right", CausalLM, PadCollator(0)), ("left", PaddedOnTheLeft, pad_on_the_left)):
        torch.manual_seed(0)
        module: Any = cls(config=GPT2)
        for name, max_rows in (("grouped", None), ("alone", 1)):
            options: dict[str, Any] = {"collate_fn": collate_fn, "max_rows": max_rows, "alignment": "paper", "shuffle": False}
            loader = _loader(Sentences(PAIR), [[0, 1, 2]], 12, **options)
            predictions = _run(make_trainer("odb", devices=1).predict, module, loader)
            losses = zip(_joined(predictions, "sample_ids"), _joined(predictions, "loss"), strict=True)
            results[f"{side}, {name}"] = [float(loss) for _, loss in sorted(losses)]
            results[f"{side}, {name}, groups"] = [prediction["sample_ids"] for prediction in predictions]
            if side == "left" and name == "grouped":
                results["mask"], results["positions"] = module.masks, module.positions
    return results


def _joined(predictions: Iterable[dict[str, Any]], name: str) -> list[Any]:
    return [value for prediction in predictions for value in prediction[name]]


# --- C18 ---

CHUNK = 256
TEXT, IMAGE = "text", "image"
MIXED: list[tuple[str, int]] = [(TEXT, 10), (TEXT, 10), (IMAGE, 300), (TEXT, 65), (IMAGE, 321)]
MIXED_SHARDS: list[Shard] = [[[0, 1], [3], [3], []], [[2], [4], [], [4]]]
"""By epoch: two short texts against an image, 64 targets against 320, a text against none, and none against an image. Each rank
is idle with what the other has not."""
WIDTH = 8


class Mixed(Dataset[Any]):
    def __len__(self) -> int:
        return len(MIXED)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        kind, length = MIXED[index]
        ids = (torch.arange(length) * 5 + index * 3) % 16 + 1
        return {"input_ids": ids, "labels": ids} | ({"pixels": torch.ones(WIDTH) * (index + 1)} if kind == IMAGE else {})


def collate_mixed(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """With `pixels` only if there is an image."""
    images = [sample["pixels"] for sample in samples if "pixels" in sample]
    batch = {"input_ids": pad([sample["input_ids"] for sample in samples])}
    batch["labels"] = pad([sample["labels"] for sample in samples], IGNORED)
    return batch | ({"pixels": torch.stack(images)} if images else {})


class Modal(lightning.LightningModule):
    """Its parts are run alike on all ranks, as ZeRO-3 wants them: the tower on no image, too, and the head on as many chunks as
    the active rank with most of them has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.tower = nn.Embedding(17, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 17)
        self.batches: list[dict[str, Any]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        targets = int((batch["labels"][:, 1:] != IGNORED).sum())
        num_chunks = -(-targets // CHUNK)
        most = int(strategy.reduce(torch.tensor(float(num_chunks)), reduce_op="max"))
        self.batches.append({"targets": targets, "has_image": "pixels" in batch, "chunks": num_chunks, "ran": most})
        return self.total(batch, most) / targets

    def total(self, batch: dict[str, Tensor], num_chunks: int) -> Tensor:
        """The sum over the targets."""
        hidden = self.embedding(batch["input_ids"])
        pixels = batch.get("pixels")
        seen = self.tower(hidden.new_zeros(1, WIDTH) if pixels is None else pixels.to(hidden.dtype))
        hidden = hidden + (0.0 * seen.sum() if pixels is None else seen.sum(0))
        is_target = batch["labels"][:, 1:] != IGNORED
        rows, targets = self.norm(hidden)[:, :-1][is_target], batch["labels"][:, 1:][is_target]
        chunks = [slice(number * CHUNK, (number + 1) * CHUNK) for number in range(num_chunks)]
        return torch.stack([cross_entropy(self.head(rows[part]), targets[part], reduction="sum") for part in chunks]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def modalities(strategy: str) -> dict[str, Any]:
    module = Modal()
    initial = torch.cat([parameter.detach().flatten().clone() for parameter in Modal().parameters()])
    done = fit(module, strategy, MIXED_SHARDS, Mixed(), collate_mixed, l_max=321)
    reference: Any = Modal().double()
    optimizer = reference.configure_optimizers()
    for window in done.windows:
        batches = [collate_mixed([Mixed()[index]]) for index in window]
        targets = sum(len(batch["labels"][0]) - 1 for batch in batches)
        optimizer.zero_grad()
        (sum(reference.total(batch, 2) for batch in batches) / targets).backward()
        optimizer.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in reference.parameters()])
    return {
        "error": done.error(expected, initial),
        "spread": done.spread,
        "is_idle": done.is_idle,
        "batches": module.batches,
    }


# --- C27 ---

MULTIPLE = 64
NUM_SHAPES, ROWS = 30, 4


class Compiled(lightning.LightningModule):
    """Compiled for each shape anew; counts how often."""

    def __init__(self, is_compiled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        network: Any = nn.Sequential(nn.Embedding(17, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 17))
        self.num_graphs = 0
        self.network = torch.compile(network, backend=self._count, dynamic=False) if is_compiled else network
        self.shapes: list[tuple[int, ...]] = []
        self.losses: list[float] = []

    def _count(self, graph: Any, example_inputs: Any) -> Any:
        self.num_graphs += 1
        return graph.forward

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.shapes.append(tuple(batch["input_ids"].shape))
        loss = cross_entropy(self.network(batch["input_ids"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def compiled() -> dict[str, Any]:
    """Each rank has a sample of each of 120 lengths. Eager without the multiple, and compiled with it."""
    lengths = [20 + index for index in range(NUM_SHAPES * ROWS)] * 2
    shards = [list(range(NUM_SHAPES * ROWS)), list(range(NUM_SHAPES * ROWS, len(lengths)))]
    results = {}
    for name, is_compiled, multiple in (("eager", False, None), ("compiled", True, MULTIPLE)):
        module = Compiled(is_compiled)
        collator = PadCollator(0, pad_to_multiple_of=multiple)
        loader = _loader(Sentences(lengths), shards, 192 * ROWS, collate_fn=collator, max_rows=ROWS, buffer_size=256)
        _run(make_trainer(ODBDDPStrategy(timeout=LIMIT)).fit, module, loader)
        results[name] = {"graphs": module.num_graphs, "shapes": sorted(set(module.shapes)), "losses": module.losses}
    return results


# --- C52 ---

NUM_SAMPLES, WARM_UP, LAST = 64, 20, 0.1
SCHEDULES = [(l_max, accumulate) for l_max in (256, 1024) for accumulate in (1, 2)]


class Scheduled(CausalLM):
    """Notes after how many samples each learning rate was stepped with."""

    def __init__(self) -> None:
        config = TINY | {"num_hidden_layers": 1}
        super().__init__(config=config, lr=1.0, schedule_samples=NUM_SAMPLES, warmup_samples=WARM_UP, min_lr_ratio=LAST)
        self.updates: list[tuple[int, float]] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        self.updates.append((schedule_of(self.trainer).samples, optimizer.param_groups[0]["lr"]))


def schedules(num_ranks: int) -> list[dict[str, Any]]:
    """A fit of an epoch for each budget and accumulation."""
    lengths = [60 + index * 37 % 190 for index in range(NUM_SAMPLES)]
    results = []
    for l_max, accumulate in SCHEDULES:
        module = Scheduled()
        data = ODBDataModule(Sentences(lengths), l_max=l_max, collate_fn=PadCollator(0), num_workers=0)
        options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "devices": num_ranks}
        trainer = make_trainer(make("ddp"), **options)
        _run(trainer.fit, module, datamodule=data)
        results.append(
            {
                "updates": module.updates,
                "samples": schedule_of(trainer).samples,
                "last": trainer.optimizers[0].param_groups[0]["lr"],
                "global_step": trainer.global_step,
                "world_size": dist.get_world_size(),
            }
        )
    return results
