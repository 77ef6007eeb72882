"""The loop that consumes every loader, what it reads off from outside, and tables. Needs torch alone, as samples.py."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Reading:
    """What one pass over a loader came to, on one rank."""

    seconds: float = 0.0
    """From before the start of its processes to the end of the epoch."""
    first_batch: float = 0.0
    """Seconds to it."""
    wait: float = 0.0
    """Seconds that the loop waited for batches, the first one left out; and the longest such wait."""
    longest_wait: float = 0.0
    tokens_real: int = 0
    """By the attention mask, where there is one."""
    shapes: list[tuple[int, int]] = field(default_factory=list)
    """Rows and padded length of each batch."""
    sample_ids: list[int] = field(default_factory=list)
    """In the order of training."""
    cpu: dict[str, float] = field(default_factory=dict)
    """Seconds of processor time: of this process, of its children, and of theirs."""

    @property
    def padded(self) -> int:
        return sum(rows * length for rows, length in self.shapes)


def consume(batches: Iterable[Any], *, step_seconds: float = 0.0, on_batch: Callable[[Reading], None] | None = None) -> Reading:
    """Takes all batches, as a training loop that sleeps for `step_seconds` where a model would compute."""
    reading, spent_before = Reading(), _spent_below()
    cpu_begin, begin = time.process_time(), time.perf_counter()
    iterator = iter(batches)
    while True:
        asked = time.perf_counter()
        batch = next(iterator, None)
        now = time.perf_counter()
        if batch is None:
            break
        if reading.shapes:
            reading.wait += now - asked
            reading.longest_wait = max(reading.longest_wait, now - asked)
        else:
            reading.first_batch = now - begin
        ids = torch.as_tensor(batch["input_ids"])
        reading.shapes.append((ids.shape[0], ids.shape[1]))
        reading.sample_ids += ids[:, 0].tolist()
        if "attention_mask" in batch:
            reading.tokens_real += int(torch.as_tensor(batch["attention_mask"]).sum())
        if on_batch is not None:
            on_batch(reading)
        if step_seconds:
            time.sleep(step_seconds)
    reading.seconds = time.perf_counter() - begin
    reading.cpu = {"trainer": time.process_time() - cpu_begin}
    # Before the loader is closed, so that those of its processes that it keeps still tell what they did.
    reading.cpu |= {role: seconds - spent_before[role] for role, seconds in _spent_below().items()}
    return reading


def _spent_below() -> dict[str, float]:
    """Processor seconds of this process's children, those that were waited for included, and of theirs; needs /proc."""
    if not Path("/proc/self/stat").exists():
        return {}
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = {"children": ended.ru_utime + ended.ru_stime, "grandchildren": 0.0}
    for depth, seconds in _processes_below(os.getpid()).values():
        spent["children" if depth == 1 else "grandchildren"] += seconds
    return spent


def _processes_below(ancestor: int) -> dict[int, tuple[int, float]]:
    """Depth and processor time of each, with that of children it waited for, from /proc; none where there is no /proc."""
    parents, seconds = dict[int, int](), dict[int, float]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], seconds[pid] = int(fields[1]), sum(map(int, fields[11:15])) / _TICKS
    below, generation, depth = dict[int, tuple[int, float]](), {ancestor}, 0
    while generation:
        depth += 1
        generation = {pid for pid, parent in parents.items() if parent in generation}
        below |= {pid: (depth, seconds[pid]) for pid in generation}
    return below


def end_all(process: subprocess.Popen[str], seconds: float = 10.0) -> None:
    """Ends a process that leads a session, and those below it: by SIGTERM, so that launchers take their ranks along, and what
    is left after so many seconds for good."""
    below = _processes_below(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(seconds)


def position() -> tuple[int, int]:
    """Rank and world size, given by torchrun; joins the others."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    return rank, world_size


def together() -> None:
    """Waits for the other ranks."""
    if dist.is_initialized():
        dist.barrier()


def of_all_ranks(value: Any) -> list[Any]:
    """The values of all ranks, on all of them."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def summary(readings: Sequence[Reading], dataset: Any) -> dict[str, Any]:
    """Figures of a pass on all ranks, for JSON; and whether each sample was there once."""
    sample_ids = [sample_id for reading in readings for sample_id in reading.sample_ids]
    seen, slowest = len(set(sample_ids)), max(reading.seconds for reading in readings)
    real = int(sum(dataset.lengths[sample_id] for sample_id in sample_ids))
    counted = sum(reading.tokens_real for reading in readings)
    if counted not in (0, real):
        raise RuntimeError(f"the attention masks count {counted} tokens, the samples have {real}")
    roles = readings[0].cpu
    return {
        "samples": len(sample_ids),
        "seconds": slowest,
        "samples_per_second": len(sample_ids) / slowest,
        "steps": len(readings[0].shapes),
        "padding": 1 - real / sum(reading.padded for reading in readings),
        "first_batch": max(reading.first_batch for reading in readings),
        "missing": len(dataset) - seen,
        "repeated": len(sample_ids) - seen,
        "cpu_us": {role: 1e6 * sum(reading.cpu[role] for reading in readings) / len(sample_ids) for role in roles},
    }


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """In Markdown."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> tuple[str, float]:
    """Turn by turn, as text; and their median."""
    found = [one / other for one, other in zip(mine, theirs, strict=True)]
    return ", ".join(f"{ratio:.2f}" for ratio in found), statistics.median(found)
