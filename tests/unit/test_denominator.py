"""`denominator="strategy"` on one device, and the stand-ins of a module with BatchNorm. On ranks: tests/multiprocess."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from odb_lightning import IDLE_DATA, ODBBatch, ODBDataLoader, ODBSingleDeviceStrategy, StepInfo
from odb_lightning.strategies.denominator import WindowCounts
from odb_lightning.strategies.idle import enough_for_batch_norm

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

SIZES = [1, 3, 2, 5, 4]


def make_batch(size: int) -> dict[str, Tensor]:
    """Of `size` rows, with a target in each, and two in the first."""
    labels = torch.full((size, 4), -100)
    labels[:, 2] = 1
    labels[0, 3] = 1
    return {"input_ids": torch.full((size, 4), size), "labels": labels}


class Batches(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([make_batch(size) for size in SIZES])


def sized(batches: list[Any] | None = None) -> DataLoader[Any]:
    return DataLoader(batches or [make_batch(size) for size in SIZES], batch_size=None)  # type: ignore[arg-type]


def unsized() -> DataLoader[Any]:
    return DataLoader(Batches(), batch_size=None)


class Model(lightning.LightningModule):
    """The gradient of its loss is 1 for each target, whatever the batch; remembers those of the updates."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.infos: list[StepInfo] = []
        self.gradients: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.infos.append(self.trainer.strategy.step_info)
        return self.weight * 1.0

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(self.weight.grad.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model: Model, loader: Any, folder: Path, ckpt_path: Any = None, **options: Any) -> lightning.Trainer:
    strategy_options = options.pop("strategy", {})
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "strategy": ODBSingleDeviceStrategy(denominator="strategy", **strategy_options),
    }
    trainer = lightning.Trainer(**(defaults | options))
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer


def windows(model: Model) -> list[tuple[int, int, int | float, int]]:
    return [(info.step, info.num_samples, info.window_num_tokens_supervised, info.window_num_samples) for info in model.infos]


@pytest.mark.parametrize("loader", [sized, unsized])
def test_windows_are_counted_ahead_the_short_last_one_too(loader: Any, tmp_path: Path) -> None:
    model = Model()
    trainer = fit(model, loader(), tmp_path, accumulate_grad_batches=2)
    assert windows(model) == [(0, 1, 6, 4), (1, 3, 6, 4), (2, 2, 9, 7), (3, 5, 9, 7), (4, 4, 5, 4)]
    assert model.gradients == pytest.approx([1.0] * 3), "also of the last window, of one micro-batch"
    assert trainer.global_step == 3


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (3, [(0, 1, 6, 4), (1, 3, 6, 4), (2, 2, 3, 2)]),
        (0.4, [(0, 1, 6, 4), (1, 3, 6, 4)]),
        (1.0, [(0, 1, 6, 4), (1, 3, 6, 4), (2, 2, 9, 7), (3, 5, 9, 7), (4, 4, 5, 4)]),
    ],
)
def test_batches_after_the_trainers_limit_are_not_counted(limit: Any, expected: Any, tmp_path: Path) -> None:
    model = Model()
    fit(model, sized(), tmp_path, accumulate_grad_batches=2, limit_train_batches=limit)
    assert windows(model) == expected


def test_windows_after_a_resume_inside_of_one_begin_where_the_trainers_do(tmp_path: Path) -> None:
    """Lightning begins such a loader anew, and trains the number of steps that is left."""
    saves = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=1, filename="{step}")
    options: dict[str, Any] = {"accumulate_grad_batches": 3}
    fit(Model(), sized(), tmp_path, enable_checkpointing=True, callbacks=[saves], **options)
    resumed = Model()
    fit(resumed, sized(), tmp_path, ckpt_path=tmp_path / "step=1.ckpt", **options)
    assert windows(resumed) == [(3, 1, 6, 4), (4, 3, 6, 4)]
    assert resumed.gradients == pytest.approx([1.0])


def test_a_resume_between_epochs_begins_with_a_whole_window(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
    options: dict[str, Any] = {"accumulate_grad_batches": 2}
    fit(Model(), unsized(), tmp_path, enable_checkpointing=True, callbacks=[saves], **options)
    resumed = Model()
    fit(resumed, unsized(), tmp_path, ckpt_path=tmp_path / "last.ckpt", max_epochs=2, **options)
    assert [(info.epoch, info.step) for info in resumed.infos] == [(1, step) for step in range(5)]
    assert resumed.gradients == pytest.approx([1.0] * 3)


def test_the_default_rule_says_where_it_may_be_wrong(tmp_path: Path) -> None:
    shifted = {"input_ids": torch.ones(2, 3), "labels": torch.ones(2, 3)}
    with pytest.warns(UserWarning, match="num_supervised_fn='unshifted'"):
        fit(Model(), sized([shifted]), tmp_path)
    model = Model()
    fit(model, sized([shifted]), tmp_path, strategy={"num_supervised_fn": "unshifted"})
    assert model.infos[0].num_tokens_supervised == 6


def test_without_labels_samples_count(tmp_path: Path) -> None:
    model = Model()
    fit(model, sized([{"x": torch.ones(3, 2)}, {"x": torch.ones(2, 2)}]), tmp_path, accumulate_grad_batches=2)
    assert windows(model) == [(0, 3, 5, 5), (1, 2, 5, 5)]


def test_a_batch_without_a_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="collate_fn return tensors"):
        fit(Model(), sized([{"text": "a"}]), tmp_path)


