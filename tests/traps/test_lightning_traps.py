"""What Lightning 2.6 does with a loader, and with losses. A test that fails says that upstream has changed: look at our design
again."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny_fit import Loader, StatefulLoader, Tiny, TinyWithValidation, make_trainer


class LoaderWithLength(Loader):
    """Claims a length, or raises TypeError when asked for it."""

    def __init__(self, num_batches: int, length: int | None) -> None:
        super().__init__(num_batches)
        self.length = length

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("not known")
        return self.length


class AskingForSteps(Tiny):
    """Reads the number of steps where one would build a schedule from it."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.estimate = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@pytest.mark.parametrize(("options", "expected"), [({"max_epochs": 2}, -1), ({"max_epochs": 2, "max_steps": 7}, 7)])
def test_without_a_length_the_estimated_steps_are_max_steps_even_minus_one(options: dict[str, int], expected: int) -> None:
    model = AskingForSteps()
    make_trainer(**options).fit(model, Loader(3))
    assert model.estimate == expected


def test_a_length_too_large_loses_the_validation_and_the_last_window() -> None:
    model, trainer = TinyWithValidation(), make_trainer(accumulate_grad_batches=2)
    trainer.fit(model, LoaderWithLength(5, length=10), Loader(1))
    assert model.trained == [0, 1, 2, 3, 4]
    assert trainer.global_step == 2, "two whole windows; the fifth batch is never stepped"
    assert model.num_validations == 0


@pytest.mark.parametrize("make_loader", [Loader, lambda n: LoaderWithLength(n, length=None)], ids=["none", "TypeError"])
def test_no_length_or_a_type_error_from_it_gives_all_steps_and_the_validation(make_loader: Any) -> None:
    model, trainer = TinyWithValidation(), make_trainer(accumulate_grad_batches=2)
    trainer.fit(model, make_loader(5), Loader(1))
    assert trainer.global_step == 3
    assert model.num_validations == 1


@pytest.mark.parametrize("options", [{"limit_train_batches": 0.5}, {"val_check_interval": 0.5}])
def test_without_a_length_fractions_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(MisconfigurationException, match="IterableDataset"):
        make_trainer(**options).fit(TinyWithValidation(), Loader(4), Loader(1))


class SavingAfterThree(Tiny):
    """Saves once three batches are trained."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        self.path = path

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.path and batch_idx == 2:
            self.trainer.save_checkpoint(self.path)


def loader_states(path: Path) -> list[Any]:
    return torch.load(path, weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"]


def test_without_a_length_the_loader_state_in_a_checkpoint_is_one_batch_too_new(tmp_path: Path) -> None:
    model, path = SavingAfterThree(tmp_path / "a.ckpt"), tmp_path / "a.ckpt"
    make_trainer().fit(model, StatefulLoader(6))
    assert loader_states(path) == [{"handed_over": 4}]

    resumed = SavingAfterThree()
    make_trainer().fit(resumed, StatefulLoader(6), ckpt_path=path, weights_only=True)
    assert resumed.trained == [4, 5], "batch 3 was fetched, saved as handed over, and never trained on"


def test_the_loader_state_is_saved_without_asking_the_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a checkpoint has the state of the rank that writes it; every rank is handed that one back."""
    called: list[str] = []
    path = tmp_path / "a.ckpt"

    class Saving(SavingAfterThree):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            with monkeypatch.context() as patch:
                for name in ("all_gather", "broadcast", "reduce", "reduce_boolean_decision"):
                    patch.setattr(self.trainer.strategy, name, lambda *_, name=name, **__: called.append(name))
                super().on_train_batch_end(outputs, batch, batch_idx)

    make_trainer().fit(Saving(path), StatefulLoader(6))
    assert called == []
    assert len(loader_states(path)) == 1, "one state a loader, not one a rank"


