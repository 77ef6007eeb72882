"""Runs the loader for a set time with random data, knobs and faults, on real processes; counts what is lost or left behind.

    python benchmarks/soak.py --minutes 20 [--seed 0] [--json FILE]

A trial is W = 1 to 4 ranks that go through up to three epochs each. Without a fault, every view has to be trained exactly
once (non-join: the quota met), in equal numbers of steps and within the budget. With one, every rank has to end in time, all
but those that left by themselves with an error that names the cause. After each trial no process, no shared-memory file and
no descriptor may be left. Endurance trials run one loader for many epochs, and look for growth. Exit status 1 if anything is
lost or left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.data import IterableDataset

from odb_lightning import ODBDataLoader, Timeouts, current_shard

TRIAL_SECONDS = 120.0
GONE_SECONDS = 15.0
TIMEOUTS = Timeouts(setup=60, exchange=60, peer=20, worker=60, batch=60)
FAULTS = (
    "raise in __getitem__",
    "raise in collate_fn",
    "raise in length_fn",
    "raise in the loop",
    "kill worker",
    "kill collate process",
    "kill rank",
    "terminate rank",
    "break alone",
)
HARMLESS = ("break everywhere", "slow rank")


@dataclass(frozen=True)
class Trial:
    seed: int
    lengths: list[int]
    shards: list[list[int]] | None
    options: dict[str, Any]
    kind: str = "map"
    epochs: int = 2
    world_size: int = 1
    disturbance: str | None = None
    victim: int = 0
    at: int = 0
    """The sample, or the step, at which it happens."""


@dataclass
class Tally:
    trials: int = 0
    epochs: int = 0
    steps: int = 0
    samples: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    repeated: int = 0
    wrong: list[str] = field(default_factory=list)
    """Anything else that is not as promised, in words."""
    processes_left: int = 0
    files_left: int = 0
    descriptors_left: int = 0
    slowest: str = ""
    """The trial that took longest, and its disturbance."""
    slowest_seconds: float = 0.0
    memory_growth_mb: float = 0.0
    """Of this process, from the tenth trial on."""


def draw_trial(seed: int) -> Trial:
    rng = random.Random(seed)
    world_size = rng.choice([1, 2, 2, 2, 3, 4])
    count = rng.choice([0, 1, 3, 40, 200, 600])
    spread = rng.choice([0.0, 0.5, 1.0])
    lengths = [max(int(rng.lognormvariate(3, spread)), 1) for _ in range(count)]
    for _ in range(rng.choice([0, 0, 1, 3])):
        lengths.append(rng.choice([0, 0, 2000]))
    rng.shuffle(lengths)
    kind = rng.choice(["map", "map", "map", "dealt stream", "split stream"])
    shards = None
    if kind == "map" and rng.random() < 0.5:
        shares = [rng.choice([0, 1, 5]) for _ in range(world_size)]
        shards = [[] for _ in range(world_size)]
        for index in range(len(lengths)):
            shards[rng.choices(range(world_size), shares if any(shares) else None)[0]].append(index)
    joins = rng.random() < 0.8 or not any(lengths)
    options: dict[str, Any] = {
        "l_max": rng.choice([16, 100, 400]),
        "buffer_size": rng.choice([1, 7, 64, 1024]),
        "max_rows": rng.choice([None, None, 3]),
        "oversize": rng.choice(["emit", "emit", "drop"]),
        "accumulate": rng.choice([1, 1, 4]),
        "num_workers": rng.choice([0, 1, 1, 2]),
        "persistent_workers": rng.random() < 0.8,
        "shuffle": rng.random() < 0.8,
        "seed": rng.randrange(1000),
        "mode": "join" if joins else "non_join",
    }
    if not joins:
        options["oversize"] = "emit"
        options["quota"] = rng.choice([1, 50, 2 * len(lengths) + 1])
    if kind == "dealt stream":
        options["sharding"] = "loader"
    elif kind == "split stream":
        options["sharding"] = "dataset"
    disturbance = rng.choice([*[None] * 5, *HARMLESS, *FAULTS])
    victim = rng.randrange(world_size)
    owned = shards[victim] if shards is not None else list(range(victim, len(lengths), world_size))
    if disturbance in FAULTS and (len(owned) < 5 or len(lengths) < 40):
        return draw_trial(seed + 2**32)
    at = rng.choice(owned) if disturbance in FAULTS[:3] or disturbance == "kill worker" else rng.randrange(3)
    if disturbance == "kill worker" and options["num_workers"] == 0:
        options["num_workers"] = 1
    if disturbance in FAULTS[:3] and lengths[at] == 0 and disturbance == "raise in collate_fn":
        disturbance = "raise in __getitem__"
    if disturbance == "raise in collate_fn" and lengths[at] > options["l_max"] and options["oversize"] == "drop":
        disturbance = "raise in __getitem__"
    if kind != "map" and disturbance in ("raise in __getitem__", "kill worker"):
        kind, shards = "map", None
        options.pop("sharding")
    return Trial(seed, lengths, shards, options, kind, rng.choice([1, 2, 3]), world_size, disturbance, victim, at)


# --- in a rank ---


class Samples:
    def __init__(self, trial: Trial, rank: int) -> None:
        self.trial = trial
        self.rank = rank

    def __len__(self) -> int:
        return len(self.trial.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        trial = self.trial
        if index == trial.at:
            if trial.disturbance == "raise in __getitem__":
                raise ValueError("injected")
            if trial.disturbance == "kill worker":
                os.kill(os.getpid(), signal.SIGKILL)
        if trial.disturbance == "slow rank" and self.rank == trial.victim:
            time.sleep(0.002)
        return {"input_ids": torch.full((trial.lengths[index],), index), "id": index}


class Stream(IterableDataset[Any]):
    def __init__(self, trial: Trial, rank: int) -> None:
        self.samples = Samples(trial, rank)
        self.is_split = trial.kind == "split stream"

    def __iter__(self) -> Any:
        number, total = current_shard() if self.is_split else (0, 1)
        for index in range(number, len(self.samples), total):
            yield self.samples[index]


class Collate:
    def __init__(self, trial: Trial) -> None:
        self.fails_at = trial.at if trial.disturbance == "raise in collate_fn" else None

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        ids = [sample["id"] for sample in samples]
        if self.fails_at in ids:
            raise ValueError("injected")
        padded = torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
        return {"input_ids": padded, "ids": ids, "pid": os.getpid()}


class Length:
    def __init__(self, trial: Trial) -> None:
        self.fails_at = trial.at if trial.disturbance == "raise in length_fn" else None

    def __call__(self, sample: dict[str, Any]) -> int:
        if sample["id"] == self.fails_at:
            raise ValueError("injected")
        return len(sample["input_ids"])


def make_loader(trial: Trial, rank: int) -> ODBDataLoader:
    return ODBDataLoader(
        Samples(trial, rank) if trial.kind == "map" else Stream(trial, rank),
        collate_fn=Collate(trial),
        length_fn=Length(trial),
        sampler=None if trial.shards is None else trial.shards[rank],
        multiprocessing_context="fork",
        timeouts=TIMEOUTS,
        rank=rank,
        world_size=trial.world_size,
        **trial.options,
    )


def run_rank(trial: Trial, rank: int, target: Path) -> dict[str, Any]:
    result: dict[str, Any] = {"steps": [], "error": None}
    loader = make_loader(trial, rank)
    is_victim = rank == trial.victim
    try:
        with loader:
            for _ in range(trial.epochs):
                for batch in loader:
                    step = batch.step
                    ids = [] if step.is_idle else list(batch.data["ids"])
                    result["steps"].append([step.epoch, ids, step.num_tokens_padded, step.num_samples, step.window_num_samples])
                    if step.step != trial.at:
                        continue
                    if trial.disturbance == "break everywhere" and step.epoch == 0:
                        result["steps"] = []
                        break
                    if not is_victim:
                        continue
                    if trial.disturbance == "break alone":
                        result["left"] = True
                        return result
                    if trial.disturbance == "raise in the loop":
                        raise ValueError("injected")
                    if trial.disturbance == "kill collate process" and loader._process is not None:
                        os.kill(loader._process._process.pid, signal.SIGKILL)
                    if trial.disturbance in ("kill rank", "terminate rank"):
                        os.kill(os.getpid(), signal.SIGKILL if trial.disturbance == "kill rank" else signal.SIGTERM)
        result["dropped"] = [str(sample_id) for sample_id in loader.stats.dropped_ids]
        result["num_dropped"] = len(loader.stats.dropped_ids)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    finally:
        target.write_text(json.dumps(result))
    return result


def endure(trial: Trial, rank: int, epochs: int, target: Path) -> None:
    """One loader for many epochs, in turns with leaving it; memory, descriptors and processes as they were at first."""
    loader = make_loader(trial, rank)
    figures = []
    with loader:
        for epoch in range(epochs):
            for batch in loader:
                if epoch % 7 == 3 and batch.step.step == 2:
                    break
            figures.append([memory_now_mb(), len(os.listdir("/proc/self/fd")), len(members(os.getpgrp()))])
    target.write_text(json.dumps(figures))


# --- in the parent ---


def memory_now_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def members(group: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            state, _, of_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state not in "ZX":
                found.append(int(folder.name))
    return found


def own_files() -> set[str]:
    """What there is in the shared-memory file system, less what belongs to the semaphores of programs that run beside."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _child(port: int, log: Path, function: Any, arguments: tuple[Any, ...]) -> None:
    os.setpgid(0, 0)
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    function(*arguments)


