"""What the ranks of test_failures.py do: fits and loops that something ends early, run by every rank (see ranks.py)."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from odb_lightning import ODBBatch, ODBDataLoader, ODBDDPStrategy, Timeouts
from tests import loader_data
from tests.helpers import running_members
from tests.loader_data import Lengths, collate, raise_in_the_users_code
from tests.multiprocess.trainers import make_trainer

SHARD = 20_000
"""Samples of a rank: more than it gets through before it is ended."""
SAMPLE = 300
"""In a rank's shard, the sample that something is wrong with."""
STEP = 20
"""The step in whose training or validation something happens."""
VOCABULARY = 17
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 GiB"
FAILED, ENDED = "failed", "ended"
"""Files: one that holds the time at which the failure happened, one that is there when rank 0 has ended."""


def note_failure(notes: str) -> None:
    """Keeps the time, which all processes of the machine measure alike."""
    Path(notes, FAILED).write_text(str(time.monotonic()))


def note_step(notes: str, rank: int) -> None:
    """Says that the rank is in the middle of an epoch."""
    Path(notes, f"step{rank}").touch()


class Fails(loader_data.Fails):
    """Keeps the time of its failure."""

    def __init__(self, at: int, how: str, notes: str) -> None:
        super().__init__([4] * 4 * SHARD, at, how)
        self.notes = notes

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.at:
            note_failure(self.notes)
        return super().__getitem__(index)


class NoLength(Lengths):
    """`len` raises."""

    def __init__(self, notes: str) -> None:
        super().__init__([4] * SHARD)
        self.notes = notes

    def __len__(self) -> int:
        note_failure(self.notes)
        raise_in_the_users_code(0)
        return 0


class FailingSampler:
    """`iter` raises."""

    def __init__(self, notes: str) -> None:
        self.notes = notes

    def __iter__(self) -> Iterator[int]:
        note_failure(self.notes)
        raise_in_the_users_code(0)
        return iter(())


class FailingFunction:
    """A `collate_fn` or `length_fn` that fails, or is killed, when it sees sample `at`."""

    def __init__(self, function: Callable[[Any], Any], at: int, how: str, notes: str) -> None:
        self.function, self.at, self.how, self.notes = function, at, how, notes

    def __call__(self, given: Any) -> Any:
        if any(int(sample["input_ids"][0]) == self.at for sample in (given if isinstance(given, list) else [given])):
            note_failure(self.notes)
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise_in_the_users_code(self.at)
        return self.function(given)


def _length(sample: Any) -> int:
    return len(sample["input_ids"])


