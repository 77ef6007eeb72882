"""Kills runs of `odb-train` at random moments and goes on with them until their epochs are done; looks for lost and repeated
updates.

    OMP_NUM_THREADS=1 python benchmarks/kill_and_resume.py --kills 50 [--strategies ddp zero2] [--seed 0] [--json FILE]

A trial is a configuration that is trained twice on two ranks: once undisturbed, and once with a SIGKILL for one of the ranks
again and again: while it starts (then for both, as what started them would do), in a step, or while it writes a checkpoint.
Each run after a kill has `ckpt_path=last`. Then every step that any of them trained has to be the undisturbed run's, none may
be missing, and the last checkpoint (weights, optimizer state, counts of steps) has to be the same to the last bit. After each
run no process and no shared-memory file may be left. Exit status 1 if anything is lost, repeated, different or left.

Ranks are forked from this process, which has imported what they need.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from signal import SIGKILL
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hydra import compose, initialize_config_module
from soak import free_port, members, own_files

from odb_lightning.checkpoints import newest_whole
from odb_lightning.train import train

RANKS = 2
RUN_SECONDS, GONE_SECONDS = 120.0, 15.0
KINDS = ("while starting", "in a step", "while writing")
STRATEGIES = {
    "ddp": "odb_ddp",
    "zero1": "odb_deepspeed_stage_1",
    "zero2": "odb_deepspeed_stage_2",
    "zero3": "odb_deepspeed_stage_3",
    "fsdp2": "odb_model_parallel",
}
FIXED = (
    "data.limit=100",
    "data.cutoff=128",
    "odb.l_max=512",
    "odb.buffer_size=16",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=1",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=1",
    "model.config.head_dim=16",
    "optim.lr=0.01",
    "extras.print_config=false",
    "validate=false",
    "audit=true",
    "logger=none",
    "callbacks.progress=null",
    f"trainer.devices={RANKS}",
    "trainer.max_epochs=2",
)


@dataclass
class Tally:
    trials: int = 0
    runs: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    left_unfinished: int = 0
    """Checkpoints that were found half-written after a kill, and passed over."""
    updates: int = 0
    """Of the undisturbed runs."""
    trained_again: int = 0
    """Updates between a checkpoint and a kill, which the run after it trained anew."""
    lost: int = 0
    """Steps that none of the runs of a trial has trained."""
    repeated: int = 0
    """Steps in which a run trained other samples, or in another update, than the undisturbed one."""
    different: int = 0
    """Trials whose last checkpoint is not the undisturbed run's."""
    processes_left: int = 0
    files_left: int = 0
    slowest_end_seconds: float = 0.0
    """From a kill to the end of the other rank."""
    wrong: list[str] = field(default_factory=list)
    """Anything else that is not as promised, in words."""


# --- in a rank ---


def be_a_rank(rank: int, port: int, log: Path, place: Path, name: str, overrides: list[str]) -> None:
    os.setsid()
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({variable: str(value) for variable, value in ranks.items()})
    rank_zero = importlib.import_module("lightning.fabric.utilities.rank_zero")
    rank_zero.rank_zero_only.rank = rank
    os.chdir(place)
    with initialize_config_module("odb_lightning.conf", version_base="1.3"):
        cfg = compose("train", overrides=[*FIXED, *overrides])
        cfg.paths.output_dir = str(Path("logs") / cfg.task_name / "runs" / name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(cfg)


# --- in the parent ---


class Run:
    """The ranks of one run, as processes of this one."""

    def __init__(self, place: Path, task: str, name: str, overrides: list[str]) -> None:
        self.folder = place / "logs" / task / "runs" / name
        self.logs = [place / f"{task}-{name}-rank{rank}.txt" for rank in range(RANKS)]
        port, context = free_port(), get_context("fork")
        more = [*overrides, f"task_name={task}"]
        self.files = own_files()
        self.ranks = [
            context.Process(target=be_a_rank, args=(rank, port, self.logs[rank], place, name, more)) for rank in range(RANKS)
        ]
        for process in self.ranks:
            process.start()
        self.deadline = time.monotonic() + RUN_SECONDS

    def await_(self, condition: Callable[[], bool]) -> bool:
        """Whether it came true while the ranks ran, within the run's limit."""
        while all(process.is_alive() for process in self.ranks) and time.monotonic() < self.deadline:
            if condition():
                return True
            time.sleep(0.001)
        return False

    def steps(self, rank: int) -> int:
        """How many it has logged."""
        file = self.folder / "audit" / f"rank{rank}.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def end(self, tally: Tally) -> list[int | None]:
        """Exit codes; None for a rank that had to be killed. Counts what is left."""
        for process in self.ranks:
            process.join(max(self.deadline - time.monotonic(), 0.1))
        codes = [process.exitcode for process in self.ranks]
        pids = [process.pid or 0 for process in self.ranks]
        gone_by = time.monotonic() + GONE_SECONDS
        while any(members(pid) for pid in pids) and time.monotonic() < gone_by and None not in codes:
            time.sleep(0.02)
        for pid in pids:
            left = members(pid)
            tally.processes_left += len(left) if None not in codes else 0
            if left:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, SIGKILL)
        for process in self.ranks:
            process.join()
            process.close()
        tally.files_left += len(own_files() - self.files)
        tally.runs += 1
        return codes

    def output(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in self.logs)