def run_processes(folder: Path, jobs: list[tuple[Any, tuple[Any, ...]]], tally: Tally) -> list[int | None]:
    """Exit codes; None for one that had to be killed. Counts what is left."""
    context = multiprocessing.get_context("fork")
    port = free_port()
    files = own_files()
    children = [
        context.Process(target=_child, args=(port, folder / f"log{number}", function, arguments))
        for number, (function, arguments) in enumerate(jobs)
    ]
    for child in children:
        child.start()
    deadline = time.monotonic() + TRIAL_SECONDS
    codes: list[int | None] = []
    for child in children:
        child.join(max(deadline - time.monotonic(), 0.1))
        codes.append(child.exitcode)
    gone_by = time.monotonic() + GONE_SECONDS
    groups = [child.pid or 0 for child in children]
    while any(members(group) for group in groups) and time.monotonic() < gone_by and None not in codes:
        time.sleep(0.02)
    for group in groups:
        left = members(group)
        if left:
            if None not in codes:
                tally.processes_left += len(left)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
    for child in children:
        child.join()
        child.close()
    tally.files_left += len(own_files() - files)
    return codes


def check_trial(trial: Trial, codes: list[int | None], results: list[dict[str, Any] | None], tally: Tally) -> None:
    def complain(what: str) -> None:
        tally.wrong.append(f"trial {trial.seed} ({trial.disturbance}): {what}")

    if None in codes:
        complain(f"ranks {[rank for rank, code in enumerate(codes) if code is None]} did not end")
        return
    if trial.disturbance in FAULTS:
        tally.faults[trial.disturbance] += 1
        happened = any(result is None or result["error"] or result.get("left") for result in results)
        if not happened:  # e.g. a step that this rank never reached
            tally.faults[trial.disturbance] -= 1
        for rank, result in enumerate(results):
            left = result is None or result.get("left")
            if happened and not left and not result["error"] and not finished_before(trial, results, rank):
                complain(f"rank {rank} ended as if nothing had happened")
            told = result is None or not result["error"] or "injected" in result["error"]
            # Rank 0, whether it failed first or heard of it first, takes the store along, in which the cause is to be read.
            told = told or "the store of the job" in result["error"]
            if "raise" in trial.disturbance and not told:
                complain(f"rank {rank} does not tell the cause: {result['error'][:600]}")
        if happened:
            return
    elif trial.disturbance is not None:
        tally.faults[trial.disturbance] += 1
    per_rank: list[dict[str, Any]] = []
    for rank, result in enumerate(results):
        if result is None or result["error"] is not None:
            complain(f"rank {rank}: {'no result' if result is None else result['error'][:1500]}")
            return
        per_rank.append(result)
    check_steps(trial, per_rank, tally, complain)


