"""Checkpoints that are there whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy

WRITING, REPLACED = ".part", ".old"
"""What is behind the name of a checkpoint that is being written, and of one that another is about to replace."""
_OF_A_FOLDER = re.compile(r"latest|checkpoint|zero_to_\w+\.py|\.metadata|meta\.pt|__\d+_\d+\.distcp")


class WritesWholeCheckpoints(Strategy):
    """A checkpoint is written beside its place, `<name>.part`, and put there once every rank has written its share: until then
    the one that it replaces is whole, for a moment as `<name>.old`.

    Lightning moves single files from the folder for temporary files, which may be on another disk: then they are copied in
    place. Folders (DeepSpeed, FSDP) are written file by file. All ranks have to see the same folder. Remote paths, and what a
    checkpoint plugin of the user writes, are left alone, and so is a folder with other things in it.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        target = self.broadcast(filepath)
        is_local = "://" not in str(target) and type(self.checkpoint_io) is TorchCheckpointIO
        path = Path(target)
        if not is_local or not self.broadcast(_can_be_replaced(path)):
            super().save_checkpoint(checkpoint, target, storage_options)
            return
        part = path.with_name(path.name + WRITING)
        if self.is_global_zero:
            _remove(part)
        self.barrier()
        super().save_checkpoint(checkpoint, part, storage_options)
        self.barrier()
        if self.is_global_zero:
            put_in_place(part, path)


def put_in_place(part: Path, path: Path) -> None:
    """`part` becomes `path`, which may be there."""
    old = path.with_name(path.name + REPLACED)
    if (part.is_dir() and path.exists()) or path.is_dir():
        _remove(old)
        os.replace(path, old)
    os.replace(part, path)
    _remove(old)


def _can_be_replaced(path: Path) -> bool:
    return not path.is_dir() or all(_OF_A_FOLDER.fullmatch(entry.name) for entry in path.iterdir())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
