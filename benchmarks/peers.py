"""A pass over another package's loader, in that package's own environment; the same samples, collate and loop.

    peers/bin/python benchmarks/peers.py --loader odb-0.1.2 --law 0.5                                   # one rank
    peers/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/peers.py ...   # two

Prints one line of JSON. How to make the environment says run.py. `bucketing` and `group-by-length` get all lengths
beforehand, which an online loader does not have.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from measuring import Reading, consume, leave, of_all_ranks, position, summary, together
from samples import BUFFER_SIZE, KINDS, L_MAX, LAWS, Shard, Tokens, pad
from torch.utils.data import DataLoader, Dataset

FIXED_BATCH = KINDS["tokens"].fixed_batch
EARLY_STEPS = 20


def _pad_and_forward(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The package's exact loss needs two keys of its own passed on."""
    batch = pad(samples)
    keys = ("total_batch_size", "odb_total_tokens")
    return batch | {key: torch.tensor(samples[0][key]) for key in keys if key in samples[0]}


def odb_012(dataset: Tokens, num_workers: int, rank: int, world_size: int) -> Iterable[Any]:
    """The authors' package, with prefetch enough for its window, and without its random sleep at the start."""
    os.environ["ODB_ITERATOR_STARTUP_JITTER_SEC"] = "0"
    import odb

    return odb.ODBDataLoader(
        dataset,
        token_budget=L_MAX,
        buffer_size=BUFFER_SIZE,
        batch_size=1,
        sampler=Shard(len(dataset), rank, world_size),
        num_workers=num_workers,
        prefetch_factor=max(2, math.ceil(BUFFER_SIZE / num_workers)),
        collate_fn=_pad_and_forward,
        loss_scaling="exact",
        join=True,
    )


@dataclass
class _Example:
    """As the sampler wants it."""

    id: str
    index: int
    num_tokens: int


class _Batches(Dataset[Any]):
    """Takes a batch of examples as one index."""

    def __init__(self, dataset: Tokens) -> None:
        self.dataset = dataset

    def __getitem__(self, examples: Sequence[_Example]) -> dict[str, Any]:
        return pad([self.dataset[example.index] for example in examples])


def bucketing(dataset: Tokens, num_workers: int, rank: int, world_size: int) -> Iterable[Any]:
    """lhotse's DynamicBucketingSampler with its defaults, by tokens."""
    from lhotse.dataset.sampling import DynamicBucketingSampler
    from lhotse.dataset.sampling.base import TokenConstraint

    lengths = dataset.lengths.tolist()
    sampler = DynamicBucketingSampler(
        [_Example(str(index), index, lengths[index]) for index in Shard(len(dataset), 0, 1)],
        constraint=TokenConstraint(max_tokens=L_MAX),
        shuffle=True,
        drop_last=False,
        rank=rank,
        world_size=world_size,
    )
    return DataLoader(
        _Batches(dataset),
        batch_size=None,
        sampler=sampler,
        num_workers=num_workers,
        prefetch_factor=4,
        persistent_workers=True,
    )


def group_by_length(dataset: Tokens, num_workers: int, rank: int, world_size: int) -> Iterable[Any]:
    """The sampler of transformers' Trainer."""
    from transformers.trainer_pt_utils import DistributedLengthGroupedSampler, LengthGroupedSampler

    lengths = dataset.lengths.tolist()
    sampler: Any
    if world_size == 1:
        sampler = LengthGroupedSampler(FIXED_BATCH, lengths=lengths)
    else:
        sampler = DistributedLengthGroupedSampler(FIXED_BATCH, num_replicas=world_size, rank=rank, lengths=lengths)
    return DataLoader(
        dataset,
        batch_size=FIXED_BATCH,
        sampler=sampler,
        num_workers=num_workers,
        prefetch_factor=4,
        collate_fn=pad,
        persistent_workers=True,
    )


LOADERS: dict[str, Callable[..., Iterable[Any]]] = {
    "odb-0.1.2": odb_012,
    "bucketing": bucketing,
    "group-by-length": group_by_length,
}


def stall_figures(readings: Sequence[Reading], shards: Sequence[Shard], dataset: Tokens) -> dict[str, Any]:
    """How a pass starts, and what it waits for."""
    reach, early_real, early_padded = [], 0, 0
    for reading, shard in zip(readings, shards, strict=True):
        place = {sample_id: number for number, sample_id in enumerate(shard.views, 1)}
        reach.append(max(place[sample_id] for sample_id in reading.sample_ids[: reading.shapes[0][0]]))
        early = reading.shapes[:EARLY_STEPS]
        early_real += int(sum(dataset.lengths[i] for i in reading.sample_ids[: sum(rows for rows, _ in early)]))
        early_padded += sum(rows * length for rows, length in early)
    return {
        "first_batch_reach": reach,
        "early_padding": 1 - early_real / early_padded,
        "wait_share": max(reading.wait / (reading.seconds - reading.first_batch) for reading in readings),
        "longest_wait": max(reading.longest_wait for reading in readings),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loader", choices=LOADERS, required=True)
    parser.add_argument("--law", choices=LAWS, default="0.5")
    parser.add_argument("--num-samples", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=0.0, help="the loop sleeps so long for each batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = position()
    dataset = Tokens(options.num_samples, options.law)
    batches = LOADERS[options.loader](dataset, options.workers, rank, world_size)
    together()
    readings = of_all_ranks(consume(batches, step_seconds=options.step_ms / 1000))
    if rank == 0:
        shards = [Shard(len(dataset), rank, world_size) for rank in range(world_size)]
        figures = summary(readings, dataset)
        if options.loader == "odb-0.1.2":  # the others do not take samples in an order of ours
            figures |= stall_figures(readings, shards, dataset)
        print(json.dumps(figures), flush=True)
    together()
    leave()


if __name__ == "__main__":
    main()
