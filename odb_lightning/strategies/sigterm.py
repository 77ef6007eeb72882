"""SIGTERM to any rank ends the run in order."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import threading
import time
from typing import Any

from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

_END_SECONDS = 15.0


class EndsOnSigterm(Strategy):
    """Ends the run by an exception, and so with a non-zero status, wherever the rank is.

    Lightning's own handler begins a collective inside of the signal, of which the peers know nothing: it waits for them, and
    they for it. Under SLURM's requeueing Lightning's has another meaning, and stays.
    """

    _users_sigterm: Any = signal.SIG_DFL

    def connect(self, model: Any) -> None:
        super().connect(model)
        self._users_sigterm = signal.getsignal(signal.SIGTERM)  # before Lightning's; it puts it back at the end

    def process_dataloader(self, dataloader: Any) -> Any:
        self._take_sigterm()  # Lightning has set its own by now, and no batch was drawn yet
        return super().process_dataloader(dataloader)

    def on_train_start(self) -> None:
        super().on_train_start()
        self._take_sigterm()  # again, where `configure_optimizers` had the loader made before Lightning set its own

    def _take_sigterm(self) -> None:
        environment = getattr(self, "cluster_environment", None)
        if not getattr(environment, "auto_requeue", False) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        """Passes it on to the ranks started by this one, and to the user's own handler."""
        ranks: list[subprocess.Popen[bytes]] = getattr(self.launcher, "procs", [])
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, number)
        atexit.register(_await_end, list(ranks))
        # Lightning watches them, and would kill this process as soon as one has ended, before it has come to its own end.
        ranks.clear()
        if callable(self._users_sigterm):
            self._users_sigterm(number, frame)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end has begun
        raise SIGTERMException(128 + number)


def _await_end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Kills those that have not ended within a bound."""
    deadline = time.monotonic() + _END_SECONDS
    for rank in ranks:
        try:
            rank.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
