"""Forks ranks from a process that has imported torch and Lightning, which takes longer than most of what ranks do.

A rank has what a process of its own would have: session, environment, output, random state, and an end by way of the
interpreter. What is settled before the fork is the same in all ranks, though: the seed of `hash`, and what Python, torch or
Lightning read from the environment when they start or are imported.

Nothing is imported on top that a rank's children, if they are spawned, would have to import again with this module.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

STACKS_SIGNAL = signal.SIGUSR2
"""Has a rank, and what it forks, write the stacks of its threads to its output."""


def _main(descriptor: int) -> None:
    import torch

    import odb_lightning  # noqa: F401

    torch.set_num_threads(1)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads, but not the locks they hold"
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, handler)
    gc.freeze()  # or most of the time of a short rank goes into tearing down, at its end, what was imported here
    order = _serve(Connection(descriptor))
    if order is not None:
        _be_a_rank(**order)


def _serve(connection: Connection) -> dict[str, Any] | None:
    """For each list of orders forks a rank each, and sends their pids and, as they end, `(pid, status)`.

    Returns its order in each rank. In the zygote it returns when the tests have ended, and ends the ranks that are left.
    """
    tests = os.getppid()
    ranks: set[int] = set()
    with suppress(EOFError, ConnectionError):
        while os.getppid() == tests:  # whose forks, if any, keep the connection open
            if connection.poll(0.02 if ranks else 1.0):
                pids: list[int] = []
                for order in connection.recv():
                    pid = _fork(order["log"])
                    if pid == 0:
                        connection.close()
                        return order
                    pids.append(pid)
                ranks.update(pids)
                connection.send(pids)
            while ranks:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                ranks.remove(pid)
                connection.send((pid, os.waitstatus_to_exitcode(status)))
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return None


def _fork(log: str) -> int:
    """Zero in the new process. When it returns in the old one, the new one has its session, so that it can be signalled."""
    is_ready, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
    os.close(ready)
    if pid != 0:
        os.read(is_ready, 1)  # until the new process has closed its end, or has failed
    os.close(is_ready)
    return pid


def _be_a_rank(function: str, arguments: str, target: str, environment: dict[str, str], log: str) -> None:
    import importlib

    import numpy
    import torch
    import torchmetrics.utilities.prints
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    faulthandler.register(STACKS_SIGNAL)
    os.environ.clear()
    os.environ.update(environment)
    # What else differs between processes that import these afresh.
    numpy.random.seed()
    torch.default_generator.seed()
    rank_zero_only.rank = int(environment["RANK"])
    torchmetrics.utilities.prints.rank_zero_only.rank = int(environment["LOCAL_RANK"])
    module, name = function.split(":")
    value = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    Path(target).write_text(json.dumps(value))
    if torch.distributed.is_initialized():
        # A thread of it that drops its last operation's tensors while the interpreter ends aborts the process (PyTorch#190489).
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main(int(sys.argv[1]))
