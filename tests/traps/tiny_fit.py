"""The smallest model, loader and trainer that show what Lightning does with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer


class Loader:
    """A foreign iterable without `__len__`; `events` tells what was asked of it."""

    def __init__(self, num_batches: int = 4) -> None:
        self.num_batches = num_batches
        self.events: list[Any] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.events.append("iter")
        return self.batches()

    def batches(self) -> Iterator[torch.Tensor]:
        for number in range(self.num_batches):
            self.events.append(number)
            yield torch.tensor([float(number)])


class StatefulLoader(Loader):
    """A loader that can be resumed: its state is the number of batches handed over."""

    def __init__(self, num_batches: int = 4) -> None:
        super().__init__(num_batches)
        self.first, self.handed_over = 0, 0

    def batches(self) -> Iterator[torch.Tensor]:
        first, self.first = self.first, 0
        for number in range(first, self.num_batches):
            self.handed_over = number + 1
            yield torch.tensor([float(number)])

    def state_dict(self) -> dict[str, int]:
        return {"handed_over": self.handed_over}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.events.append(("load_state_dict", state["handed_over"]))
        self.first = state["handed_over"]


class Tiny(LightningModule):
    """One weight, whose gradient is 1 for each micro-batch; remembers what it trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.trained: list[float] = []
        self.gradients: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.trained.append(batch.item())
        return self.weight * 1.0

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.weight.grad is not None
        self.gradients.append(self.weight.grad.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TinyWithValidation(Tiny):
    """Counts the validation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.num_validations = 0

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.num_validations += batch_idx == 0


def make_trainer(**options: Any) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "num_sanity_val_steps": 0}
    return Trainer(**{"enable_checkpointing": False, **quiet, **defaults, **options})