def test_several_loaders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='one loader with denominator="strategy", but there are 2'):
        fit(Model(), [sized(), sized()], tmp_path)


def test_a_rule_of_the_strategys_is_ignored_for_a_loader_that_counts(tmp_path: Path) -> None:
    samples = [make_batch(1) for _ in range(4)]
    loader = ODBDataLoader(
        samples,
        l_max=8,
        num_workers=0,
        length_fn=lambda sample: sample["labels"].shape[1],
        collate_fn=lambda chosen: {key: torch.cat([sample[key] for sample in chosen]) for key in chosen[0]},
        num_supervised_fn=lambda batch: 7 * len(batch["labels"]),
    )
    model = Model()
    with pytest.warns(UserWarning, match="the strategy's num_supervised_fn is ignored"):
        fit(model, loader, tmp_path, strategy={"num_supervised_fn": "unshifted"})
    assert [info.num_tokens_supervised for info in model.infos] == [14, 14]


def info(**changes: Any) -> StepInfo:
    one = StepInfo(
        epoch=0,
        step=0,
        is_idle=False,
        sample_ids=("a", "b"),
        num_samples=2,
        num_tokens_real=6,
        num_tokens_padded=8,
        num_tokens_supervised=3,
        max_length=4,
        global_num_samples=0,
        global_num_tokens_supervised=0,
        window_num_tokens_supervised=0,
        window_num_samples=0,
    )
    return replace(one, **changes)


def test_what_a_loader_knows_of_its_batches_is_kept_and_summed() -> None:
    batches = [ODBBatch("x", info()), ODBBatch("y", info(num_tokens_supervised=1.5))]
    counted = list(WindowCounts("causal").batches(batches, epoch=2, first_step=0, accumulate=2, limit=9, timeout=None))
    assert [batch.data for batch in counted] == ["x", "y"]
    assert counted[1].step == info(
        epoch=2,
        step=1,
        num_tokens_supervised=1.5,
        global_num_samples=2,
        global_num_tokens_supervised=1.5,
        window_num_tokens_supervised=4.5,
        window_num_samples=4,
        accumulate=2,
    )


def test_no_more_than_a_window_is_drawn_ahead() -> None:
    drawn: list[int] = []

    def source() -> Iterator[dict[str, Tensor]]:
        for size in SIZES:
            drawn.append(size)
            yield make_batch(size)

    batches = WindowCounts("causal").batches(source(), epoch=0, first_step=0, accumulate=2, limit=9, timeout=None)
    next(batches)
    assert len(drawn) == 2
    next(batches)
    assert len(drawn) == 2
    assert len(list(batches)) == 3


def test_the_multiplier_of_a_sum_is_that_of_a_mean_without_its_number() -> None:
    step = info(world_size=2, accumulate=3, window_num_tokens_supervised=12, window_num_samples=8)
    assert step.loss_multiplier() == 2 * 3 * 3 / 12
    assert step.loss_multiplier(reduction="sum") == 2 * 3 / 12
    assert step.loss_multiplier("sample", "sum") == 2 * 3 / 8
    assert info(num_tokens_supervised=0, window_num_tokens_supervised=12).loss_multiplier("token", "sum") == 0.0


@dataclass
class Fields:
    values: Tensor
    name: str


@dataclass(frozen=True)
class Frozen:
    values: Tensor
    nested: dict[str, Any]
    length: int = field(init=False, default=2)


def test_a_stand_in_for_a_batch_norm_has_two_rows_wherever_its_tensors_are() -> None:
    stand_in = {
        "ids": torch.tensor([[1, 2]]),
        "nested": [torch.ones(1, 2, 3), (torch.ones(1), "text")],
        "fields": Fields(torch.ones(1, 2), "a"),
        "frozen": [Frozen(torch.ones(1, 2), {"more": torch.ones(1)})],
        "scalar": torch.tensor(3.0),
        "of another length": torch.ones(5),
    }
    idle = ODBBatch(IDLE_DATA, info(is_idle=True), stand_in)
    real = ODBBatch({"ids": torch.ones(1, 2)}, info())
    modules = {
        "BatchNorm": nn.Sequential(nn.BatchNorm2d(3)),
        "lazy": nn.LazyBatchNorm1d(),
        "none": nn.Sequential(nn.GroupNorm(1, 3), nn.InstanceNorm1d(3)),
    }
    assert list(enough_for_batch_norm(iter([idle]), modules["none"])) == [idle]
    doubled, same = enough_for_batch_norm(iter([idle, real]), modules["BatchNorm"])
    assert same is real
    assert (doubled.data, doubled.step) == (IDLE_DATA, idle.step)
    assert doubled.stand_in["ids"].tolist() == [[1, 2], [1, 2]]
    assert doubled.stand_in["nested"][0].shape == (2, 2, 3)
    assert doubled.stand_in["nested"][1][0].shape == (2,)
    assert doubled.stand_in["fields"].values.shape == (2, 2)
    (frozen,) = doubled.stand_in["frozen"]
    assert (frozen.values.shape, frozen.nested["more"].shape, frozen.length) == ((2, 2), (2,), 2)
    assert doubled.stand_in["scalar"].shape == ()
    assert doubled.stand_in["of another length"].shape == (5,)
    (lazy,) = enough_for_batch_norm(iter([idle]), modules["lazy"])
    assert lazy.stand_in["ids"].shape == (2, 2)