def finished_before(trial: Trial, results: list[dict[str, Any] | None], rank: int) -> bool:
    """A rank that has taken its last batch before the fault elsewhere has nothing to complain of."""
    result = results[rank]
    return result is not None and "num_dropped" in result


def check_steps(trial: Trial, results: list[dict[str, Any]], tally: Tally, complain: Any) -> None:
    l_max = trial.options["l_max"]
    epochs = sorted({step[0] for result in results for step in result["steps"]})
    for epoch in epochs:
        rows = [[step for step in result["steps"] if step[0] == epoch] for result in results]
        if len({len(row) for row in rows}) != 1:
            complain(f"epoch {epoch} has {[len(row) for row in rows]} steps")
        ids = [sample_id for row in rows for step in row for sample_id in step[1]]
        for row in rows:
            for _, group, padded, _, _ in row:
                if len(group) > 1 and padded > l_max:
                    complain(f"a group of {len(group)} has {padded} padded tokens")
        tally.epochs += 1
        tally.steps += len(rows[0])
        tally.samples += len(ids)
        if trial.options["mode"] == "non_join":
            largest = max((sum(len(row[index][1]) for row in rows) for index in range(len(rows[0]))), default=0)
            if not trial.options["quota"] <= len(ids) < trial.options["quota"] + max(largest, 1):
                complain(f"{len(ids)} samples for a quota of {trial.options['quota']}")
            continue
        kept = {
            index
            for index, length in enumerate(trial.lengths)
            if length > 0 and (length <= l_max or trial.options["oversize"] == "emit")
        }
        tally.lost += len(kept - set(ids))
        tally.repeated += len(ids) - len(set(ids))
        if set(ids) - kept:
            complain("a sample that a policy drops was trained")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run the one trial of this number, and show what its ranks wrote")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # torch looks up a name for each connection: a name server that drops a question is not to look like a slow rank.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
    tally = Tally()
    began = time.monotonic()
    numbers = [arguments.only] if arguments.only is not None else range(arguments.seed, sys.maxsize)
    memory_at_first = descriptors = 0.0
    for number in numbers:
        trial_began = time.monotonic()
        with TemporaryDirectory() as name:
            folder = Path(name)
            if number % 25 == 24:
                trial = draw_trial(number)
                options = trial.options | {"num_workers": number % 3, "mode": "join", "buffer_size": 64}
                options.pop("quota", None)
                trial = Trial(number, [5 + n % 60 for n in range(200)], None, options, trial.kind, world_size=1 + number % 2)
                ranks = range(trial.world_size)
                jobs = [(endure, (trial, rank, 40, folder / f"figures{rank}")) for rank in ranks]
                codes = run_processes(folder, jobs, tally)
                for rank in ranks:
                    check_endurance(number, codes[rank], folder / f"figures{rank}", tally)
            else:
                trial = draw_trial(number)
                jobs = [(run_rank, (trial, rank, folder / f"rank{rank}")) for rank in range(trial.world_size)]
                codes = run_processes(folder, jobs, tally)
                files = [folder / f"rank{rank}" for rank in range(trial.world_size)]
                check_trial(trial, codes, [json.loads(f.read_text()) if f.exists() else None for f in files], tally)
            if arguments.only is not None:
                print(trial)
                for log in sorted(folder.glob("log*")):
                    print(f"--- {log.name}\n{log.read_text()}")
        seconds = round(time.monotonic() - trial_began, 1)
        if seconds > tally.slowest_seconds:
            tally.slowest_seconds, tally.slowest = seconds, f"{trial.seed} (number {number}): {trial.disturbance}"
        tally.trials += 1
        if tally.trials == 10:
            memory_at_first, descriptors = memory_now_mb(), len(os.listdir("/proc/self/fd"))
        elif tally.trials > 10:
            tally.memory_growth_mb = round(memory_now_mb() - memory_at_first, 1)
            tally.descriptors_left = len(os.listdir("/proc/self/fd")) - int(descriptors)
        if time.monotonic() - began > 60 * arguments.minutes:
            break
    return report(tally, time.monotonic() - began, arguments.json)


