"""The learning rate by samples, in a module that knows nothing of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import DataLoader

from odb_lightning import ODBDataLoader
from odb_lightning.callbacks import SampleSchedule, cosine_with_warmup
from tests.loader_data import Lengths, collate
from tests.multiprocess.trainers import make_trainer

pytestmark = [pytest.mark.filterwarnings("ignore:.*does not have many workers")]


def per_mille(samples: int) -> float:
    return samples / 1000


class Model(lightning.LightningModule):
    """Notes the rates that it is updated with."""

    def __init__(self, rates: tuple[float, ...] = (1.0, 10.0), has_scheduler: bool = False) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.zeros(()) for _ in rates])
        self.rates, self.has_scheduler = rates, has_scheduler
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return sum(self.weights)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        groups = [{"params": [weight], "lr": rate} for weight, rate in zip(self.weights, self.rates, strict=True)]
        optimizer = torch.optim.SGD(groups)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)] if self.has_scheduler else []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append([group["lr"] for group in optimizer.param_groups])


def make_loader(num_samples: int = 10, rows: int = 4) -> ODBDataLoader:
    return ODBDataLoader(
        Lengths([4] * num_samples), l_max=4 * rows, collate_fn=collate, num_workers=0, shuffle=False, num_supervised_fn="causal"
    )


@pytest.mark.parametrize(("accumulate", "counted"), [(1, [4, 8, 10]), (2, [8, 10])])
def test_each_group_has_its_first_rate_times_the_factor(accumulate: int, counted: list[int]) -> None:
    model, schedule = Model(), SampleSchedule(per_mille)
    make_trainer("odb", devices=1, callbacks=[schedule], accumulate_grad_batches=accumulate).fit(model, make_loader())
    assert model.seen == [[pytest.approx(count / 1000), pytest.approx(count / 100)] for count in counted]
    assert schedule.samples == 10


def test_any_loader_and_strategy_will_do() -> None:
    model, schedule = Model(), SampleSchedule(per_mille)
    loader = DataLoader(torch.zeros(10, 3), batch_size=4)  # type: ignore[arg-type]
    make_trainer("auto", devices=1, callbacks=[schedule]).fit(model, loader)
    assert [rates[0] for rates in model.seen] == [0.004, 0.008, 0.01]


def test_a_group_that_comes_later_has_its_own_first_rate() -> None:
    class Unfrozen(Model):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.trainer.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.ones(()))], "lr": 100.0})

    model = Unfrozen(rates=(1.0,))
    make_trainer("odb", devices=1, callbacks=[SampleSchedule(per_mille)], max_epochs=2).fit(model, make_loader(4))
    assert model.seen == [[0.004], [0.008, 0.8]]


def test_optimizers_made_anew_have_their_first_rates() -> None:
    class Renewed(Model):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.rates = (5.0,)
                self.trainer.strategy.setup_optimizers(self.trainer)

    model = Renewed(rates=(1.0,))
    make_trainer("odb", devices=1, callbacks=[SampleSchedule(per_mille)], max_epochs=2).fit(model, make_loader(4))
    assert model.seen == [[0.004], [0.04]]


def test_a_callback_that_saves_may_stand_before_it() -> None:
    saved: list[Any] = []

    class Saves(lightning.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            saved.append(schedule.state_dict())

    schedule = SampleSchedule(per_mille)
    make_trainer("odb", devices=1, callbacks=[Saves(), schedule]).fit(Model(), make_loader())
    assert saved == [{"samples": count} for count in (4, 8, 10)]


def test_a_checkpoint_counts_finished_windows_and_the_rates_are_those_configured(tmp_path: Path) -> None:
    """A resumed run begins a window again; a rate given anew holds from there on."""
    model, schedule = Model(), SampleSchedule(per_mille)
    saved: list[Any] = []
    model.on_train_batch_end = lambda *_: saved.append(schedule.state_dict())  # type: ignore[method-assign]
    trainer = make_trainer("odb", devices=1, callbacks=[schedule], accumulate_grad_batches=2)
    trainer.fit(model, make_loader(14))
    assert saved == [{"samples": count} for count in (0, 8, 8, 14)]
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again, other = SampleSchedule(per_mille), Model(rates=(2.0, 20.0))
    make_trainer("odb", devices=1, callbacks=[again], max_epochs=2).fit(
        other, make_loader(14), ckpt_path=tmp_path / "last.ckpt"
    )
    assert again.samples == 28
    assert other.seen == [[pytest.approx(count / 500), pytest.approx(count / 50)] for count in (18, 22, 26, 28)]


@pytest.mark.parametrize(("accumulate", "counted"), [(1, [0, 4, 8, 12]), (2, [0, 0, 8, 8])])
def test_a_checkpoint_before_a_batch_is_trained_does_not_count_it(accumulate: int, counted: list[int]) -> None:
    """After the callbacks' first hook: where the trainer saves what SIGTERM ends, the batch is to be trained again."""
    model, schedule = Model(), SampleSchedule(per_mille)
    saved: list[Any] = []
    model.on_train_batch_start = lambda *_: saved.append(schedule.state_dict())  # type: ignore[method-assign]
    make_trainer("odb", devices=1, callbacks=[schedule], accumulate_grad_batches=accumulate).fit(model, make_loader(14))
    assert saved == [{"samples": count} for count in counted]
    assert schedule.state_dict() == {"samples": 14}


def test_in_another_fit_a_schedule_begins_again() -> None:
    schedule = SampleSchedule(per_mille)
    for _ in range(2):
        model = Model(rates=(1.0,))
        make_trainer("odb", devices=1, callbacks=[schedule]).fit(model, make_loader())
        assert model.seen == [[0.004], [0.008], [0.01]]


def test_a_batch_that_a_hook_skips_does_not_count() -> None:
    class Impatient(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if (self.current_epoch, batch_idx) == (0, 1) else None

    model, schedule = Impatient(rates=(1.0,)), SampleSchedule(per_mille)
    make_trainer("odb", devices=1, callbacks=[schedule], max_epochs=2).fit(model, make_loader())
    assert model.seen == [[0.004], [0.008], [0.012], [0.014]]
    assert schedule.samples == 14


def test_a_scheduler_besides_is_refused() -> None:
    with pytest.raises(ValueError, match="configure_optimizers has a ExponentialLR: leave one of them out"):
        make_trainer("odb", devices=1, callbacks=[SampleSchedule(per_mille)]).fit(Model(has_scheduler=True), make_loader())


def test_samples_are_those_of_all_ranks_also_where_the_step_was_counted_on_one() -> None:
    schedule, module = SampleSchedule(per_mille), Model()
    stub = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 4}, is_last_batch=False, accumulate_grad_batches=1)
    for step_info, expected in (
        (SimpleNamespace(global_num_samples=10, world_size=4, step=0, accumulate=1), 10),
        (SimpleNamespace(global_num_samples=3, world_size=1, step=0, accumulate=1), 12),
        (None, 12),
    ):
        stub.strategy = SimpleNamespace(step_info=step_info)
        before = schedule.samples
        schedule.on_train_batch_start(stub, module, torch.zeros(3, 2), 0)  # type: ignore[arg-type]
        assert schedule.samples - before == expected


def test_warm_up_then_cosine() -> None:
    factor = cosine_with_warmup(100, 10, 0.1)
    assert [factor(count) for count in (5, 10, 55, 100, 1000)] == pytest.approx([0.5, 1.0, 0.55, 0.1, 0.1])
    assert cosine_with_warmup(10, 0, 0.0)(1) < 1.0
    assert cosine_with_warmup(10, 20, 0.0)(10) == 0.5