def test_reading_the_estimated_steps_in_configure_optimizers_loses_the_loader_state(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    make_trainer().fit(SavingAfterThree(path), StatefulLoader(6))
    restored, lost = StatefulLoader(6), StatefulLoader(6)
    make_trainer().fit(Tiny(), restored, ckpt_path=path, weights_only=True)
    make_trainer().fit(AskingForSteps(), lost, ckpt_path=path, weights_only=True)
    assert ("load_state_dict", 4) in restored.events
    assert not any(event[0] == "load_state_dict" for event in lost.events if isinstance(event, tuple))


def test_iter_is_called_once_more_than_there_are_epochs_and_one_batch_is_drawn_ahead() -> None:
    loader = Loader(2)

    class Watching(Tiny):
        def on_train_start(self) -> None:
            loader.events.append("train start")

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loader.events.append(f"train {batch_idx}")
            return super().training_step(batch, batch_idx)

    make_trainer(max_epochs=2).fit(Watching(), loader)
    first, second = ["iter", "iter", 0, "train start", 1, "train 0", "train 1"], ["iter", 0, 1, "train 0", "train 1"]
    assert loader.events == first + second


def test_each_loss_is_divided_by_accumulate_in_a_short_last_window_too() -> None:
    model, trainer = Tiny(), make_trainer(accumulate_grad_batches=4)
    trainer.fit(model, Loader(5))
    assert model.gradients == [1.0, 0.25]
    assert trainer.global_step == 2


def test_a_limit_of_batches_ends_the_window_and_drops_the_iterator() -> None:
    model, loader = Tiny(), Loader(1000)
    make_trainer(max_epochs=2, limit_train_batches=5, accumulate_grad_batches=4).fit(model, loader)
    assert model.gradients == [1.0, 0.25, 1.0, 0.25]
    assert model.trained == [0, 1, 2, 3, 4] * 2, "the second epoch does not go on where the first stopped"
    assert loader.events == ["iter", *(["iter", 0, 1, 2, 3, 4] * 2)]


def test_the_mean_over_no_target_is_nan_and_zero_times_it_too_but_the_sum_is_zero() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    nothing = torch.full((3,), -100)
    mean = torch.nn.functional.cross_entropy(logits, nothing)
    assert math.isnan(mean.item())
    assert math.isnan((mean * 0).item())
    (mean * 0).backward()
    assert logits.grad is not None
    logits.grad = None
    total = torch.nn.functional.cross_entropy(logits, nothing, reduction="sum")
    total.backward()
    assert total.item() == 0
    assert logits.grad is not None
    assert logits.grad.count_nonzero() == 0


def test_the_sigterm_handler_is_installed_between_on_fit_start_and_on_train_start() -> None:
    seen: dict[str, Any] = {}

    class Looking(Tiny):
        def setup(self, stage: str) -> None:
            seen["setup"] = signal.getsignal(signal.SIGTERM)

        def on_fit_start(self) -> None:
            seen["on_fit_start"] = signal.getsignal(signal.SIGTERM)

        def on_train_start(self) -> None:
            seen["on_train_start"] = signal.getsignal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    make_trainer().fit(Looking(), Loader(1))
    assert seen["setup"] == seen["on_fit_start"] == before
    assert seen["on_train_start"] != before


@pytest.mark.parametrize(
    "make_optimizer",
    [lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW([p], lr=0.1)],
    ids=["momentum", "adamw"],
)
def test_a_zero_gradient_still_moves_the_parameters(make_optimizer: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(()))
    optimizer = make_optimizer(parameter)
    parameter.grad = torch.ones(())
    optimizer.step()
    before = parameter.item()
    parameter.grad = torch.zeros(())
    optimizer.step()
    assert parameter.item() != before


def test_set_epoch_is_called_on_the_sampler_only_and_after_the_first_batch_was_drawn() -> None:
    class Sampler:
        def set_epoch(self, epoch: int) -> None:
            loader.events.append(f"epoch {epoch}")

    class LoaderWithEpoch(Loader):
        def set_epoch(self, epoch: int) -> None:
            self.events.append(f"never called {epoch}")

    loader = LoaderWithEpoch(2)
    loader.sampler = Sampler()  # type: ignore[attr-defined]
    make_trainer(max_epochs=2).fit(Tiny(), loader)
    assert loader.events == ["iter", "iter", 0, "epoch 0", 1, "epoch 1", "iter", 0, 1]


def test_no_loader_is_closed_but_its_attribute_iterator_is_set_to_none() -> None:
    class Closable(Loader):
        def close(self) -> None:
            self.events.append("closed")

    loader = Closable(2)
    loader._iterator = "mine"  # type: ignore[attr-defined]
    make_trainer().fit(Tiny(), loader)
    assert "closed" not in loader.events
    assert loader._iterator is None  # type: ignore[attr-defined]


class SavingInTheSecondBatch(Tiny):
    """Keeps what a checkpoint says of the loops, and of what it reads in them."""

    progress: Any = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.fetcher = self.trainer.fit_loop._data_fetcher
            self.trainer.save_checkpoint(self.path)


def test_a_checkpoint_counts_batches_and_epochs_where_a_resume_sets_them_back(tmp_path: Path) -> None:
    """`strategies.resume` edits these counts, and begins this fetcher anew."""
    model = SavingInTheSecondBatch()
    model.path = tmp_path / "one.ckpt"
    make_trainer().fit(model, Loader(4))
    loop = torch.load(model.path, weights_only=True)["loops"]["fit_loop"]
    assert loop["epoch_loop.batch_progress"] == {
        "total": {"ready": 2, "started": 2, "processed": 2, "completed": 1},
        "current": {"ready": 2, "started": 2, "processed": 2, "completed": 1},
        "is_last_batch": False,
    }
    assert loop["epoch_progress"]["current"] == {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    assert callable(type(model.fetcher).__iter__)
