"""What went wrong for people elsewhere, on real ranks: rows of a list of cases that no other file holds."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from odb_lightning import ODBDataLoader, ODBDataModule
from odb_lightning.callbacks.progress import Progress
from tests.loader_data import Lengths, collate
from tests.multiprocess.field_cases import (
    CHUNK,
    LAST,
    LATER_LISTS,
    LISTS,
    MULTIPLE,
    NUM_SAMPLES,
    NUM_SHAPES,
    ROWS,
    SCHEDULES,
    WARM_UP,
)
from tests.multiprocess.ranks import run_ranks
from tests.multiprocess.trainers import make_trainer

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


@pytest.mark.parametrize(("batch_size", "stage"), [(2, None), (None, 2)])
def test_an_existing_project_is_dealt_out_once(tmp_path: Path, batch_size: int | None, stage: int | None) -> None:
    """C24, C25: twelve samples are twelve in all, and the user's loader is built once a rank."""
    results = run_ranks("tests.multiprocess.field_cases:existing_project", 2, tmp_path, stage=stage, batch_size=batch_size)
    assert sorted(index for result in results for index in result.value["ids"]) == list(range(12))
    assert [result.value["calls"] for result in results] == [1, 1]


def test_a_slow_first_window_does_not_exhaust_the_patience_of_the_training(tmp_path: Path) -> None:
    """C23"""
    results = run_ranks("tests.multiprocess.field_cases:slow_first_fill", 2, tmp_path)
    assert sorted(index for result in results for index in result.value) == list(range(40))


