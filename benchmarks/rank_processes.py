"""Runs a script as ranks that know each other as torchrun's would, within a hard limit. Needs Python alone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "NODE_RANK", "MASTER_", "TORCHELASTIC_", "PL_")
_POLL_SECONDS, _GRACE_SECONDS = 0.1, 10.0


def run_ranks(command: Sequence[str], world_size: int, seconds: float) -> str:
    """What went wrong, or "". A rank that fails ends the rest, and so does the limit; nothing that they started is left."""
    deadline = time.monotonic() + seconds
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)} | {"OMP_NUM_THREADS": "1"}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world_size,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            environment = kept | {name: str(value) for name, value in place.items()}
            # A session of its own, so that all that it starts can be ended.
            ranks.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True))
        return _fault(ranks, deadline, seconds)
    finally:
        _end(ranks)


def _fault(ranks: Sequence[subprocess.Popen[bytes]], deadline: float, seconds: float) -> str:
    while True:
        statuses = [process.poll() for process in ranks]
        for rank, status in enumerate(statuses):
            if status:
                return f"rank {rank} ended with exit code {status}"
        if None not in statuses:
            return ""
        if time.monotonic() > deadline:
            waiting = [str(rank) for rank, status in enumerate(statuses) if status is None]
            return f"rank {' and '.join(waiting)} did not end within {seconds:.0f} seconds"
        time.sleep(_POLL_SECONDS)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """By SIGTERM, and what is left after a while for good."""
    for process in ranks:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
    limit = time.monotonic() + _GRACE_SECONDS
    for process in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(limit - time.monotonic(), 0.0))
        _signal(process, signal.SIGKILL)
        process.wait(_GRACE_SECONDS)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
