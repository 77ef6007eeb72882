"""Fits that are killed while they write a checkpoint over another one, run by every rank (see ranks.py)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from tests.multiprocess import resumed_fits
from tests.recipes.resumed_runs import die_writing

NAME = "last.ckpt"
BATCHES = (2, 5)
"""After which a checkpoint is written."""


class SavesOver(Callback):
    """Always the same checkpoint. Rank `rank`, if given, is killed while it writes the second."""

    def __init__(self, folder: Path, rank: int | None) -> None:
        self.folder, self.rank, self.number = folder, rank, 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.number == BATCHES[1] and self.rank == trainer.global_rank:
            die_writing(lambda: True)
        if self.number in BATCHES:
            trainer.save_checkpoint(self.folder / NAME)
        self.number += 1


def killed(strategy: str, place: str, rank: int) -> None:
    resumed_fits.Saves = lambda folder, _: SavesOver(folder, rank)  # type: ignore[assignment, misc]
    resumed_fits.fit(strategy, int(os.environ["WORLD_SIZE"]), Path(place), [], max_epochs=1)


def whole_and_resumed(strategy: str, place: str) -> list[dict[str, Any]]:
    size, folder = int(os.environ["WORLD_SIZE"]), Path(place)
    return [resumed_fits.fit(strategy, size, folder, [], checkpoint=name, max_epochs=1) for name in (None, NAME)]
