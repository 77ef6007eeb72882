"""How far a run is, for people: its number of steps is not known ahead, its number of samples is."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from odb_lightning.batch import StepInfo


class Progress(Callback):
    """Rank 0 writes one line to stderr every `seconds` (on a terminal it is rewritten in place, every `terminal_seconds`)."""

    def __init__(self, seconds: float = 10.0, terminal_seconds: float = 1.0) -> None:
        self.on_terminal = sys.stderr.isatty()
        self.seconds = terminal_seconds if self.on_terminal else seconds
        self._samples = self._tokens_real = self._tokens_padded = 0
        self._epoch_size: int | None = None
        self._is_inside_epoch = False
        """A run that goes on from there has yet to train its first batch."""
        self._tokens_before = 0
        self._last = time.monotonic()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._epoch_size = dataset_size(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_inside_epoch = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._samples, self._is_inside_epoch = 0, False
        self._last = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        info = getattr(trainer.strategy, "step_info", None)
        if info is None:
            return
        if self._is_inside_epoch:
            self._samples, self._is_inside_epoch = _samples_before(info), False
        self._samples += info.global_num_samples
        self._tokens_real += info.num_tokens_real
        self._tokens_padded += info.num_tokens_padded
        now = time.monotonic()
        if trainer.is_global_zero and now - self._last >= self.seconds:
            rate = (self._tokens_real - self._tokens_before) / (now - self._last) * trainer.world_size
            self._write(self.line(trainer, outputs, batch_idx + 1, rate))
            self._last, self._tokens_before = now, self._tokens_real

    def line(self, trainer: Trainer, outputs: Any, steps: int, tokens_per_second: float) -> str:
        """The line: epoch, samples of the epoch on all ranks, rate, padding so far, loss of the last step."""
        of_epoch = f"{self._samples:,}"
        if self._epoch_size:
            of_epoch += f"/{self._epoch_size:,} samples ({min(self._samples / self._epoch_size, 1.0):.0%})"
        else:
            of_epoch += " samples"
        padding = 1 - self._tokens_real / self._tokens_padded if self._tokens_padded else 0.0
        parts = [f"epoch {trainer.current_epoch}", of_epoch, f"step {steps}", f"{tokens_per_second:,.0f} tokens/s"]
        parts.append(f"padding {padding:.1%}")
        loss = step_loss(trainer, outputs)
        if loss is not None:
            parts.append(f"loss {float(loss):.3f}")
        return " · ".join(parts)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_line()
        if trainer.is_global_zero:
            self._write("validating ..." if not trainer.sanity_checking else "validating before the first step ...")
            self._end_line()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_line()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last, self._tokens_before = time.monotonic(), self._tokens_real

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}" if self.on_terminal else text + "\n")
        sys.stderr.flush()

    def _end_line(self) -> None:
        if self.on_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _samples_before(info: StepInfo) -> int:
    """How many of the epoch were trained before this step, the first of its accumulation window."""
    if info.position is None:
        return 0
    try:
        state = info.state_dict()
    except NotImplementedError:
        return 0
    return int(state["num_samples"]) - (info.global_num_samples if state["step"] > info.step else 0)


def dataset_size(trainer: Trainer) -> int | None:
    """The number of samples of an epoch, all ranks, where the data module's training data tells it."""
    dataset: Any = getattr(trainer.datamodule, "train_dataset", None)  # type: ignore[attr-defined]
    return len(dataset) if hasattr(dataset, "__len__") else None


def step_loss(trainer: Trainer, outputs: Any) -> torch.Tensor | None:
    """The loss that `training_step` returned, from the outputs of `on_train_batch_end`; None where there is none."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    # Lightning divides it by the number of accumulated batches before callbacks see it.
    return loss.detach() * trainer.accumulate_grad_batches if isinstance(loss, torch.Tensor) else None
