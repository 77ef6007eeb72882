"""Samples per second of the loader alone, and processor time per sample, beside other loaders of the same samples.

    python benchmarks/loader_rate.py                                               # one rank
    torchrun --standalone --nproc-per-node 2 benchmarks/loader_rate.py             # two
    python benchmarks/loader_rate.py --peers peers/bin/python                      # with other packages (see run.py)

* plain: a torch `DataLoader` with a fixed batch, the same workers, samples and collate.
* arrays: the same, but its collate gives numpy arrays, which are pickled, in place of tensors, whose descriptors are passed.
* other packages: see peers.py.

They take turns in one run, and what counts is the ratio within a turn: single times on a shared machine say little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measuring import consume, end_all, leave, of_all_ranks, position, ratios, summary, table, together
from samples import KINDS, LAWS, Kind, Shard, plain_loader

from odb_lightning import ODBDataLoader

PEERS = ("odb-0.1.2", "bucketing", "group-by-length")
_PEER_SECONDS = 120.0
_ROLES = ("trainer", "children", "grandchildren")


class DataOfBatches:
    """An `ODBDataLoader` as the others are: it gives what `collate_fn` made, idle steps left out."""

    def __init__(self, loader: ODBDataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return (batch.data for batch in self.loader if not batch.step.is_idle)


def odb_loader(kind: Kind, dataset: Any, num_workers: int, shard: Shard, **options: Any) -> ODBDataLoader:
    """With its defaults, but for what the `kind` says."""
    return ODBDataLoader(
        dataset,
        l_max=kind.l_max,
        buffer_size=kind.buffer_size,
        collate_fn=kind.collate,
        sampler=shard,
        num_workers=num_workers,
        num_supervised_fn="causal",
        **options,
    )


def one_pass(name: str, kind: Kind, dataset: Any, num_workers: int, rank: int, world_size: int) -> dict[str, Any]:
    """Figures of a pass of all ranks over one of our loaders."""
    shard = Shard(len(dataset), rank, world_size)
    together()
    if name == "odb":
        with odb_loader(kind, dataset, num_workers, shard) as loader:
            reading = consume(DataOfBatches(loader))
    else:
        collate = kind.collate_arrays if name == "arrays" else kind.collate
        reading = consume(plain_loader(kind, dataset, num_workers, shard, collate))
    return summary(of_all_ranks(reading), dataset)


def peer_pass(python: str, name: str, world_size: int, seconds: float = _PEER_SECONDS, **options: Any) -> dict[str, Any] | None:
    """The same of one of the peers, in a process of its own; None, with a word on stderr, if it fails."""
    command = [python]
    if world_size > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command += [str(Path(__file__).with_name("peers.py")), "--loader", name]
    command += [part for option, value in options.items() for part in (f"--{option.replace('_', '-')}", str(value))]
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(launchers)}
    # A session of its own, so that all of its processes can be ended.
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            end_all(process)
            out, errors = "", f"no end within {seconds:.0f} seconds"
        except BaseException:
            end_all(process)
            raise
    if process.returncode == 0 and out:
        figures: dict[str, Any] = json.loads(out.splitlines()[-1])
        return figures
    print(f"{name} failed: {errors.strip()[-2000:]}", file=sys.stderr, flush=True)
    return None


def cells(options: argparse.Namespace) -> Iterator[tuple[str, str, int, int]]:
    """Kind, law, number of samples and of workers."""
    for name in options.kinds:
        num_samples = options.num_samples or KINDS[name].num_samples
        for law in options.laws if name == "tokens" else ["-"]:
            for num_workers in options.workers:
                yield name, law, num_samples, num_workers


def measure(options: argparse.Namespace, rank: int, world_size: int) -> list[dict[str, Any]]:
    """For each cell the figures of every loader, turn by turn."""
    found = []
    for name, law, num_samples, num_workers in cells(options):
        kind = KINDS[name]
        dataset = kind.dataset(num_samples, law)
        takes_peers = options.peers is not None and name == "tokens"
        turns: dict[str, list[Any]] = {loader: [] for loader in ("odb", "plain", "arrays")}
        if takes_peers:
            turns |= {peer: [] for peer in options.peer_names}
        for _ in range(options.turns):
            for loader, figures in turns.items():
                if loader not in PEERS:
                    figures.append(one_pass(loader, kind, dataset, num_workers, rank, world_size))
                elif rank == 0:
                    size = options.peer_samples or num_samples if loader == "odb-0.1.2" else num_samples
                    found_there = peer_pass(options.peers, loader, world_size, law=law, num_samples=size, workers=num_workers)
                    figures.append(found_there)
                together()
        cell = {"kind": name, "law": law, "ranks": world_size, "workers": num_workers, "turns": turns}
        found.append(cell)
        if rank == 0:
            print(f"{world_size} ranks, {num_workers} workers, {name} {law}: {_short(cell)}", file=sys.stderr, flush=True)
    return found


def _short(cell: dict[str, Any]) -> str:
    return ", ".join(f"{loader} {rate:,.0f}/s" for loader in cell["turns"] if (rate := _median(cell, loader)) is not None)


def _complete(cell: dict[str, Any], loader: str) -> bool:
    turns = cell["turns"].get(loader, [None])
    return bool(turns) and None not in turns


def _rates(cell: dict[str, Any], loader: str) -> list[float]:
    return [turn["samples_per_second"] for turn in cell["turns"][loader]]


def _median(cell: dict[str, Any], loader: str) -> float | None:
    return statistics.median(_rates(cell, loader)) if _complete(cell, loader) else None


def _where(cell: dict[str, Any]) -> list[Any]:
    return [cell["ranks"], cell["workers"], cell["law"] if cell["kind"] == "tokens" else cell["kind"]]


def rate_table(found: list[dict[str, Any]]) -> str:
    headings = ["ranks", "workers", "samples", "ODB, /s", "plain, /s", "arrays, /s", "padding, plain", "padding, ODB"]
    headings += ["ODB / plain, per turn", "median", "ODB / arrays, per turn", "median"]
    rows = []
    for cell in found:
        odb = cell["turns"]["odb"][0]
        row = [*_where(cell), *(f"{_median(cell, loader):,.0f}" for loader in ("odb", "plain", "arrays"))]
        row += [f"{cell['turns']['plain'][0]['padding']:.1%}", f"{odb['padding']:.1%}"]
        for loader in ("plain", "arrays"):
            each, median = ratios(_rates(cell, "odb"), _rates(cell, loader))
            row += [each, f"**{median:.2f}**"]
        rows.append(row)
    return table(headings, rows)


def peer_table(found: list[dict[str, Any]]) -> str:
    headings = ["ranks", "workers", "samples", "loader", "number", "/s", "ODB's ratio to it, per turn", "median"]
    headings += ["padding", "steps", "missing", "repeated"]
    rows = []
    for cell in found:
        for loader in cell["turns"]:
            if loader not in PEERS:
                continue
            row = [*_where(cell), loader]
            if _complete(cell, loader):
                each, median = ratios(_rates(cell, "odb"), _rates(cell, loader))
                turn = cell["turns"][loader][0]
                row += [
                    f"{_num_samples(turn):,}",
                    f"{_median(cell, loader):,.0f}",
                    each,
                    f"**{median:.2f}**",
                    f"{turn['padding']:.1%}",
                ]
                row += [f"{turn['steps']:,}", turn["missing"], turn["repeated"]]
            else:
                row += ["", "failed", *[""] * 6]
            rows.append(row)
    return table(headings, rows)


def _num_samples(turn: dict[str, Any]) -> int:
    """Samples in the data set of a turn."""
    return int(turn["samples"] - turn["repeated"] + turn["missing"])


def cpu_table(found: list[dict[str, Any]]) -> str:
    headings = ["ranks", "workers", "samples", "loader", "trainer", "collate process", "workers", "together"]
    rows = []
    for cell in found:
        for loader, turns in cell["turns"].items():
            if not _complete(cell, loader) or set(turns[0]["cpu_us"]) != set(_ROLES):
                continue
            spent = {role: statistics.median(turn["cpu_us"][role] for turn in turns) for role in _ROLES}
            row = [*_where(cell), loader, f"{spent['trainer']:.0f}"]
            if loader == "odb":
                row += [f"{spent['children']:.0f}", f"{spent['grandchildren']:.0f}"]
            else:
                row += ["-", f"{spent['children'] + spent['grandchildren']:.0f}"]
            rows.append([*row, f"**{sum(spent.values()):.0f}**"])
    return table(headings, rows)


def faults(found: list[dict[str, Any]]) -> str:
    """Our own passes that left out or repeated a sample: there has to be none."""
    for cell in found:
        for turn in cell["turns"]["odb"]:
            if turn["missing"] or turn["repeated"]:
                return f"ODB left out {turn['missing']} samples and repeated {turn['repeated']}: {_where(cell)}\n"
    return ""


def page(found: list[dict[str, Any]], peers: bool) -> str:
    parts = ["Samples per second, start of the processes included.\n", rate_table(found), faults(found)]
    if peers:
        parts += ["Other packages.\n", peer_table(found)]
    parts += ["Processor time per sample, microseconds, median of the turns.\n", cpu_table(found)]
    return "\n".join(part for part in parts if part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["tokens"])
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS), help="of the lengths of tokens")
    parser.add_argument("--num-samples", type=int, help="by default what the kind says")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--peers", metavar="PYTHON", help="the interpreter of an environment that has the other packages")
    parser.add_argument("--peer-names", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--peer-samples", type=int, help="fewer for odb-0.1.2, which takes its time")
    parser.add_argument("--json", type=Path, help="a file for the raw figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = position()
    found = measure(options, rank, world_size)
    if rank == 0:
        print(page(found, options.peers is not None))
        if options.json is not None:
            options.json.write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