def disturb(run: Run, rng: random.Random, tally: Tally) -> bool:
    """Kills one of the ranks at a moment drawn, if the run has not ended before. Gives whether it was."""
    victim, kind = rng.randrange(RANKS), rng.choices(KINDS, (1, 3, 3))[0]
    began = time.monotonic()
    if kind == "while starting":
        wait = rng.uniform(0.1, 3.0)
        is_time = run.await_(lambda: time.monotonic() - began > wait or run.steps(victim) > 0)
    elif kind == "in a step":
        steps = rng.randrange(1, 9)
        is_time = run.await_(lambda: run.steps(victim) >= steps)
        wait = time.monotonic() + rng.uniform(0, 0.15)
        is_time = is_time and run.await_(lambda: time.monotonic() > wait)
    else:
        number = rng.randrange(1, 4)
        folder = run.folder / "checkpoints"
        seen: set[str] = set()

        def is_written() -> bool:
            seen.update(path.name for path in folder.glob("*.part"))
            return len(seen) >= number

        is_time = run.await_(is_written)
        wait = time.monotonic() + rng.choice([0, rng.uniform(0, 0.01), rng.uniform(0, 0.05)])
        is_time = is_time and run.await_(lambda: time.monotonic() >= wait)
    pid = run.ranks[victim].pid
    if not is_time or pid is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SIGKILL)
    killed = time.monotonic()
    run.ranks[victim].join(GONE_SECONDS)
    if run.ranks[victim].exitcode != -SIGKILL:
        return False  # it had come to its end
    if kind == "while starting":  # a peer would wait for it, as long as torch's limit for that is
        run.ranks[1 - victim].kill()
    run.ranks[1 - victim].join(max(run.deadline - time.monotonic(), 0.1))
    tally.slowest_end_seconds = max(tally.slowest_end_seconds, round(time.monotonic() - killed, 1))
    tally.kills[kind] += 1
    tally.left_unfinished += len(list((run.folder / "checkpoints").glob("*.part")))
    return True


Line = tuple[int, tuple[Any, ...]]


def lines_of(folder: Path) -> dict[tuple[int, int, int], Line]:
    """Update and samples of each (epoch, step, rank) that a run has logged. A line that was cut off does not count."""
    lines = {}
    for rank in range(RANKS):
        file = folder / "audit" / f"rank{rank}.jsonl"
        for text in file.read_text().splitlines() if file.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):
                line = json.loads(text)
                lines[line["epoch"], line["step"], rank] = line["update"], tuple(line["sample_ids"])
    return lines


def compare(plan: Path, runs: Iterable[Path], tally: Tally) -> None:
    """Each step of `runs`, in their order, with those of the undisturbed one."""
    planned = lines_of(plan)
    tally.updates += len({update for update, _ in planned.values()})
    trained: set[tuple[int, int, int]] = set()
    for folder in runs:
        lines = lines_of(folder)
        tally.repeated += sum(planned.get(place) != line for place, line in lines.items())
        tally.trained_again += len({lines[place][0] for place in trained & lines.keys()})
        trained |= lines.keys()
    tally.lost += len(planned.keys() - trained)


def content(state: Any) -> Any:
    """Plain values of what a checkpoint holds, but for what is another one in each run: paths, and times."""
    if isinstance(state, torch.Tensor):
        state = state.full_tensor() if hasattr(state, "full_tensor") else state
        return state.dtype, tuple(state.shape), state.flatten().contiguous().view(torch.uint8).numpy().tobytes()
    if isinstance(state, dict):  # gradients are zeroed once more in a window that is begun again
        return {str(key): content(value) for key, value in state.items() if key != "zero_grad"}
    if isinstance(state, (list, tuple)):
        return [content(value) for value in state]
    return state if isinstance(state, (int, float, str, bytes, type(None))) else None


PARTS = ("state_dict", "optimizer_states", "module", "optimizer_state_dict", "global_step", "loops", "odb_lightning")


