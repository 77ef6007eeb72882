"""Runs a function in W real processes that know each other as torchrun's would, within a hard time limit."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import clean_environment, end_group, free_port, group_ends, signal_group
from tests.multiprocess.zygote import STACKS_SIGNAL

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class RankResult:
    """How one rank ended: exit status, what it wrote, and what its function returned (None if it did not)."""

    status: int
    output: str
    value: Any


def run_ranks(
    function: str,
    world_size: int,
    folder: Path,
    *,
    seconds: float = 90,
    check: bool = True,
    environment: Mapping[str, str] | None = None,
    on_started: Callable[[list[int]], None] | None = None,
    **arguments: Any,
) -> list[RankResult]:
    """The results of `module:function(**arguments)` on each rank. Arguments and results travel as JSON.

    All ranks have the variables of `environment`, too. They are forks of a process that serves all calls; what that means for
    them is said in zygote.py. `on_started` is called here with their pids (their groups', too); the time it takes counts.

    Everything that is left after `seconds` (its stacks go to the output), or after the ranks have ended, is killed and fails
    the test. With `check`, a rank that fails does, too, with its output.
    """
    deadline = time.monotonic() + seconds
    port = free_port()
    orders, logs, values = [], [], []
    for rank in range(world_size):
        logs.append(folder / f"rank{rank}.txt")
        values.append(folder / f"value{rank}.json")
        values[rank].unlink(missing_ok=True)
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        orders.append(
            {
                "function": function,
                "arguments": json.dumps(arguments),
                "target": str(values[rank]),
                "environment": clean_environment({name: str(value) for name, value in variables.items()} | (environment or {})),
                "log": str(logs[rank]),
            }
        )
    pids: list[int] = []
    statuses: dict[int, int] = {}
    zygote = _the_zygote()
    try:
        zygote.send(orders)
        pids = zygote.receive(deadline)
        if on_started is not None:
            on_started(pids)
        while len(statuses) < world_size:
            pid, status = zygote.receive(deadline)
            statuses[pid] = status
    except BaseException as error:
        if isinstance(error, _NotDone):
            _dump_stacks(pids, logs)
        for pid in pids:
            end_group(pid, at_once=True)
        zygote.end()  # which may know of ranks that this process does not
        if isinstance(error, _NotDone):
            pytest.fail(f"{function}, limited to {seconds:.0f} s: {error}\n" + _outputs(logs))
        raise
    left = [pid for pid in pids if not group_ends(pid, 5.0)]
    for pid in left:
        end_group(pid, at_once=True)
    if left:
        pytest.fail(f"{function} left processes behind\n" + _outputs(logs))
    results = [
        RankResult(statuses[pid], log.read_text(), json.loads(value.read_text()) if value.exists() else None)
        for pid, log, value in zip(pids, logs, values, strict=True)
    ]
    if check and any(result.status for result in results):
        pytest.fail(f"{function} failed\n" + _outputs(logs))
    return results


def _dump_stacks(pids: list[int], logs: list[Path]) -> None:
    """Of all threads of the ranks, and of what they forked, into their logs."""
    for pid in pids:
        signal_group(pid, STACKS_SIGNAL)
    deadline, sizes = time.monotonic() + 5.0, [-1]
    while time.monotonic() < deadline and sizes != (sizes := [log.stat().st_size for log in logs if log.exists()]):
        time.sleep(0.5)  # until nothing is added


def _outputs(logs: list[Path]) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-20_000:]}" for log in logs if log.exists())


class _NotDone(Exception):
    """Why the ranks' process has not answered."""


class _Zygote:
    """The process that ranks are forked from."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.multiprocess.zygote", str(theirs.fileno())],
            cwd=ROOT,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self.end)

    def lives(self) -> bool:
        return self._process.poll() is None

    def send(self, orders: list[dict[str, Any]]) -> None:
        with suppress(ConnectionError):  # `receive` tells
            self._connection.send(orders)

    def receive(self, deadline: float) -> Any:
        try:
            if not self._connection.poll(max(deadline - time.monotonic(), 0.1)):
                raise _NotDone("not done in time")
            return self._connection.recv()
        except (EOFError, ConnectionError):
            status = self._process.wait(10)
            self._output.seek(0)
            raise _NotDone(f"the process that forks ranks has ended with {status}\n{self._output.read()[-6000:]}") from None

    def end(self) -> None:
        """Once its connection is closed, it ends the ranks and itself."""
        self._connection.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
        atexit.unregister(self.end)


_zygote: _Zygote | None = None


def _the_zygote() -> _Zygote:
    """One for all tests of this process, as long as it lives."""
    global _zygote
    if _zygote is None or not _zygote.lives():
        _zygote = _Zygote()
    return _zygote
