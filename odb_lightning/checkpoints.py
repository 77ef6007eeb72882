"""Which checkpoints of earlier runs are whole, and which of them is the newest."""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

_PATTERNS = ("runs/*/checkpoints/*.ckpt*", "multiruns/*/*/checkpoints/*.ckpt*")
_WRITING = ".ckpt.part"
_KINDS = (".ckpt", ".ckpt.old", _WRITING)
_OPTIMIZER_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_?optim_states\.pt")
_MODEL_STATES = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")


def newest_whole(task_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of the runs below `task_dir`, if there is one; and what was passed over for it, and why."""
    found = [path for pattern in _PATTERNS for path in task_dir.glob(pattern) if path.name.endswith(_KINDS)]
    passed: list[str] = []
    for path in sorted(found, key=_when, reverse=True):
        fault = fault_of(path)
        if fault is None:
            return path, passed
        passed.append(f"{path}: {fault}")
    return None, passed


def _when(path: Path) -> float:
    """When the last part of it was written: what is removed from a folder changes the time of that, too."""
    try:
        marks = [mark for mark in (path / "meta.pt", path / "latest") if mark.exists()] or [path]
        return marks[0].stat().st_mtime
    except OSError:  # another run has just removed it
        return 0.0


def fault_of(path: Path) -> str | None:
    """Why a run can't go on from the checkpoint at `path`; None if it is whole."""
    if path.name.endswith(_WRITING):
        return "it was being written when its run ended"
    if not path.is_dir():
        return _fault_of_file(path)
    try:
        return _fault_of_zero(path) if (path / "latest").exists() else _fault_of_shards(path)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        return f"it can't be read: {error}"


def _fault_of_file(path: Path) -> str | None:
    # What torch writes is an archive, whose list of contents comes last.
    return None if zipfile.is_zipfile(path) else f"{path.name} is cut off"


def _fault_of_zero(path: Path) -> str | None:
    """Of DeepSpeed's: a file of the model, or one for each rank, and one of the optimizer for each rank, below the tag."""
    files = list((path / (path / "latest").read_text().strip()).glob("*.pt"))
    models = [file for file in files if _MODEL_STATES.fullmatch(file.name)]
    if not models:
        return "the file of the model is missing"
    cut_off = [fault for fault in map(_fault_of_file, files) if fault is not None]
    if cut_off:
        return cut_off[0]
    ranks, world_size = ranks_of_zero(path), _world_size_in(models[0])
    missing = set(range(world_size or len(ranks))) - set(ranks)
    if not ranks or not missing:  # in stage 0, which shards nothing, no rank has one
        return None
    return f"the files of ranks {', '.join(map(str, sorted(missing)))} are missing"


def ranks_of_zero(path: Path) -> Sequence[int]:
    """The ranks whose optimizer state a checkpoint of DeepSpeed ZeRO holds; none if it is of another kind."""
    latest = path / "latest"
    if not latest.is_file():
        return []
    names = [file.name for file in (path / latest.read_text().strip()).glob("*.pt")]
    return sorted(int(match[1]) for match in map(_OPTIMIZER_STATES.fullmatch, names) if match)


def _world_size_in(model_states: Path) -> int | None:
    """The number of ranks that DeepSpeed has noted beside the weights, read without making the objects of the file."""
    with zipfile.ZipFile(model_states) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        operations = iter(pickletools.genops(archive.read(name)))
    for _, key, _ in operations:
        if key == "dp_world_size":
            return next((number for code, number, _ in operations if code.name.startswith("BININT")), None)
    return None


def _fault_of_shards(path: Path) -> str | None:
    """Of FSDP's: files of all ranks, their list, and the rest of the state, in that order."""
    if not (path / ".metadata").is_file():
        return "the list of its parts is missing"
    return _fault_of_file(path / "meta.pt")
