"""Samples per second of the loader alone, beside a plain fixed-batch `DataLoader` with the same workers.

    python benchmarks/loader_rate.py                                               # one rank
    torchrun --standalone --nproc-per-node 2 benchmarks/loader_rate.py             # two

The two take turns in one run, and what counts is the ratio within a turn: single times on a shared machine say little.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from odb_lightning import ODBDataLoader, ShardedSampler

MEAN_LENGTH, L_MAX, FIXED_BATCH = 500, 8192, 16
PAD_VALUES = {"input_ids": 0, "labels": -100, "attention_mask": 0}


class Synthetic(Dataset[dict[str, torch.Tensor]]):
    """Three int64 tensors a sample, of lognormal length; two fifths of the labels are masked."""

    def __init__(self, num_samples: int, cv: float) -> None:
        variance = math.log(1 + cv * cv)
        drawn = np.random.default_rng(0).lognormal(math.log(MEAN_LENGTH) - variance / 2, math.sqrt(variance), num_samples)
        self.lengths = np.clip(np.rint(drawn), 8, L_MAX).astype(int)
        self.ids = torch.arange(1, L_MAX + 1)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = int(self.lengths[index])
        ids = self.ids[:length].clone()
        labels = ids.clone()
        labels[: 2 * length // 5] = -100
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones(length, dtype=torch.int64)}


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The usual pad collate."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    batch = {key: torch.full((len(samples), longest), value) for key, value in PAD_VALUES.items()}
    for row, sample in enumerate(samples):
        for key, values in batch.items():
            values[row, : len(sample[key])] = sample[key]
    return batch


def plain_batches(dataset: Synthetic, num_workers: int, rank: int, world_size: int) -> Iterable[Any]:
    sampler = ShardedSampler(len(dataset), rank=rank, world_size=world_size)
    return DataLoader(
        dataset, batch_size=FIXED_BATCH, sampler=sampler, num_workers=num_workers, prefetch_factor=4, collate_fn=pad
    )


def odb_batches(dataset: Synthetic, num_workers: int, rank: int, world_size: int) -> Iterable[Any]:
    with ODBDataLoader(dataset, l_max=L_MAX, collate_fn=pad, num_workers=num_workers, num_supervised_fn="causal") as loader:
        yield from (batch.data for batch in loader if not batch.step.is_idle)


def samples_per_second(batches: Iterable[Any]) -> tuple[float, float]:
    """Of all ranks together, start included; and the share of padding."""
    _barrier()
    begin, rows, padded, real = time.perf_counter(), 0, 0, 0
    for batch in batches:
        rows += len(batch["input_ids"])
        padded += batch["input_ids"].numel()
        real += int(batch["attention_mask"].sum())
    counts = torch.tensor([rows, padded, real], dtype=torch.float64)
    slowest = torch.tensor([time.perf_counter() - begin])
    if dist.is_initialized():
        dist.all_reduce(counts)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(counts[0] / slowest), float(1 - counts[2] / counts[1])


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-samples", type=int, default=20_000)
    parser.add_argument("--cv", type=float, nargs="+", default=[0.3, 0.5, 1.0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        dist.init_process_group("gloo")
    if rank == 0:
        print("| ranks | workers | CV | plain, samples/s | ODB, samples/s | ratio per turn | median ratio | padding |")
        print("|---|---|---|---|---|---|---|---|")
    for cv in options.cv:
        dataset = Synthetic(options.num_samples, cv)
        for num_workers in options.workers:
            where = (dataset, num_workers, rank, world_size)
            turns = []
            for _ in range(options.turns):
                turns.append((samples_per_second(plain_batches(*where)), samples_per_second(odb_batches(*where))))
            plain, odb = ([turn[index][0] for turn in turns] for index in (0, 1))
            ratios = [mine / theirs for theirs, mine in zip(plain, odb, strict=True)]
            padding = f"{turns[0][0][1]:.1%} -> {turns[0][1][1]:.1%}"
            if rank == 0:
                rates = f"{statistics.median(plain):,.0f} | {statistics.median(odb):,.0f}"
                each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
                median = f"**{statistics.median(ratios):.2f}**"
                print(f"| {world_size} | {num_workers} | {cv} | {rates} | {each} | {median} | {padding} |", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
