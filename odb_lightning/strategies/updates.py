"""How often parameters were updated, which is not how often the trainer says that it stepped."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.utils.hooks import RemovableHandle


class CountsUpdates(Strategy):
    """Knows how many updates were made in a fit. A learning rate that is scheduled by step moves with those alone: not with
    steps left out, as no rank had a target or a gradient overflowed (of which an optimizer around another may not tell)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._updates = UpdateCounter()
        self._held: list[tuple[LRSchedulerConfig, int]] = []
        """Schedules that are not to move, with how often they do."""

    @property
    def num_updates(self) -> int:
        """Updates of the parameters in this fit. `trainer.global_step` also counts those left out."""
        return self._updates.count

    def on_train_start(self) -> None:
        super().on_train_start()
        self._updates.start(self)

    def teardown(self) -> None:
        self._updates.stop()
        self._release_schedules()
        super().teardown()

    @contextmanager
    def _moving_schedules(self, optimizer: Any, is_left_out: bool) -> Iterator[None]:
        """Around a step of the optimizer: if it makes no update, schedules by step stay where they are until the next batch."""
        schedules = [config for config in self.lr_scheduler_configs if config.interval == "step"]
        is_watched = self._updates.watch(optimizer)
        # Of a fused optimizer with a scaler the host has to wait for the count.
        before = self._updates.count if schedules and is_watched else 0
        yield
        if not is_watched and not is_left_out:
            self._updates.add()
        elif schedules and (is_left_out or self._updates.count == before):
            self._release_schedules()
            self._held = [(config, config.frequency) for config in schedules]
            for config in schedules:
                config.frequency = sys.maxsize  # the trainer moves those whose frequency divides the number of the batch

    def _release_schedules(self) -> None:
        for config, frequency in self._held:
            config.frequency = frequency
        self._held = []


class UpdateCounter:
    """Counts the steps that optimizers made, from `start` on."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._engine_before = 0
        self._steps: int | torch.Tensor = 0
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()

    def start(self, strategy: Strategy) -> None:
        self.stop()
        self._steps, self._engine = 0, getattr(strategy, "deepspeed_engine", None)
        if self._engine is not None:
            self._engine_before = self._engine_steps()
        for optimizer in strategy.optimizers:
            self.watch(optimizer)

    def stop(self) -> None:
        """The count stays."""
        if self._engine is not None:
            self._steps, self._engine = self.count, None
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def watch(self, optimizer: Any) -> bool:
        """Counts the optimizer's steps from now on, if it tells of them: one that wraps another may not."""
        if self._engine is None and optimizer not in self._hooks:
            try:
                self._hooks[optimizer] = optimizer.register_step_post_hook(self._count)
            except AttributeError:
                return False
        return True

    def add(self) -> None:
        """Counts a step of an optimizer that does not tell."""
        self._steps = self._steps + 1

    @property
    def count(self) -> int:
        return int(self._steps) if self._engine is None else self._engine_steps() - self._engine_before

    def _engine_steps(self) -> int:
        return int(self._engine.global_steps) - int(self._engine.skipped_steps)

    def _count(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # A fused optimizer is told of an overflow and leaves its step out itself. Not read here: the host would wait.
        found_inf = getattr(optimizer, "found_inf", None)
        self._steps = self._steps + (1 if found_inf is None else (found_inf == 0).long().sum())
