"""Updates are counted where they are made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from odb_lightning import ODBDataLoader
from odb_lightning.strategies.updates import UpdateCounter
from tests.multiprocess.trainers import make_trainer


def started(*optimizers: torch.optim.Optimizer, **strategy: Any) -> UpdateCounter:
    counter = UpdateCounter()
    counter.start(SimpleNamespace(optimizers=optimizers, **strategy))  # type: ignore[arg-type]
    return counter


def make_optimizer(**options: Any) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.AdamW([parameter], lr=0.1, **options)


def test_steps_of_all_optimizers_count_from_the_start_to_the_stop() -> None:
    one, two = make_optimizer(), make_optimizer()
    one.step()
    counter = started(one, two)
    for optimizer in (one, two, one):
        assert counter.watch(optimizer), "again, and once is enough"
        optimizer.step()
    assert counter.count == 3
    counter.stop()
    one.step()
    assert counter.count == 3


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_with_an_overflow_does_not_count(fused: bool) -> None:
    """The scaler skips it; it leaves that to an optimizer that is fused."""
    optimizer = make_optimizer(fused=fused)
    counter, scaler = started(optimizer), torch.amp.GradScaler("cpu", init_scale=1.0)
    (parameter,) = optimizer.param_groups[0]["params"]
    for gradient in (1.0, float("inf"), 1.0):
        scaler.scale(torch.ones(()))  # or the scaler has no scale yet
        parameter.grad = torch.full((2,), gradient)
        scaler.step(optimizer)
        scaler.update()
    assert parameter.isfinite().all()
    assert counter.count == 2


def test_of_deepspeed_the_engines_own_count_is_taken() -> None:
    engine = SimpleNamespace(global_steps=7, skipped_steps=2)
    optimizer = make_optimizer()
    counter = started(optimizer, deepspeed_engine=engine)
    optimizer.step()
    engine.global_steps, engine.skipped_steps = 12, 3
    assert counter.count == 4
    counter.stop()
    engine.global_steps = 20
    assert counter.count == 4


def test_a_counter_begins_anew() -> None:
    optimizer = make_optimizer()
    counter = started(optimizer)
    optimizer.step()
    counter.start(SimpleNamespace(optimizers=[optimizer]))  # type: ignore[arg-type]
    assert counter.count == 0
    optimizer.step()
    assert counter.count == 1


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Five, of which the second (in the order of a loader that does not shuffle) may have no target."""

    def __init__(self, masked: tuple[int, ...]) -> None:
        self.masked = masked

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = torch.full((4,), -100 if index in self.masked else 1)
        return {"input_ids": torch.full((4,), index), "labels": labels}