def state_of(checkpoint: Path, parts: Sequence[str]) -> dict[str, Any]:
    """These parts of it, whatever strategy has written it."""
    if checkpoint.is_file():
        files = {"": torch.load(checkpoint, weights_only=False)}
    elif (checkpoint / "latest").exists():
        files = {file.name: torch.load(file, weights_only=False) for file in sorted(checkpoint.glob("*/*.pt"))}
    else:
        state: dict[str, Any] = {}
        loader = importlib.import_module("torch.distributed.checkpoint.state_dict_loader")
        planner = importlib.import_module("torch.distributed.checkpoint.default_planner")
        reader = importlib.import_module("torch.distributed.checkpoint").FileSystemReader(checkpoint)
        loader._load_state_dict(state, storage_reader=reader, planner=planner._EmptyStateDictLoadPlanner(), no_dist=True)
        files = {"": torch.load(checkpoint / "meta.pt", weights_only=False), "shards": {"state_dict": state}}
    return {name: {part: content(value) for part, value in file.items() if part in parts} for name, file in files.items()}


def differences(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """The places in which they differ, and numbers there."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            yield from differences(one.get(key), other.get(key), f"{place}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (mine, yours) in enumerate(zip(one, other, strict=True)):
            yield from differences(mine, yours, f"{place}/{index}")
    elif one != other:
        yield f"{place}: {one} and {other}" if isinstance(one, int) else place


def trial(number: int, strategy: str, kills: int, place: Path, tally: Tally) -> None:
    rng = random.Random(number)
    overrides = [
        f"strategy={STRATEGIES[strategy]}",
        f"seed={number}",
        f"odb.num_workers={rng.choice([0, 1])}",
        f"trainer.accumulate_grad_batches={rng.choice([1, 1, 3])}",
        f"checkpoint.every_n_steps={rng.choice([1, 2, 3])}",
    ]

    def complain(what: str) -> None:
        tally.wrong.append(f"trial {number} ({strategy}, {' '.join(overrides[2:])}): {what}")

    whole = Run(place, "whole", "0", overrides)
    codes = whole.end(tally)
    if any(codes):
        complain(f"undisturbed, it ended with {codes}\n{whole.output()}")
        return
    tally.trials += 1
    runs: list[Run] = []
    most = sum(tally.kills.values()) + kills
    while True:
        has_checkpoint = any((place / "logs" / "killed").glob("runs/*/checkpoints/*.ckpt"))
        run = Run(place, "killed", f"{len(runs):03}", [*overrides, *(["ckpt_path=last"] if has_checkpoint else [])])
        runs.append(run)
        was_killed = sum(tally.kills.values()) < most and disturb(run, rng, tally)
        codes = run.end(tally)
        if None in codes:
            complain(f"ranks {[rank for rank, code in enumerate(codes) if code is None]} did not end")
            return
        if not was_killed:
            break
    if any(codes):
        complain(f"run {len(runs) - 1} ended with {codes}\n{run.output()}")
        return
    compare(whole.folder, [run.folder for run in runs], tally)
    last = newest_whole(place / "logs" / "killed")[0]  # of the run before, if that was killed with nothing left to train
    if last is None:
        complain("no checkpoint is left")
        return
    parts = PARTS if last.name == "last.ckpt" else PARTS[:-2]  # places that an epoch's end has moved on
    states = [state_of(checkpoint, parts) for checkpoint in (whole.folder / "checkpoints" / "last.ckpt", last)]
    if states[0] != states[1]:
        tally.different += 1
        where = ", ".join(list(differences(*states))[:5])
        complain(f"the last checkpoint is not that of the undisturbed run: {where}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=["ddp", "zero2"], help="which take turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30.0, help="no trial is begun after that")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for module in ("transformers", "odb_lightning.models.causal_lm", "odb_lightning.data"):
        importlib.import_module(module)
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads, but not the locks they hold"
    tally, began, number = Tally(), time.monotonic(), arguments.seed
    while sum(tally.kills.values()) < arguments.kills and time.monotonic() - began < 60 * arguments.minutes:
        with TemporaryDirectory() as name:
            strategy = arguments.strategies[(number - arguments.seed) % len(arguments.strategies)]
            left = arguments.kills - sum(tally.kills.values())
            trial(number, strategy, min(left, 6), Path(name), tally)
        print(f"trial {number}, {strategy}: {sum(tally.kills.values())} kills in {time.monotonic() - began:.0f} s", flush=True)
        number += 1
        if len(tally.wrong) > 3:
            break
    return report(tally, time.monotonic() - began, arguments)


def report(tally: Tally, seconds: float, arguments: argparse.Namespace) -> int:
    figures = asdict(tally) | {"kills": dict(sorted(tally.kills.items())), "minutes": round(seconds / 60, 1)}
    for name, value in figures.items():
        print(f"{name}: {value}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    is_short = sum(tally.kills.values()) < arguments.kills
    faults = tally.lost + tally.repeated + tally.different + tally.processes_left + tally.files_left + len(tally.wrong)
    return int(bool(faults) or is_short)


if __name__ == "__main__":
    sys.exit(main())
