"""The trainer of a rank, and what is known of all of them."""

from __future__ import annotations

from typing import Any

import lightning
import torch.distributed as dist

from odb_lightning.callbacks import SampleSchedule


def make_trainer(strategy: Any, **options: Any) -> lightning.Trainer:
    """One of two on CPU, for one epoch, without a sanity check; writes nothing."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(strategy=strategy, **(defaults | options))


def schedule_of(trainer: lightning.Trainer) -> SampleSchedule:
    """The one that the trainer's module brought."""
    (schedule,) = (callback for callback in trainer.callbacks if isinstance(callback, SampleSchedule))
    return schedule


def everyone(value: Any) -> list[Any]:
    """Each rank's; of one device, which has no process group, its own."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
