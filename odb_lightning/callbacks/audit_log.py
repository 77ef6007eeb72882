"""A log of which samples each step trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer


class AuditLog(Callback):
    """Appends a line `{"epoch", "step", "update", "sample_ids"}` per trained step to `<folder>/rank<r>.jsonl`, flushed.

    `update` counts the optimizer's steps before this one. Identities are written as they are if JSON has them, else as
    their `str`. After a resume, the last line of an (epoch, step) is the one that counts; with another number of ranks, what
    an earlier run has logged from the first (epoch, step) of the next on does not.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._file: TextIO | None = None
        self._update = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / f"rank{trainer.global_rank}.jsonl").open("a", encoding="utf-8")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._update = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        info = getattr(trainer.strategy, "step_info", None)
        if info is None or self._file is None:
            return
        line = {"epoch": info.epoch, "step": info.step, "update": self._update, "sample_ids": list(info.sample_ids)}
        self._file.write(json.dumps(line, default=str) + "\n")
        self._file.flush()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