class Model(LightningModule):
    """Knows nothing of the loader. In step `STEP` of the hook `where` of rank `rank`, something happens."""

    def __init__(self, where: str | None, rank: int, how: str, notes: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
        self.where, self.rank, self.how, self.notes = where, rank, how, notes

    def _reached(self, where: str, batch_idx: int) -> None:
        if where == self.where and batch_idx == STEP and self.global_rank == self.rank:
            self._fail()

    def _fail(self, *_: Any) -> None:
        note_failure(self.notes)
        if self.how == "stop":
            self.trainer.should_stop = True
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "out of memory":
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        raise_in_the_users_code(self.rank)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["input_ids"] % VOCABULARY
        return cross_entropy(self.network(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self._reached("training_step", batch_idx)
        loss = self._loss(batch)
        if self.where == "backward" and batch_idx == STEP and self.global_rank == self.rank:
            loss.register_hook(self._fail)
        self.log("train_loss", loss, sync_dist=True, batch_size=1)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._reached("on_train_batch_end", batch_idx)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._reached("validation_step", batch_idx)
        self.log("val_loss", self._loss(batch), sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Witness(Callback):
    """Says when the rank is in the middle of an epoch, and what ended its fit."""

    def __init__(self, notes: str) -> None:
        self.notes = notes

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEP:
            note_step(self.notes, trainer.global_rank)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        print(f"{type(exception).__name__} ended the fit after {trainer.global_step} steps", flush=True)


def _make_trainer(notes: str, validates: bool) -> Trainer:
    return make_trainer(
        ODBDDPStrategy(),
        devices=int(os.environ["WORLD_SIZE"]),
        val_check_interval=STEP if validates else None,
        limit_val_batches=2 * STEP if validates else 0,
        callbacks=[Witness(notes)],
    )


def _make_loader(dataset: Any, **options: Any) -> ODBDataLoader:
    defaults: dict[str, Any] = {"l_max": 16, "buffer_size": 16, "num_workers": 2, "collate_fn": collate, "shuffle": False}
    return ODBDataLoader(dataset, **(defaults | {"multiprocessing_context": "fork"} | options))


def _make_shard() -> range:
    own = int(os.environ["RANK"])
    return range(own * SHARD, (own + 1) * SHARD)


def fit(notes: str, where: str | None = None, rank: int = 1, how: str = "raise") -> int:
    """Fits with two workers, and validates on the way if that is where something happens: on `rank`, `where` says in what.
    Gives the number of steps."""
    warnings.simplefilter("ignore")
    is_here = int(os.environ["RANK"]) == rank
    at = rank * SHARD + SAMPLE
    dataset: Any = Lengths([4] * 4 * SHARD)
    options: dict[str, Any] = {"sampler": _make_shard()}
    if where == "getitem":
        dataset = Fails(at, how, notes)
    elif where == "collate_fn":
        options["collate_fn"] = FailingFunction(collate, at, how, notes)
    elif where == "length_fn":
        options["length_fn"] = FailingFunction(_length, at, how, notes)
    elif where == "sampler" and is_here:
        options["sampler"] = FailingSampler(notes)
    elif where == "len":
        del options["sampler"]
        dataset = NoLength(notes) if is_here else dataset
    elif where == "l_max":
        note_failure(notes)
        options["l_max"] = 24 if is_here else 16
    elif where == "spawn":
        note_failure(notes)
        dataset.transform = lambda sample: sample
        options["multiprocessing_context"] = "spawn"
    loader = _make_loader(dataset, **options)
    validates = where == "validation_step"
    trainer = _make_trainer(notes, validates)
    trainer.fit(Model(where, rank, how, notes), loader, _make_loader(dataset, sampler=_make_shard()) if validates else None)
    return trainer.global_step


def stops_everywhere(notes: str) -> int:
    """All ranks leave in the middle of an epoch."""
    warnings.simplefilter("ignore")
    trainer = _make_trainer(notes, validates=False)
    own = int(os.environ["RANK"])
    loader = _make_loader(Lengths([4] * 4 * SHARD), sampler=_make_shard())
    trainer.fit(Model("on_train_batch_end", own, "stop", notes), loader)
    note_failure(notes)
    return trainer.global_step


def loop(notes: str) -> None:
    """A loop without Lightning."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for batch in _make_loader(Lengths([4] * 4 * SHARD), sampler=_make_shard()):
        if batch.step.step == STEP:
            note_step(notes, rank)


def leaves_loop(notes: str) -> int:
    """A loop without Lightning that all ranks leave in the middle of an epoch. The interpreter ends with its iteration."""
    global _kept
    dist.init_process_group("gloo")
    iteration = iter(_make_loader(Lengths([4] * 4 * SHARD), sampler=_make_shard()))
    for batch in iteration:
        if batch.step.step == STEP:
            break
    _kept = iteration
    dist.barrier()
    note_failure(notes)
    return batch.step.step + 1


_kept: Any = None


def closes_after_an_epoch() -> list[float]:
    """The seconds that it takes to close a loader whose epoch has just ended: at once, while its process may still be about to
    leave its group, and when it has."""
    dist.init_process_group("gloo")
    seconds = []
    for pause in [0.0, 0.002, 0.005, 0.01, 0.02, 0.1]:
        loader = _make_loader(Lengths([4] * 16), num_workers=1)
        assert sum(batch.step.global_num_samples for batch in loader) == 16
        time.sleep(pause)
        begin = time.monotonic()
        loader.close()
        seconds.append(time.monotonic() - begin)
    dist.barrier()
    return seconds


def forks() -> dict[str, Any]:
    """How a fork of the rank ends, with a loader whose processes are kept for the next epoch, and the samples of that epoch."""
    loader = _make_loader(Lengths([4] * 40), sampler=range(40))
    collators = {batch.data["collate_pid"] for batch in loader}
    pid = os.fork()
    if pid == 0:
        raise SystemExit(0)  # by way of its interpreter, with all exit handlers
    deadline, ended = time.monotonic() + 20, (0, 0)
    while ended[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
        ended = os.waitpid(pid, os.WNOHANG)
    with loader:
        batches = list(loader)
    collators |= {batch.data["collate_pid"] for batch in batches}
    return {
        "ended": list(ended) == [pid, 0],
        "samples": sum(batch.step.num_samples for batch in batches),
        "collators": len(collators),
    }


# --- what runs out ---


class ThreeTensors:
    """Samples of three tensors."""

    def __len__(self) -> int:
        return 1500

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.full((4,), index)
        return {"input_ids": ids, "labels": ids.clone(), "mask": ids > 0}


def _ids(samples: list[dict[str, Tensor]]) -> list[int]:
    return [int(sample["input_ids"][0]) for sample in samples]


def few_descriptors() -> list[int]:
    """The samples of an epoch."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    with _make_loader(
        ThreeTensors(), buffer_size=512, l_max=64, collate_fn=_ids, num_supervised_fn=len, sampler=range(1500)
    ) as loader:
        return [index for batch in loader for index in batch.data]


class Large:
    """Samples of a megabyte."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [index] * 4, "pixels": torch.full((2**20,), index, dtype=torch.uint8)}


def _stack(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"ids": [sample["input_ids"][0] for sample in samples], "pixels": torch.stack([s["pixels"] for s in samples])}


def _use_of_shared_memory(pid: int) -> set[str]:
    """What a process has mapped or opened below /dev/shm, POSIX semaphores left out."""
    found = {line.split(maxsplit=5)[5] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm" in line}
    found |= {link for link in map(_target, Path(f"/proc/{pid}/fd").iterdir()) if "/dev/shm" in link}
    return {name for name in found if not name.startswith("/dev/shm/sem.")}


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def large_samples() -> dict[str, Any]:
    """The samples of an epoch, the processes at work, and what they had in /dev/shm while batches came."""
    seen, found, processes = [], set(), set()
    with _make_loader(Large(), collate_fn=_stack, num_supervised_fn=len, sampler=range(120)) as loader:
        for batch in loader:
            seen += batch.data["ids"]
            assert batch.data["pixels"][:, -1].tolist() == batch.data["ids"]
            if batch.step.step % 5 == 0:
                members = running_members(os.getpgrp())
                processes.update(members)
                for pid in members:
                    found |= _use_of_shared_memory(pid)
    return {"seen": sorted(seen), "found": sorted(found), "processes": len(processes)}


_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_SMALL = 64 * 1024


def _enter_small_shared_memory() -> str | None:
    """Mounts 64 KiB on /dev/shm, for this process and its children. The reason if that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    options = ctypes.c_char_p(f"size={_SMALL}".encode())
    if libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None) or libc.mount(
        b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), options
    ):
        return f"mount: {os.strerror(ctypes.get_errno())}"
    return None


def small_shared_memory() -> dict[str, Any]:
    """`large_samples` where /dev/shm holds 64 KiB."""
    refused = _enter_small_shared_memory()
    if refused is not None:
        return {"refused": refused}
    try:
        Path("/dev/shm/filled").write_bytes(bytes(2 * _SMALL))
    except OSError as error:
        assert error.errno == errno.ENOSPC
    else:
        raise AssertionError("it holds more")
    Path("/dev/shm/filled").unlink()
    return large_samples()


# --- slow, hung, stopped ---


class SlowAndEmpty(Lengths):
    """Some samples, the first of rank 1, are of length 0 and take their time."""

    slow = range(SHARD, SHARD + 40)

    def __init__(self, notes: str) -> None:
        super().__init__([4] * SHARD + [0] * len(self.slow) + [4] * SHARD)
        self.notes = notes

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.slow[0]:
            note_failure(self.notes)
        if index in self.slow:
            time.sleep(0.2)
        return super().__getitem__(index)


class Hangs(Lengths):
    """A sample in the middle of rank 1's takes until its peer has ended."""

    def __init__(self, notes: str) -> None:
        super().__init__([4] * 2 * SHARD)
        self.notes = notes

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == SHARD + SAMPLE:
            note_failure(self.notes)
            _wait_for_peer(self.notes)
        return super().__getitem__(index)


def _wait_for_peer(notes: str) -> None:
    deadline = time.monotonic() + 60
    while not Path(notes, ENDED).exists():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


def _how_it_ends(batches: Iterator[ODBBatch], notes: str) -> dict[str, Any]:
    """The number of samples; or the error, and the seconds since the failure."""
    try:
        return {"samples": sum(batch.step.num_samples for batch in batches)}
    except RuntimeError as error:
        ended, failed = time.monotonic(), Path(notes, FAILED)
        return {"error": str(error), "seconds": ended - float(failed.read_text()) if failed.exists() else None}
    finally:
        if dist.get_rank() == 0:
            Path(notes, ENDED).touch()


def slow(notes: str) -> dict[str, Any]:
    """Rank 1 takes longer than any limit until its window is full, but gets on: its first samples are dropped, so that it takes
    many of the workers' messages."""
    dist.init_process_group("gloo")
    own = _make_shard()[: len(SlowAndEmpty.slow) + 20]
    timeouts = Timeouts(exchange=4, peer=8, batch=7)
    with _make_loader(SlowAndEmpty(notes), buffer_size=8, num_workers=1, sampler=own, timeouts=timeouts) as loader:
        return _how_it_ends(iter(loader), notes) | {"waited": loader.stats.wait_seconds}


def hangs(notes: str) -> dict[str, Any]:
    """A worker of rank 1 brings nothing any more."""
    dist.init_process_group("gloo")
    with _make_loader(Hangs(notes), sampler=_make_shard(), timeouts=Timeouts(exchange=3)) as loader:
        return _how_it_ends(iter(loader), notes)


def stopped(notes: str) -> dict[str, Any]:
    """The collate process of rank 1 is stopped, as one on a machine that is gone without a word."""
    dist.init_process_group("gloo")
    with _make_loader(Lengths([4] * 2 * SHARD), sampler=_make_shard(), timeouts=Timeouts(peer=4, stop=1)) as loader:
        batches = iter(loader)
        if dist.get_rank() == 0:
            return _how_it_ends(batches, notes)
        for batch in batches:
            if batch.step.step == STEP:
                break
        note_failure(notes)
        os.kill(batch.data["collate_pid"], signal.SIGSTOP)
        _wait_for_peer(notes)
    return {}
