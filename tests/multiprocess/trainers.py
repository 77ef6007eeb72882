"""The trainer of a rank."""

from __future__ import annotations

from typing import Any

import lightning

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
