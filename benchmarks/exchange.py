"""What ranks exchange: the time of a round between real processes, and its bytes for any number of simulated ranks.

python benchmarks/exchange.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import table
from samples import BUFFER_SIZE, SCHEDULE_L_MAX
from schedule import simulated_rows

from odb_lightning.plan import matching
from odb_lightning.plan.protocol import REPORT_SIZE
from odb_lightning.runtime.gloo import GlooExchange
from odb_lightning.runtime.presence import Presence
from odb_lightning.runtime.settings import StoreAddress, Timeouts

_BLOCK_STEPS = 16
_REPORT_WORDS = REPORT_SIZE + 1 + matching.NUM_QUANTILES
_SUM_WORDS = 3 * _BLOCK_STEPS + 2
_GATHERED_WORDS = 2 + 2 * BUFFER_SIZE
_WORD_BYTES = 8
_LIMIT_SECONDS = 120.0
OPERATIONS = ("report, all_reduce MAX", "sums of 16 steps, all_reduce SUM", "the authors' message, all_gather")


def _rank_main(rank: int, world_size: int, num_rounds: int, connection: Connection) -> None:
    """One rank: its address comes, and the seconds of each operation go, through `connection`."""
    torch.set_num_threads(1)
    port = connection.recv()
    limits = Timeouts(setup=_LIMIT_SECONDS, exchange=_LIMIT_SECONDS)
    exchange = GlooExchange(StoreAddress("bench", host="127.0.0.1", port=port), rank, world_size, limits, Presence())
    exchange.meet()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    group = dist.ProcessGroupGloo(dist.PrefixStore("gather", store), rank, world_size, timedelta(seconds=_LIMIT_SECONDS))
    report, sums = list(range(_REPORT_WORDS)), [1.0] * _SUM_WORDS
    mine = torch.zeros(_GATHERED_WORDS, dtype=torch.int64)
    gathered = [[torch.zeros_like(mine) for _ in range(world_size)]]
    spent = []
    for _ in range(num_rounds):
        marks = [time.perf_counter()]
        for operation in (
            lambda: exchange.all_reduce_max(report),
            lambda: exchange.all_reduce_sum(sums),
            lambda: group.allgather(gathered, [mine]).wait(),
        ):
            operation()
            marks.append(time.perf_counter())
        spent.append([end - begin for begin, end in itertools.pairwise(marks)])
    connection.send(spent)
    exchange.finish()
    exchange.close()
    connection.recv()  # until all have sent


def time_rounds(world_size: int, num_rounds: int) -> list[list[float]]:
    """Seconds of each of the `OPERATIONS` in each round and on each rank, one rank after the other."""
    # By fork where that can be, as the import takes seconds; the store, and its thread, only then.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    connections, processes = [], []
    for rank in range(world_size):
        here, there = context.Pipe()
        process = context.Process(target=_rank_main, args=(rank, world_size, num_rounds, there), daemon=True)
        process.start()
        there.close()
        connections.append(here)
        processes.append(process)
    try:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for connection in connections:
            connection.send(store.port)
        deadline, spent = time.monotonic() + _LIMIT_SECONDS, []
        for rank, connection in enumerate(connections):
            if not connection.poll(max(deadline - time.monotonic(), 0.0)):
                raise RuntimeError(f"rank {rank} of {world_size} gave no figures within {_LIMIT_SECONDS:.0f} seconds")
            spent += connection.recv()
        for connection in connections:
            connection.send(None)
        for process in processes:
            process.join(10.0)
        return spent
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def simulate_bytes(world_size: int, samples_per_rank: int) -> dict[str, Any]:
    """Rounds and bytes of an epoch, by odb-simulate."""
    overrides = [f"lengths.n={world_size * samples_per_rank}", f"world_size={world_size}", f"odb.l_max={SCHEDULE_L_MAX}"]
    row = simulated_rows(overrides)["matched"]
    names = ("steps", "rounds", "bytes_per_round", "gathered_bytes_per_round", "schedule_efficiency", "schedule_bound")
    return {"ranks": world_size, "samples_per_rank": samples_per_rank, **{name: row[name] for name in names}}


def page(found: dict[str, Any]) -> str:
    rows: list[list[Any]] = []
    for cell in found["times"]:
        for operation, seconds in zip(OPERATIONS, zip(*cell["seconds"], strict=True), strict=True):
            ordered = sorted(1e6 * value for value in seconds)
            rows.append(
                [cell["ranks"], operation, f"{statistics.median(ordered):,.0f}", f"{ordered[9 * len(ordered) // 10]:,.0f}"]
            )
    text = "Between processes on this machine, over the loopback device.\n\n"
    text += table(["ranks", "operation", "median, us", "90 % below, us"], rows)
    text += "\nSimulated, lognormal lengths (mean 600, CV 0.5): bytes that a rank receives in a round.\n\n"
    headings = [
        "ranks",
        "samples a rank",
        "rounds",
        "steps",
        "bytes, ODB",
        "bytes, gathered (0.1.2)",
        "ratio",
        "schedule efficiency",
    ]
    rows = []
    for cell in found["bytes"]:
        mine, theirs = cell["bytes_per_round"], cell["gathered_bytes_per_round"]
        row = [
            f"{cell['ranks']:,}",
            f"{cell['samples_per_rank']:,}",
            cell["rounds"],
            cell["steps"],
            f"{mine:,.0f}",
            f"{theirs:,}",
        ]
        rows.append([*row, f"{theirs / mine:,.0f}", f"{cell['schedule_efficiency']:.4f}"])
    return text + table(headings, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real-ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--simulated-ranks", type=int, nargs="+", default=[2, 8, 64, 256, 1024])
    parser.add_argument("--samples-per-rank", type=int, default=2048)
    parser.add_argument("--json", type=Path, help="a file for the raw figures")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    found: dict[str, Any] = {"operations": OPERATIONS, "times": [], "bytes": []}
    for world_size in options.real_ranks:
        found["times"].append({"ranks": world_size, "seconds": time_rounds(world_size, options.rounds)})
        print(f"{world_size} ranks: timed", file=sys.stderr, flush=True)
    for world_size in options.simulated_ranks:
        found["bytes"].append(simulate_bytes(world_size, options.samples_per_rank))
        print(f"{world_size} ranks: simulated", file=sys.stderr, flush=True)
    print(page(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
