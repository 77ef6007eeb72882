"""How often parameters were updated, which is not how often the trainer says that it stepped."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.hooks import RemovableHandle


class UpdateCounter:
    """Counts the steps that optimizers made, from `start` on. `trainer.global_step` also counts updates that were left out:
    those without a target, and those whose gradients overflowed."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._engine_before = 0
        self._steps: int | torch.Tensor = 0
        self._hooks: list[RemovableHandle] = []

    def start(self, trainer: Trainer) -> None:
        self.stop()
        self._steps, self._engine = 0, getattr(trainer.strategy, "deepspeed_engine", None)
        if self._engine is not None:
            self._engine_before = self._engine_steps()
        else:
            optimizers = [found for found in trainer.strategy.optimizers if isinstance(found, torch.optim.Optimizer)]
            self._hooks = [optimizer.register_step_post_hook(self._count) for optimizer in optimizers]

    def stop(self) -> None:
        """The count stays."""
        if self._engine is not None:
            self._steps, self._engine = self.count, None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def count(self) -> int:
        return int(self._steps) if self._engine is None else self._engine_steps() - self._engine_before

    def _engine_steps(self) -> int:
        return int(self._engine.global_steps) - int(self._engine.skipped_steps)

    def _count(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # A fused optimizer is told of an overflow and leaves its step out itself. Not read here: the host would wait.
        found_inf = getattr(optimizer, "found_inf", None)
        self._steps = self._steps + (1 if found_inf is None else (found_inf == 0).long().sum())
