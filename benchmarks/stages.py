"""Processor time per sample of each stage on a sample's way, measured in one process.

    python benchmarks/stages.py

A window of samples after the other goes through the functions that workers, collate process and training process use, in
their order, with a real slab and ring between them; waiting and the processes themselves are left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import pickle
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from measuring import table
from samples import KINDS, Kind

from odb_lightning import StepInfo
from odb_lightning.loader_options import length_of_input_ids
from odb_lightning.plan import RoundPlanner
from odb_lightning.runtime.codec import pack_samples, unpack_samples
from odb_lightning.runtime.collate_process import MAX_READY_BATCHES
from odb_lightning.runtime.counting import TargetCounter
from odb_lightning.runtime.ring import BatchReceiver, BatchSender, SharedMemory
from odb_lightning.runtime.seeding import derive_seed, seed_everything_local
from odb_lightning.runtime.slab import Slab, make_slabs

STAGES = (
    ("worker", "getitem"),
    ("worker", "seeding"),
    ("worker", "length"),
    ("worker", "pack"),
    ("worker", "message"),
    ("collate process", "take out"),
    ("collate process", "unpack"),
    ("collate process", "planning"),
    ("collate process", "collate (the user's)"),
    ("collate process", "counting"),
    ("collate process", "encode and ring"),
    ("trainer", "receive"),
)
_CHUNK_SIZE = 64
_RING_BYTES = 128 * 2**20
"""More than the loader's, whose batches of more than 16 MB go through a pipe: here, nobody would read it meanwhile."""
_LAW = "0.5"
NUM_SAMPLES = {"tokens": 8192, "images": 512, "objects": 8192}


class _Pass:
    """One epoch of one rank, each stage timed by the clock of this process's processor time."""

    def __init__(self, kind: Kind, num_samples: int) -> None:
        self._kind = kind
        self._dataset = kind.dataset(num_samples, _LAW)
        self._spent: dict[str, float] = defaultdict(float)
        slabs = make_slabs(1)
        self._room = () if slabs is None else (Slab(slabs, 0).new_bytes,)
        self._planner = RoundPlanner(l_max=kind.l_max, buffer_size=kind.buffer_size, order_seed="0/0")
        self._counter = TargetCounter("causal")
        memory, (here, there) = SharedMemory(_RING_BYTES), multiprocessing.Pipe()
        self._sender, self._receiver = BatchSender(there, memory, MAX_READY_BATCHES), BatchReceiver(here, memory, False)
        self._arrived: deque[tuple[int, Any]] = deque()
        self._held: dict[int, Any] = {}
        self._num_steps = 0

    def run(self) -> dict[str, float]:
        """Microseconds per sample, by stage."""
        num_samples, start = len(self._dataset), 0
        trained = 0
        while trained < num_samples:
            while self._planner.room > 0 and (self._arrived or start < num_samples):
                if not self._arrived:
                    self._fetch(range(start, min(start + _CHUNK_SIZE, num_samples)))
                    start += _CHUNK_SIZE
                length, sample = self._arrived.popleft()
                self._held[self._timed("planning", self._planner.observe, length)] = sample
            trained += self._round(is_exhausted=start >= num_samples and not self._arrived)
        return {stage: 1e6 * self._spent[stage] / num_samples for _, stage in STAGES}

    def _timed(self, stage: str, action: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.process_time()
        result = action(*arguments)
        self._spent[stage] += time.process_time() - begin
        return result

    def _fetch(self, indices: range) -> None:
        """As a worker does, and as its message arrives."""
        self._timed("seeding", lambda: [seed_everything_local(derive_seed("0/0", "sample", index)) for index in indices])
        samples = self._timed("getitem", lambda: [self._dataset[index] for index in indices])
        lengths = self._timed("length", lambda: [length_of_input_ids(sample) for sample in samples])
        packed = self._timed("pack", pack_samples, samples, *self._room)
        message = self._timed("message", lambda: bytes(ForkingPickler.dumps((list(indices), lengths, packed))))
        _, lengths, packed = self._timed("take out", pickle.loads, message)
        self._arrived += zip(lengths, self._timed("unpack", unpack_samples, packed), strict=True)

    def _round(self, is_exhausted: bool) -> int:
        """As the collate process does, and as its batches arrive."""
        plan = self._timed("planning", lambda: self._planner.settle(self._planner.report(is_exhausted=is_exhausted)))
        for group in plan.groups:
            samples = [self._held.pop(ticket) for ticket in group]
            data = self._timed("collate (the user's)", self._kind.collate, samples)
            targets = self._timed("counting", self._counter, data, len(group))
            self._timed("encode and ring", self._send, group, targets, data)
            self._timed("receive", self._receiver.receive)
        return sum(map(len, plan.groups))

    def _send(self, group: list[int], targets: float, data: Any) -> None:
        longest = len(data["input_ids"][0])
        info = StepInfo(
            epoch=0,
            step=self._num_steps,
            is_idle=False,
            sample_ids=tuple(group),
            num_samples=len(group),
            num_tokens_real=len(group) * longest,
            num_tokens_padded=len(group) * longest,
            num_tokens_supervised=targets,
            max_length=longest,
            global_num_samples=len(group),
            global_num_tokens_supervised=targets,
            window_num_tokens_supervised=targets,
            window_num_samples=len(group),
        )
        self._num_steps += 1
        self._sender.send("batch", (info, None), data)


def measure(kinds: list[str], num_samples: int | None, repeats: int) -> dict[str, list[dict[str, float]]]:
    """By kind of samples, the figures of each repetition. A first pass, to warm up, is left out."""
    found = {}
    for name in kinds:
        found[name] = []
        for repeat in range(repeats + 1):
            spent = _Pass(KINDS[name], num_samples or NUM_SAMPLES[name]).run()
            gc.collect()
            if repeat:
                found[name].append(spent)
    return found


def page(found: dict[str, list[dict[str, float]]]) -> str:
    medians = {
        kind: {stage: statistics.median(one[stage] for one in repeats) for _, stage in STAGES}
        for kind, repeats in found.items()
    }
    rows: list[list[Any]] = [[where, stage, *(f"{of[stage]:.1f}" for of in medians.values())] for where, stage in STAGES]
    for process in dict.fromkeys(where for where, _ in STAGES):
        totals = (sum(of[stage] for where, stage in STAGES if where == process) for of in medians.values())
        rows.append([process, "**together**", *(f"**{total:.1f}**" for total in totals)])
    rows.append(["all", "**together**", *(f"**{sum(of.values()):.1f}**" for of in medians.values())])
    return "Microseconds of processor time per sample, median of the repetitions.\n\n" + table(
        ["process", "stage", *medians], rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--num-samples", type=int, help="by default 8192, of images 512")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="a file for the raw figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.kinds, options.num_samples, options.repeats)
    print(page(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
