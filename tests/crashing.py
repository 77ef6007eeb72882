"""A callback with which a test makes one rank of a run fail."""

from __future__ import annotations

import os
import signal
from typing import Any

from lightning.pytorch import Callback


class Crash(Callback):
    """In training step `step`, rank `rank` raises an error, exits, is killed, or all ranks get a Ctrl-C."""

    def __init__(self, how: str, rank: int = 1, step: int = 1) -> None:
        self.how, self.rank, self.step = how, rank, step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != self.step:
            return
        if self.how == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif trainer.global_rank == self.rank:
            if self.how == "raise":
                raise RuntimeError("crash on purpose")
            os.kill(os.getpid(), signal.SIGKILL)