def check_endurance(number: int, code: int | None, file: Path, tally: Tally) -> None:
    if code != 0 or not file.exists():
        tally.wrong.append(f"trial {number} (endurance): ended with {code}")
        return
    figures = json.loads(file.read_text())
    tally.epochs += len(figures)
    tally.faults["break everywhere"] += sum(epoch % 7 == 3 for epoch in range(len(figures)))
    first, last = figures[5], figures[-1]
    if last[0] - first[0] > 20:
        tally.wrong.append(f"trial {number} (endurance): memory grew from {first[0]:.0f} to {last[0]:.0f} MB")
    # At their lowest: the store, which rank 0 holds, closes the connection of a process that has ended a little later.
    before, after = ([min(column) for column in zip(*part, strict=True)] for part in (figures[:15], figures[-15:]))
    if after[1] > before[1] or after[2] > before[2]:
        tally.wrong.append(f"trial {number} (endurance): descriptors, processes grew from {before[1:]} to {after[1:]}")


def report(tally: Tally, seconds: float, target: Path | None) -> int:
    figures = asdict(tally) | {"faults": dict(sorted(tally.faults.items())), "minutes": round(seconds / 60, 1)}
    for name, value in figures.items():
        print(f"{name}: {value}")
    if target is not None:
        target.write_text(json.dumps(figures, indent=2) + "\n")
    leaks = tally.processes_left + tally.files_left + max(tally.descriptors_left, 0)
    return int(bool(tally.lost or tally.repeated or tally.wrong or leaks or tally.memory_growth_mb > 50))


if __name__ == "__main__":
    sys.exit(main())
