"""How a loader starts, how long a training loop waits for it, and how many samples it holds meanwhile: from outside.

    python benchmarks/stalls.py                                                    # one rank
    torchrun --standalone --nproc-per-node 2 benchmarks/stalls.py                  # two

The loop sleeps where a model would compute.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from loader_rate import DataOfBatches, odb_loader, peer_pass
from measuring import Reading, consume, leave, of_all_ranks, position, summary, table, together
from peers import EARLY_STEPS, stall_figures
from samples import KINDS, LAWS, Shard, Tokens, plain_loader
from torch.utils.data import Dataset, get_worker_info

_TOKENS = KINDS["tokens"]
_MOST_WORKERS = 64
_BYTES_PER_TOKEN = 3 * 8
_BATCHES_HELD = 16 + 8
"""Collated for one exchange, and ready in the ring, as the docstring of `ODBDataLoader` has it."""
_PEER_SECONDS = 300.0


class Counted(Dataset[Any]):
    """Counts the samples that were fetched, and their tokens, in memory that all processes see."""

    def __init__(self, dataset: Tokens) -> None:
        self.dataset = dataset
        self.lengths = dataset.lengths
        self.counts = torch.zeros(_MOST_WORKERS, 2, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        sample = self.dataset[index]
        count = self.counts[0 if worker is None else worker.id]  # no other process writes there
        count += torch.tensor([1, int(self.lengths[index])])
        return sample


class InFlight:
    """Samples and tokens fetched, less those the loop has got: the most there were at a batch."""

    def __init__(self, dataset: Counted) -> None:
        self._dataset = dataset
        self._tokens = 0
        self._samples = 0
        self.most = [0, 0]

    def __call__(self, reading: Reading) -> None:
        fetched = self._dataset.counts.sum(0).tolist()
        self._tokens += int(self._dataset.lengths[reading.sample_ids[self._samples :]].sum())
        self._samples = len(reading.sample_ids)
        self.most = [max(self.most[0], fetched[0] - self._samples), max(self.most[1], fetched[1] - self._tokens)]


def one_pass(
    name: str, num_samples: int, law: str, num_workers: int, step_seconds: float, rank: int, world_size: int
) -> dict[str, Any]:
    dataset = Counted(Tokens(num_samples, law))
    shard, in_flight = Shard(num_samples, rank, world_size), InFlight(dataset)
    window = depth = None
    together()
    if name == "odb":
        with odb_loader(_TOKENS, dataset, num_workers, shard) as loader:
            observed: list[int] = []

            def on_batch(reading: Reading) -> None:
                observed.append(loader.stats.length_count if not observed else 0)
                in_flight(reading)

            reading = consume(DataOfBatches(loader), step_seconds=step_seconds, on_batch=on_batch)
            window, depth = observed[0], loader.stats.outstanding_depth
    else:
        loader = plain_loader(_TOKENS, dataset, num_workers, shard, _TOKENS.collate)
        reading = consume(loader, step_seconds=step_seconds, on_batch=in_flight)
    readings = of_all_ranks(reading)
    shards = [Shard(num_samples, other, world_size) for other in range(world_size)]
    figures = summary(readings, dataset) | stall_figures(readings, shards, dataset.dataset)
    most = of_all_ranks(in_flight.most)
    figures |= {"in_flight": max(samples for samples, _ in most), "tokens_in_flight": max(tokens for _, tokens in most)}
    if name == "odb":
        rows = max(rows for other in readings for rows, _ in other.shapes)
        figures |= {"first_window": of_all_ranks(window), "most_rows": rows}
        figures["bound"] = depth + _BATCHES_HELD * rows
        figures["tokens_bound"] = depth * float(dataset.lengths.mean()) + _BATCHES_HELD * _TOKENS.l_max
    return figures


def measure(options: argparse.Namespace, rank: int, world_size: int) -> list[dict[str, Any]]:
    found = []
    for step_ms in options.step_ms:
        for num_workers in options.workers:
            for name in options.loaders:
                where = (options.law, num_workers, step_ms / 1000, rank, world_size)
                figures: dict[str, Any] | None = one_pass(name, options.num_samples, *where)
                found.append(
                    {"loader": name, "workers": num_workers, "step_ms": step_ms, "ranks": world_size, "figures": figures}
                )
        if options.peers is not None:
            figures = None
            if rank == 0:
                cell = {"law": options.law, "num_samples": options.peer_samples or options.num_samples, "step_ms": step_ms}
                figures = peer_pass(options.peers, "odb-0.1.2", world_size, _PEER_SECONDS, **cell)
            found.append({"loader": "odb-0.1.2", "workers": 1, "step_ms": step_ms, "ranks": world_size, "figures": figures})
            together()
        if rank == 0:
            print(f"{world_size} ranks, step of {step_ms} ms: done", file=sys.stderr, flush=True)
    return found


def page(found: list[dict[str, Any]]) -> str:
    headings = ["ranks", "workers", "step, ms", "loader", "first batch, s", "first window", "first batch reaches"]
    headings += [f"padding, first {EARLY_STEPS} batches", "padding, all", "share of time waited", "longest wait, ms"]
    headings += ["samples in flight", "at most, by the formula", "MB", "at most"]
    rows = []
    for cell in found:
        row = [cell["ranks"], cell["workers"], f"{cell['step_ms']:g}", cell["loader"]]
        figures = cell["figures"]
        if figures is None:
            rows.append([*row, "failed", *[""] * 10])
            continue
        window, reach = (", ".join(f"{n:,}" for n in figures.get(key, [])) for key in ("first_window", "first_batch_reach"))
        row += [f"{figures['first_batch']:.2f}", window or "-", reach]
        row += [f"{figures['early_padding']:.1%}", f"{figures['padding']:.1%}"]
        row += [f"{figures['wait_share']:.2%}", f"{1000 * figures['longest_wait']:.0f}"]
        for key, scale, form in (("", 1, ",.0f"), ("tokens_", _BYTES_PER_TOKEN / 1e6, ",.1f")):
            for name in (f"{key}in_flight", f"{key}bound"):
                row.append(format(scale * figures[name], form) if name in figures else "-")
        rows.append(row)
    return table(headings, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loaders", nargs="+", choices=("odb", "plain"), default=["odb", "plain"])
    parser.add_argument("--law", choices=LAWS, default="0.5")
    parser.add_argument("--num-samples", type=int, default=5_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[50, 10])
    parser.add_argument("--peers", metavar="PYTHON", help="the interpreter of an environment that has odb-0.1.2")
    parser.add_argument("--peer-samples", type=int)
    parser.add_argument("--json", type=Path, help="a file for the raw figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = position()
    found = measure(options, rank, world_size)
    if rank == 0:
        print(page(found))
        if options.json is not None:
            options.json.write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
