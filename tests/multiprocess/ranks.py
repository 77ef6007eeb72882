"""Runs a function in W real processes that know each other as torchrun's would, within a hard time limit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import clean_environment, end_group, group_ends

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class RankResult:
    """How one rank ended: exit status, what it wrote, and what its function returned (None if it did not)."""

    status: int
    output: str
    value: Any


def run_ranks(
    function: str, world_size: int, folder: Path, *, seconds: float = 90, check: bool = True, **arguments: Any
) -> list[RankResult]:
    """The results of `module:function(**arguments)` on each rank. Arguments and results travel as JSON.

    Everything that is left after `seconds`, or after the ranks have ended, is killed and fails the test. With `check`, a rank
    that fails does, too, with its output.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    deadline = time.monotonic() + seconds
    processes, logs = [], []
    for rank in range(world_size):
        log = folder / f"rank{rank}.txt"
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        command = [
            sys.executable,
            "-m",
            "tests.multiprocess.ranks",
            function,
            json.dumps(arguments),
            str(folder / f"value{rank}.json"),
        ]
        with log.open("w") as output:
            processes.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=clean_environment({name: str(value) for name, value in variables.items()}),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        logs.append(log)
    try:
        for process in processes:
            process.wait(max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        for process in processes:
            end_group(process.pid, at_once=True)
        pytest.fail(f"{function} was not done after {seconds:.0f} s\n" + _outputs(logs))
    left = [process for process in processes if not group_ends(process.pid, 5.0)]
    for process in left:
        end_group(process.pid, at_once=True)
    if left:
        pytest.fail(f"{function} left processes behind\n" + _outputs(logs))
    results = []
    for rank, process in enumerate(processes):
        value = folder / f"value{rank}.json"
        results.append(
            RankResult(process.returncode, logs[rank].read_text(), json.loads(value.read_text()) if value.exists() else None)
        )
    if check and any(result.status for result in results):
        pytest.fail(f"{function} failed\n" + _outputs(logs))
    return results


def _outputs(logs: list[Path]) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-6000:]}" for log in logs)


def _main(function: str, arguments: str, target: str) -> None:
    import importlib

    import torch

    torch.set_num_threads(1)
    module, name = function.split(":")
    value = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    Path(target).write_text(json.dumps(value))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    _main(*sys.argv[1:])
