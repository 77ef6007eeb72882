"""Runs commands that start several processes, with a hard time limit on all of them; and what makes `odb-train` quick."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

_GRACE_SECONDS = 5.0

TINY_MODEL = (
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=1",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=1",
    "model.config.head_dim=16",
)
"""Overrides for `odb-train`."""


@dataclass(frozen=True)
class CommandResult:
    """Exit status and everything that a command wrote, stderr included."""

    status: int
    output: str
    seconds: float


def run_command(
    command: Sequence[str],
    *,
    cwd: Path,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    interrupt_after: float | None = None,
) -> CommandResult:
    """What `command` did. If it takes more than `seconds` its whole process group is ended and the test fails.

    A process that it leaves behind in its group is ended, too, and fails the test. `interrupt_after` sends the group a SIGINT
    after so many seconds, as Ctrl-C would.
    """
    log = cwd / f"output-{time.monotonic_ns()}.txt"
    begin = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=clean_environment(environment),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_hear_interrupts,
        )
    try:
        if interrupt_after is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(interrupt_after)
            signal_group(process.pid, signal.SIGINT)
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        end_group(process.pid, at_once=False)
        pytest.fail(f"not done after {seconds:.0f} s: {' '.join(command)}\n{log.read_text()[-4000:]}")
    except BaseException:
        end_group(process.pid, at_once=True)
        raise
    took = time.monotonic() - begin
    if not group_ends(process.pid, _GRACE_SECONDS):
        end_group(process.pid, at_once=True)
        pytest.fail(f"left processes behind: {' '.join(command)}\n{log.read_text()[-4000:]}")
    return CommandResult(status, log.read_text(), took)


def _hear_interrupts() -> None:
    # A shell that runs the tests in the background leaves Ctrl-C ignored, and that is inherited.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def odb_train(
    *arguments: str,
    cwd: Path,
    seconds: float = 120,
    environment: Mapping[str, str] | None = None,
    interrupt_after: float | None = None,
) -> CommandResult:
    """What `python -m odb_lightning.train arguments` did (see `run_command`)."""
    command = [sys.executable, "-m", "odb_lightning.train", *arguments]
    return run_command(command, cwd=cwd, seconds=seconds, environment=environment, interrupt_after=interrupt_after)


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without what launchers and test runners leave in it, one thread a process, and `more`."""
    dropped = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ODB_RUN_STAMP")
    kept = {
        name: value for name, value in os.environ.items() if name not in dropped and not name.startswith(("PL_", "PYTEST_"))
    }
    ours = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return kept | ours | dict(more or {})


def free_port() -> int:
    """For a store to listen on, some time from now. Not one of those that the system gives to sockets: other tests' processes
    take many of these, and one of them would be gone by then."""
    first = 32768
    with suppress(OSError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(first // 2, first)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process group that may be gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def end_group(group: int, *, at_once: bool) -> None:
    """End a process group: with SIGTERM and, after a grace period or at once, with SIGKILL (as `timeout -k` does)."""
    if not at_once:
        signal_group(group, signal.SIGTERM)
        group_ends(group, _GRACE_SECONDS)
    signal_group(group, signal.SIGKILL)


def group_ends(group: int, seconds: float) -> bool:
    """Whether no process of the group runs any more within `seconds`; zombies that nobody reaps do not count."""
    deadline = time.monotonic() + seconds
    while running_members(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def running_members(group: int) -> list[int]:
    """The processes of a group that are not zombies."""
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            # The command's name, in parentheses, can hold spaces.
            state, _, process_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                members.append(int(folder.name))
    return members
