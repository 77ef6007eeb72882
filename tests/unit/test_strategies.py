"""What an ODB strategy refuses, what it says, and what it tells the trainer, on one device."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from torch.utils.data import DataLoader

from odb_lightning import ODBDataLoader, ODBDDPStrategy, ODBSingleDeviceStrategy
from odb_lightning.strategies.unwrapping import unwrapping

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*`dataloader_iter`"),
]


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((4,), index), "labels": torch.full((4,), index)}


def stack(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        info = self.trainer.strategy.step_info
        self.seen.append((info.epoch, info.step))
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TakesAnIterator(Model):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:
        next(dataloader_iter)
        return self.weight * 1.0


def make_loader(**options: Any) -> ODBDataLoader:
    return ODBDataLoader(Samples(), l_max=8, collate_fn=stack, num_workers=0, num_supervised_fn="causal", **options)


def make_trainer(folder: Path, **options: Any) -> lightning.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "strategy": "odb",
        "max_epochs": 1,
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(**(defaults | options))


def test_a_loader_without_counts_is_refused_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'from_dataloader.*denominator="strategy"'):
        make_trainer(tmp_path).fit(Model(), DataLoader(Samples(), batch_size=2))


def test_several_training_loaders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trains on one ODBDataLoader, but there are 2"):
        make_trainer(tmp_path).fit(Model(), [make_loader(), make_loader()])


def test_a_training_step_that_takes_an_iterator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="not a dataloader_iter"):
        make_trainer(tmp_path).fit(TakesAnIterator(), make_loader())


def test_an_accumulation_changed_behind_the_loaders_back_is_refused(tmp_path: Path) -> None:
    class Changing(Callback):
        def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
            trainer.accumulate_grad_batches = 2

    with pytest.raises(RuntimeError, match=r"became 2 while windows of 1 steps .* GradientAccumulationScheduler"):
        make_trainer(tmp_path, callbacks=[Changing()]).fit(Model(), make_loader())


def test_a_scheduled_accumulation_and_one_of_the_loaders_own_are_refused_before_the_first_step(tmp_path: Path) -> None:
    model, scheduler = Model(), GradientAccumulationScheduler({0: 1, 5: 2})
    with pytest.raises(ValueError, match="accumulate=1, but a GradientAccumulationScheduler"):
        make_trainer(tmp_path, callbacks=[scheduler]).fit(model, make_loader(accumulate=1))
    assert model.seen == []


def test_an_accumulation_of_the_loaders_own_has_to_be_the_trainers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="accumulate=3"):
        make_trainer(tmp_path, accumulate_grad_batches=2).fit(Model(), make_loader(accumulate=3))


def test_one_device_is_one_device(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="odb_ddp"):
        make_trainer(tmp_path, devices=2)


@pytest.mark.parametrize("strategy", [ODBSingleDeviceStrategy, ODBDDPStrategy])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_scaling": "tokens"}, "loss_scaling='tokens' is unknown: choose 'token' or 'sample' or 'none'"),
        ({"loss_reduction": "none"}, "loss_reduction='none' is unknown: choose 'mean' or 'sum'"),
        ({"denominator": "tokens"}, "denominator='tokens' is unknown: choose 'loader' or 'strategy'"),
        ({"denominator": "strategy", "num_supervised_fn": "all"}, "num_supervised_fn='all' is unknown"),
        ({"denominator": "strategy", "loss_scaling": "none"}, 'denominator="strategy" has no meaning with loss_scaling="none"'),
        ({"loss_reduction": "sum", "loss_scaling": "none"}, 'loss_reduction="sum" has no meaning with loss_scaling="none"'),
        ({"num_supervised_fn": "unshifted"}, "give it to the ODBDataLoader, or say denominator"),
    ],
)
def test_wrong_options_are_refused_at_once(strategy: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strategy(**options)


def test_fsdp_is_refused_on_cpu_with_what_to_use(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"needs GPUs.*odb_model_parallel"):
        make_trainer(tmp_path, strategy="odb_fsdp").fit(Model(), make_loader())


def test_epochs_are_the_trainers_after_a_resume_between_epochs(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
    make_trainer(tmp_path, enable_checkpointing=True, callbacks=[saves]).fit(Model(), make_loader())
    resumed = Model()
    make_trainer(tmp_path, max_epochs=2).fit(resumed, make_loader(), ckpt_path=tmp_path / "last.ckpt")
    assert {epoch for epoch, _ in resumed.seen} == {1}


def test_a_checkpoint_that_does_not_say_where_in_an_epoch_it_is_begins_it_again_and_says_so(tmp_path: Path) -> None:
    """One of another strategy, say."""
    saves = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=2, filename="{step}")
    make_trainer(tmp_path, enable_checkpointing=True, callbacks=[saves]).fit(Model(), make_loader())
    checkpoint = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
    del checkpoint["odb_lightning"]
    torch.save(checkpoint, tmp_path / "step=2.ckpt")
    with pytest.warns(UserWarning, match="lies inside epoch 0"):
        make_trainer(tmp_path).fit(Model(), make_loader(), ckpt_path=tmp_path / "step=2.ckpt")


class TestALimitAboveTheStepsOfAnEpoch:
    """The trainer takes an integer limit for the number of batches (PL#10290)."""

    class Watching(Model):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[tuple[float, bool]] = []
            self.validated = 0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            progress = self.trainer.fit_loop.epoch_loop.batch_progress
            self.told.append((self.trainer.num_training_batches, progress.is_last_batch))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validated += 1

    def fit(self, folder: Path, **options: Any) -> tuple[Watching, lightning.Trainer]:
        """Eight steps an epoch."""
        model, trainer = self.Watching(), make_trainer(folder, max_epochs=2, num_sanity_val_steps=0, **options)
        trainer.fit(model, make_loader(max_rows=1), make_loader(max_rows=1, shuffle=False))
        return model, trainer

    def test_the_trainer_names_the_limit_and_knows_the_last_batch(self, tmp_path: Path) -> None:
        model, _ = self.fit(tmp_path, limit_train_batches=50)
        assert model.told == [(50, step == 7) for _ in range(2) for step in range(8)]

    def test_all_steps_are_trained_and_validated_after(self, tmp_path: Path) -> None:
        model, trainer = self.fit(tmp_path, limit_train_batches=50, accumulate_grad_batches=3)
        assert model.seen == [(epoch, step) for epoch in range(2) for step in range(8)]
        assert trainer.global_step == 2 * 3, "the short window at the end of each epoch, too"
        assert (trainer.current_epoch, model.validated) == (2, 16)

    def test_without_a_limit_the_number_is_unknown(self, tmp_path: Path) -> None:
        model, trainer = self.fit(tmp_path)
        assert [number for number, _ in model.told] == [float("inf")] * 16
        assert (trainer.global_step, model.validated) == (16, 16)

    @pytest.mark.parametrize("marks_last", [False, True])
    def test_the_last_batch_of_an_epoch_is_known_once_it_is_there_and_not_before(self, marks_last: bool) -> None:
        with make_loader(max_rows=1) as inner:
            loader = unwrapping(inner, lambda: iter(inner), marks_last)
            for _ in range(2):
                known = [loader.last for _ in loader]
                assert known[:-1] == [None] * 7
                assert known[-1] is (loader.infos[-1] if marks_last else None)


class TestSigterm:
    """As a process gets it that is no rank of a launcher's. On ranks: tests/multiprocess/test_failures.py."""

    @pytest.fixture
    def received(self) -> Iterator[list[int]]:
        """What a handler of the user's own was called with; it returns."""
        received: list[int] = []

        def handler(number: int, _: Any) -> None:
            received.append(number)

        before = signal.signal(signal.SIGTERM, handler)
        yield received
        assert signal.getsignal(signal.SIGTERM) is handler, "put back at the end of the run"
        signal.signal(signal.SIGTERM, before)

    def test_a_handler_of_the_users_own_is_called_and_the_run_ends_all_the_same(
        self, tmp_path: Path, received: list[int]
    ) -> None:
        class Terminated(Model):
            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                if batch_idx == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                return super().training_step(batch, batch_idx)

        model = Terminated()
        with pytest.raises(SystemExit) as ended:
            make_trainer(tmp_path).fit(model, make_loader())
        assert ended.value.code == 128 + signal.SIGTERM
        assert received == [signal.SIGTERM]
        assert model.seen == [(0, 0)], "at once"

    @pytest.mark.parametrize("loop", ["validate", "test", "predict", "fit"])
    def test_before_the_first_batch(self, tmp_path: Path, received: list[int], loop: str) -> None:
        class Terminating:
            def __iter__(self) -> Iterator[int]:
                os.kill(os.getpid(), signal.SIGTERM)
                return iter(range(8))

        model = Model()
        if loop != "fit":
            step = "validation_step" if loop == "validate" else f"{loop}_step"
            setattr(model, step, lambda batch, batch_idx: model.seen.append((0, batch_idx)))
        with pytest.raises(SystemExit) as ended:
            getattr(make_trainer(tmp_path), loop)(model, make_loader(sampler=Terminating()))
        assert ended.value.code == 128 + signal.SIGTERM
        assert received == [signal.SIGTERM]
        assert model.seen == []