@pytest.mark.parametrize(("oversize", "seen", "dropped"), [("emit", [0, 1, 2], {}), ("drop", [1, 2], {"oversize": 1})])
def test_a_sample_over_the_budget_in_validation(oversize: str, seen: list[int], dropped: dict[str, int]) -> None:
    """C01"""
    groups: list[list[int]] = []

    class Validated(lightning.LightningModule):
        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            groups.append(batch["input_ids"][:, 0].tolist())

    lengths = [513, 10, 10]
    datamodule = ODBDataModule(
        val_dataset=Lengths(lengths),
        l_max=512,
        collate_fn=collate,
        oversize=oversize,
        num_workers=0,
        multiprocessing_context="fork",
    )
    trainer = lightning.Trainer(strategy="odb", accelerator="cpu", logger=False, enable_progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.validate(Validated(), datamodule=datamodule, verbose=False)
    assert sorted(index for group in groups for index in group) == seen
    assert [0] in groups or oversize == "drop", "alone"
    assert datamodule.val_loader is not None
    stats = datamodule.val_loader.stats
    assert (stats.over_budget, stats.dropped) == (int(oversize == "emit"), dropped)


SHARDS = [[[0, 1, 2, 3, 4], [5, 6, 7]], [list(range(8)), []], [[], list(range(8))], [[0, 2, 4, 6], [1, 3, 5, 7]]]


@pytest.mark.parametrize("shards", SHARDS, ids=["5 and 3", "8 and 0", "0 and 8", "4 and 4"])
def test_metrics_of_ranks_with_unequal_validation_data_see_each_sample_once(tmp_path: Path, shards: list[list[int]]) -> None:
    """C21: a mean, and lists of all values. Each rank has its own again afterwards."""
    for shard, result in zip(
        shards, run_ranks("tests.multiprocess.field_cases:metrics", 2, tmp_path, shards=shards), strict=True
    ):
        assert result.value["mean"] == 3.5
        assert result.value["ids"] == {name: list(range(8)) for name in ("floats", *LISTS, *LATER_LISTS)}
        assert result.value["held"].keys() == {*LISTS, *LATER_LISTS}
        for name, dims in result.value["held"].items():
            assert dims == [0 if "scalars" in name else 1] * len(shard) * (2 if "two" in name else 1)


class DictWithMeta(dict[str, Any]):
    """A batch of a user's own type, with an attribute."""

    meta = "none"


class MovesItself(DictWithMeta):
    def to(self, device: Any, **_: Any) -> MovesItself:
        moved = MovesItself({key: value.to(device) if hasattr(value, "to") else value for key, value in self.items()})
        moved.meta = self.meta
        return moved


def collate_with_meta(samples: list[dict[str, Any]], cls: type[DictWithMeta]) -> DictWithMeta:
    batch = cls(collate(samples))
    batch.meta = f"samples: {len(samples)}"
    return batch


@pytest.mark.parametrize("cls", [DictWithMeta, MovesItself])
def test_a_batch_of_a_users_own_type_is_one_after_pinning_and_moving(cls: type[DictWithMeta]) -> None:
    """C12: on its way to the training process, and with Lightning to the device. There, what is no item is kept by a type that
    moves itself, as with any loader. (Without a GPU nothing is pinned: how a batch would be is in unit/test_batch.py.)"""
    seen: list[Any] = []

    class Looks(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append((type(batch), batch.meta, self.trainer.strategy.step_info.num_samples))  # type: ignore[attr-defined]
            return self.weight * 1.0

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def loader() -> ODBDataLoader:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "pin_memory=True is ignored")
            return ODBDataLoader(
                Lengths([4] * 6),
                l_max=8,
                num_workers=0,
                pin_memory=True,
                collate_fn=lambda samples: collate_with_meta(samples, cls),
                multiprocessing_context="fork",
            )

    with loader() as batches:
        for batch in batches:
            assert (type(batch.data), batch.data.meta, batch.step.num_samples) == (cls, "samples: 2", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer("odb", devices=1).fit(Looks(), loader())
    assert seen == [(cls, "samples: 2" if cls is MovesItself else "none", 2)] * 3


def test_a_loss_does_not_depend_on_the_group(tmp_path: Path) -> None:
    """C14: under absolute positions, padded on the right by our collate function, and on the left by one that says so."""
    (result,) = run_ranks("tests.multiprocess.field_cases:group_mates", 1, tmp_path)
    alone = result.value["right, alone"]
    for case in ("right", "left"):
        assert result.value[f"{case}, grouped"] == pytest.approx(alone, abs=1e-5)
        assert result.value[f"{case}, alone"] == pytest.approx(alone, abs=1e-5)
        assert result.value[f"{case}, grouped, groups"] == [[2], [1, 0]]
        assert result.value[f"{case}, alone, groups"] == [[2], [1], [0]]
    assert result.value["mask"][1] == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert result.value["positions"][1][1][2:] == [0, 1, 2]


def test_under_zero_3_what_depends_on_the_data_can_be_run_alike(tmp_path: Path) -> None:
    """C18: by a reduction over the ranks, in which an idle one has no voice."""
    results = run_ranks("tests.multiprocess.field_cases:modalities", 2, tmp_path, strategy="zero3")
    first, second = (result.value["batches"] for result in results)
    assert [result.value["is_idle"] for result in results] == [[[False]] * 3 + [[True]], [[False]] * 2 + [[True], [False]]]
    assert [batch["targets"] for batch in first[:3]] == [2 * 9, 64, 64] and not any(batch["has_image"] for batch in first)
    assert [batch["targets"] for batch in second[:2]] == [299, 320] and all(batch["has_image"] for batch in second)
    assert 64 < CHUNK < 299
    for batches in (first, second):
        assert [batch["ran"] for batch in batches] == [2, 2, 1, 2]
    assert (first[3]["chunks"], second[2]["chunks"]) == (1, 2), "of stand-ins"
    for result in results:
        assert result.value["error"] < 1e-5
        assert result.value["spread"] == 0.0


def test_a_padding_multiple_keeps_a_compiled_model_to_few_graphs(tmp_path: Path) -> None:
    """C27"""
    for result in run_ranks("tests.multiprocess.field_cases:compiled", 2, tmp_path):
        eager, compiled = result.value["eager"], result.value["compiled"]
        assert len(eager["shapes"]) == NUM_SHAPES
        assert compiled["shapes"] == [[ROWS, MULTIPLE * number] for number in (1, 2, 3)]
        assert compiled["graphs"] == 3
        assert compiled["losses"] == pytest.approx(eager["losses"], abs=1e-5)
        assert len(compiled["losses"]) == NUM_SHAPES and compiled["losses"][-1] < compiled["losses"][0] - 0.5


def scheduled_rate(samples: int) -> float:
    """Of the update that ends with so many samples."""
    if samples < WARM_UP:
        return samples / WARM_UP
    rest = (NUM_SAMPLES - samples) / (NUM_SAMPLES - WARM_UP)
    return LAST + (1 - LAST) * math.sin(rest * math.pi / 2) ** 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_schedule_by_samples_is_the_same_whatever_the_batches(tmp_path: Path, num_ranks: int) -> None:
    """C52: 64 samples, with budgets of 256 and 1024, one and two micro-batches an update."""
    results = run_ranks("tests.multiprocess.field_cases:schedules", num_ranks, tmp_path, num_ranks=num_ranks)
    for result in results:
        for schedule in result.value:
            assert (schedule["samples"], schedule["world_size"]) == (NUM_SAMPLES, num_ranks)
            assert schedule["last"] == pytest.approx(LAST)
            samples, rates = zip(*schedule["updates"], strict=True)
            assert samples[-1] == NUM_SAMPLES and samples[0] < WARM_UP, "or there is no warm-up"
            assert rates == pytest.approx([scheduled_rate(number) for number in samples])
            assert schedule["global_step"] == len(samples)
    assert len({schedule["global_step"] for schedule in results[0].value}) == len(SCHEDULES), "not for equal steps"


class Tqdm(TQDMProgressBar):
    """Keeps what is shown after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[tuple[float, float | None]] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.shown.append((self.train_progress_bar.n, self.train_progress_bar.total))

    def on_validation_batch_end(self, *arguments: Any) -> None:
        super().on_validation_batch_end(*arguments)
        self.shown.append((self.val_progress_bar.n, self.val_progress_bar.total))


class Rich(RichProgressBar):
    def __init__(self) -> None:
        super().__init__()
        self.shown: list[tuple[float, float | None]] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self._keep(self.train_progress_bar_id)

    def on_validation_batch_end(self, *arguments: Any) -> None:
        super().on_validation_batch_end(*arguments)
        self._keep(self.val_progress_bar_id)

    def _keep(self, number: Any) -> None:
        (task,) = (task for task in self.progress.tasks if task.id == number)
        self.shown.append((task.completed, None if task.total == math.inf else task.total))


class Steps(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.num_steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_steps += 1
        return self.weight * 1.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_with_a_bar(bar: Any, **options: Any) -> Steps:
    """Ten steps an epoch, and six of validation, for two epochs with k = 4."""
    module = Steps()
    data = ODBDataModule(
        Lengths([4] * 20), Lengths([4] * 6), l_max=8, collate_fn=collate, num_workers=0, multiprocessing_context="fork"
    )
    defaults: dict[str, Any] = {"devices": 1, "max_epochs": 2, "accumulate_grad_batches": 4, "callbacks": [bar]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer("odb", **(defaults | options)).fit(module, datamodule=data)
    return module


@pytest.mark.parametrize("limit", [None, 7, 50])
@pytest.mark.parametrize("cls", [Tqdm, Rich])
def test_a_progress_bar_does_not_pass_its_end(cls: type[Any], limit: int | None) -> None:
    """C55: its end is unknown, or the limit of the user's."""
    bar = cls()
    module = fit_with_a_bar(bar, limit_train_batches=limit, enable_progress_bar=True)
    assert module.num_steps == 2 * min(limit or 10, 10)
    assert max(done for done, _ in bar.shown) == min(limit or 10, 10)
    assert {total for _, total in bar.shown} == ({None} if limit is None else {None, limit})
    assert all(total is None or done <= total for done, total in bar.shown)


def test_progress_by_samples_ends_at_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    """C55"""
    fit_with_a_bar(Progress(seconds=1e-9))
    shares = [int(share) for share in re.findall(r"samples \((\d+)%\)", capsys.readouterr().err)]
    assert shares == [*range(10, 101, 10)] * 2
