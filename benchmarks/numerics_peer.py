"""The gradient errors of `online-dynamic-batching` 0.1.2, in its own environment, run by each rank; numerics.py starts it.

Batches and loss scale are the package's, used as its documentation says (`pop_step_info`, then `loss * info.loss_scale`); its
keys are passed on by the collate. Gradients are averaged over the ranks here, and over the micro-batches that a window really
has, which is just what DistributedDataParallel does where ranks make equal numbers of steps. A rank that has run out adds zero,
where the package would leave the others waiting.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import leave, of_all_ranks, position
from numerics_reference import Reference, Samples, network_for, pad

KEYS = ("total_batch_size", "odb_total_tokens")
SGD_RATE, SGD_MOMENTUM = 0.1, 0.9  # as in numerics_fits.py


class Identified(torch.utils.data.Dataset[dict[str, Any]]):
    """Its samples know their index."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index] | {"sample_id": index}


def pad_and_forward(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    forwarded = {key: torch.tensor(samples[0][key]) for key in KEYS if key in samples[0]}
    return pad(samples) | forwarded | {"sample_ids": torch.tensor([sample["sample_id"] for sample in samples])}


def windows_of(batches: Iterator[Any], accumulate: int) -> Iterator[list[Any]]:
    """Up to `accumulate` batches, None where this rank has none while another has, until no rank has any."""
    window: list[Any] = []
    while True:
        batch = next(batches, None)
        if not any(of_all_ranks(batch is not None)):
            break
        window.append(batch)
        if len(window) == accumulate:
            yield window
            window = []
    if window:
        yield window


def gradient_errors(samples: Samples, mode: str, shard: list[int], accumulate: int, l_max: int, window: int) -> dict[str, Any]:
    os.environ["ODB_ITERATOR_STARTUP_JITTER_SEC"] = "0"  # else a random sleep
    import odb

    world_size = dist.get_world_size()
    network, reference = network_for(samples), Reference(samples)
    optimizer = torch.optim.SGD(network.parameters(), lr=SGD_RATE, momentum=SGD_MOMENTUM)
    loader = odb.ODBDataLoader(
        Identified(samples),
        token_budget=l_max,
        buffer_size=window,
        batch_size=1,
        sampler=shard,
        num_workers=1,
        prefetch_factor=window,
        collate_fn=pad_and_forward,
        loss_scaling=mode,
        join=True,
    )
    errors, trained, steps, idle = list[float | None](), list[int](), 0, 0
    for batches in windows_of(iter(loader), accumulate):
        network.zero_grad(set_to_none=False)
        mine: list[int] = []
        for batch in batches:
            if batch is None:
                continue
            info = odb.pop_step_info(batch, loss_scaling=mode)
            mine += batch.pop("sample_ids").tolist()
            (network.mean_loss(batch) * info.loss_scale).backward()
        for parameter in network.parameters():
            if parameter.grad is None:  # this rank has never had a batch
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size * len(batches)
        ids = [index for rank in of_all_ranks(mine) for index in rank]
        if dist.get_rank() == 0:
            errors.append(reference.error(network, ids))
        optimizer.step()
        trained += ids
        steps += len(batches)
        idle += sum(of_all_ranks(sum(batch is None for batch in batches)))
    return {
        "loader": "odb-0.1.2",
        "mode": mode,
        "precision": "32-true",
        "k": accumulate,
        "steps": steps,
        "idle_steps": idle,
        "trained": len(trained),
        "errors": errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=Path, required=True, help="written by Samples.save")
    parser.add_argument("--shards", type=Path, required=True, help="torch.save'd: the sample ids of each rank")
    parser.add_argument("--mode", choices=("exact", "approx"), required=True)
    parser.add_argument("--accumulate", type=int, required=True)
    parser.add_argument("--l-max", type=int, required=True)
    parser.add_argument("--window", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="for rank 0")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, _ = position()
    shard = torch.load(options.shards)[rank]
    samples = Samples.load(options.samples)
    found = gradient_errors(samples, options.mode, shard, options.accumulate, options.l_max, options.window)
    if rank == 0:
        torch.save(found, options.out)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
