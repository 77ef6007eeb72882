"""Runs of `odb-train` inside of ranks that exist already (see tests/multiprocess/ranks.py), and ways for them to end."""

from __future__ import annotations

import io
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from lightning.pytorch import Callback

from odb_lightning.train import train
from tests.helpers import TINY_MODEL

TINY = (
    "data.limit=60",
    "data.cutoff=128",
    "data.val_limit=12",
    "odb.l_max=512",
    "odb.num_workers=1",
    "odb.buffer_size=16",
    *TINY_MODEL,
    "optim.lr=0.01",
    "extras.print_config=false",
    "audit=true",
    "logger=none",
    "callbacks.progress.seconds=0",
    "trainer.devices=2",
    "trainer.max_epochs=2",
    "checkpoint.every_n_steps=3",
)


def run(place: str, name: str, overrides: list[str]) -> dict[str, Any]:
    """The summary. The run's folder is `<place>/logs/<task>/runs/<name>`, as the command would have it."""
    os.chdir(place)
    with initialize_config_module("odb_lightning.conf", version_base="1.3"):
        cfg = compose("train", overrides=[*TINY, *overrides])
        cfg.paths.output_dir = str(Path("logs") / cfg.task_name / "runs" / name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(cfg)


class DiesWriting(Callback):
    """Rank `rank` is killed with half of a file written, the first of the checkpoint of update `update`."""

    def __init__(self, rank: int, update: int) -> None:
        self.rank, self.update = rank, update

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank == self.rank:
            die_writing(lambda: trainer.global_step == self.update)


def die_writing(is_time: Callable[[], bool]) -> None:
    """From now on the process is killed in the middle of a file of a checkpoint, once `is_time()`."""
    save, move = torch.save, shutil.move

    def save_half(state: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(target, io.BytesIO) or not is_time():
            return save(state, target, *args, **kwargs)
        memory = io.BytesIO()
        save(state, memory, *args, **kwargs)
        half = memory.getvalue()[: memory.tell() // 2]
        if isinstance(target, (str, os.PathLike)):
            Path(target).write_bytes(half)
        else:
            target.write(half)
        os.kill(os.getpid(), signal.SIGKILL)

    def move_half(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        """What the move of a single file is where its folder is not on the disk of temporary files."""
        if not is_time():
            return move(source, target, *args, **kwargs)
        content = Path(source).read_bytes()
        Path(source).unlink()
        Path(target).write_bytes(content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save, shutil.move = save_half, move_half
