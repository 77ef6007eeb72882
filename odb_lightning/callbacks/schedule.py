"""Learning rates by samples: with batches of varying size the number of steps is not known beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch.optim import Optimizer


class SampleSchedule(Callback):
    """Sets the learning rate for each update by the samples trained until then over all ranks, its own included: the first rate
    of each parameter group times `factor(samples)`. In the place of a scheduler in `configure_optimizers`, which steps a number
    of times that is not known. An update that is left out (an overflow, no target) counts its samples.

    With a strategy that knows nothing of its batches, those of all ranks count as large as this rank's. Raises ValueError where
    there is another scheduler, too.
    """

    def __init__(self, factor: Callable[[int], float]) -> None:
        self.factor = factor
        self.samples = 0
        """Samples trained over all ranks."""
        self._samples_updated = 0
        """Those of accumulation windows that have ended: a resumed run begins the one under way again."""
        self._ends_window = False
        self._rates: list[tuple[Optimizer, list[float]]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # a checkpoint's state comes later
            self.samples = self._samples_updated = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.lr_scheduler_configs:
            name = type(trainer.lr_scheduler_configs[0].scheduler).__name__
            raise ValueError(
                f"SampleSchedule sets the learning rate, but configure_optimizers has a {name}: leave one of them out"
            )
        # Here the optimizers are as configured: what a checkpoint has of them comes later.
        self._rates = [(optimizer, [group["lr"] for group in optimizer.param_groups]) for optimizer in trainer.optimizers]

    def on_train_epoch_start(self, *_: Any) -> None:
        self.samples = self._samples_updated  # without a batch that a hook has skipped, and the window it left open

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        num_replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        step = getattr(trainer.strategy, "step_info", None)
        if step is None:
            samples, position, accumulate = extract_batch_size(batch) * num_replicas, batch_idx, trainer.accumulate_grad_batches
        else:
            # A step that was counted on one rank stands for all of them.
            samples = step.global_num_samples * num_replicas // step.world_size
            position, accumulate = step.step, step.accumulate
        self.samples += samples
        self._ends_window = trainer.is_last_batch or (position + 1) % accumulate == 0

    # Not at the batch's beginning, as a checkpoint may be made before it is trained (SIGTERM's); nor at its end alone, where
    # another callback may make one before this one is asked.
    def on_after_backward(self, *_: Any) -> None:
        if self._ends_window:
            self._samples_updated = self.samples

    def on_train_batch_end(self, *_: Any) -> None:
        self.on_after_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        rates = next((rates for known, rates in self._rates if known is optimizer), None)
        if rates is None:  # made anew on the way
            rates = []
            self._rates.append((optimizer, rates))
        rates += [group["lr"] for group in optimizer.param_groups[len(rates) :]]  # groups added on the way
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * self.factor(self.samples)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self._samples_updated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = self._samples_updated = state_dict["samples"]


def cosine_with_warmup(total_samples: int, warmup_samples: int = 0, min_ratio: float = 0.1) -> Callable[[int], float]:
    """A `factor`: up to 1 at `warmup_samples`, then along a cosine to `min_ratio` at `total_samples` and there ever after."""
    return partial(_cosine, total_samples, warmup_samples, min_ratio)


def _cosine(total_samples: int, warmup_samples: int, min_ratio: float, samples: int) -> float:
    if samples < warmup_samples:
        return samples / warmup_samples
    progress = min(1.0, (samples - warmup_samples) / max(1, total_samples - warmup_samples))
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