def first(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    (sample,) = samples
    return {key: value[None] for key, value in sample.items()}


class Scheduled(lightning.LightningModule):
    """Halves its learning rate after each update, by step."""

    def __init__(self, overflows: tuple[int, ...] = (), fused: bool = False, frequency: int = 1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.overflows, self.fused, self.frequency = overflows, fused, frequency
        self.rates: list[float] = []
        self.frequencies: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.frequencies.append(self.trainer.lr_scheduler_configs[0].frequency)
        return self.weight * (float("inf") if int(batch["input_ids"][0, 0]) in self.overflows else 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1.0, fused=self.fused)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": self.frequency}]


def fit(model: Scheduled, folder: Path, masked: tuple[int, ...] = (), **options: Any) -> lightning.Trainer:
    loader = ODBDataLoader(
        Samples(masked), l_max=4, collate_fn=first, shuffle=False, num_workers=0, num_supervised_fn="causal", buffer_size=1
    )
    trainer = make_trainer("odb", **({"devices": 1, "default_root_dir": folder} | options))
    trainer.fit(model, loader)
    return trainer


pytestmark = [pytest.mark.filterwarnings("ignore:.*does not have many workers")]


@pytest.mark.parametrize("fused", [False, True])
def test_a_schedule_by_step_does_not_move_where_an_overflow_left_out_the_update(tmp_path: Path, fused: bool) -> None:
    """16-mixed, an infinite gradient in the second step of five: four updates, and the schedule moved four times."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    model = Scheduled(overflows=(1,), fused=fused)
    trainer = fit(model, tmp_path, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert model.rates == [1.0, 0.5, 0.5, 0.25, 0.125]
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.0625
    assert trainer.strategy.num_updates == 4  # type: ignore[attr-defined]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4


@pytest.mark.filterwarnings("ignore:a batch of 1 samples has no target")
@pytest.mark.parametrize(("masked", "rates"), [((0,), [1.0, 1.0, 0.5, 0.25, 0.125]), ((1, 4), [1.0, 0.5, 0.5, 0.25, 0.125])])
def test_nor_where_a_window_has_no_target(tmp_path: Path, masked: tuple[int, ...], rates: list[float]) -> None:
    model = Scheduled()
    trainer = fit(model, tmp_path, masked)
    assert model.rates == rates
    assert trainer.strategy.num_updates == 5 - len(masked)  # type: ignore[attr-defined]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 5 - len(masked)
    assert trainer.lr_scheduler_configs[0].frequency == 1


@pytest.mark.filterwarnings("ignore:a batch of 1 samples has no target")
def test_the_users_frequency_holds_and_is_given_back(tmp_path: Path) -> None:
    model = Scheduled(frequency=2)
    trainer = fit(model, tmp_path, masked=(1,))
    assert model.rates == [1.0, 1.0, 1.0, 1.0, 0.5]  # due after the second batch, which had no update, and the fourth
    assert model.frequencies == [2] * 5
    assert trainer.lr_scheduler_configs[0].frequency == 2


class MadeAnew(Scheduled):
    """As callbacks for pruning, quantization or finetuning do."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.strategy.setup_optimizers(self.trainer)


def test_an_optimizer_made_anew_is_counted_and_its_schedule_goes_on(tmp_path: Path) -> None:
    model = MadeAnew()
    trainer = fit(model, tmp_path, max_epochs=2)
    assert model.rates == [1.0, 0.5, 0.25, 0.125, 0.0625] * 2
    assert trainer.strategy.num_updates == 10  # type: ignore[attr-defined]


class Wraps(torch.optim.Optimizer):
    """Steps another, as wide-spread ones do: without `super().__init__()`, so it tells of no step."""

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        self.wrapped = wrapped
        self.param_groups, self.state, self.defaults = wrapped.param_groups, wrapped.state, wrapped.defaults

    def step(self, closure: Any = None) -> Any:
        return self.wrapped.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.wrapped.zero_grad(set_to_none)


class Wrapped(Scheduled):
    def configure_optimizers(self) -> Any:
        optimizer = Wraps(torch.optim.SGD(self.parameters(), lr=1.0))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.filterwarnings("ignore:a batch of 1 samples has no target")
def test_an_optimizer_that_tells_of_no_step_is_counted_too(tmp_path: Path) -> None:
    model = Wrapped()
    trainer = fit(model, tmp_path, masked=(1, 4))
    assert model.rates == [1.0, 0.5, 0.5, 0.25, 0.125]
    assert trainer.strategy.num_updates == 3  # type: ignore[attr-defined]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3
    assert float(model.weight.detach()) == 1.0 - (1.0 + 0.5 + 0.25)


class Fails(Scheduled):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            raise ValueError("in a batch without an update")


@pytest.mark.filterwarnings("ignore:a batch of 1 samples has no target")
def test_after_an_exception_a_schedule_has_its_frequency_again(tmp_path: Path) -> None:
    model = Fails(frequency=2)
    with pytest.raises(ValueError, match="in a batch without an update"):
        fit(model, tmp_path, masked=(1,))
    assert model.trainer.lr_scheduler_configs[0].frequency == 2


class ByHand(Scheduled):
    """Steps its optimizer without a word to Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers(use_pl_optimizer=False).step()


def test_steps_past_the_strategy_count_too(tmp_path: Path) -> None:
    assert fit(ByHand(), tmp_path).strategy.num_updates == 5  # type: ignore[attr-defined]
