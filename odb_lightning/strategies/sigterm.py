"""SIGTERM to any rank ends the run in order: between two updates, with a checkpoint, if the trainer makes any."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from odb_lightning.batch import StepInfo

_END_SECONDS = 15.0
_UPDATE_SECONDS = 120.0
"""For the update under way to come to its end."""
_GO_ON, _REQUEUE, _END = range(3)


class EndsOnSigterm(Strategy):
    """A rank that is told to end lets all of them make a checkpoint (`preempted.ckpt`, beside those of the ModelCheckpoint)
    before the next update, and then ends the run by an exception, and so with a non-zero status.

    It ends at once, without one: where it is not in training, if there is no ModelCheckpoint, at a second SIGTERM, and if the
    update under way takes too long. SLURM's requeue signal, which Lightning answers with a checkpoint and a new job, waits for
    the next update in the same way.

    Lightning's own handler of SIGTERM begins a collective inside of the signal, of which the peers know nothing: it waits for
    them, and they for it. Under SLURM's requeueing Lightning's has another meaning, and stays.
    """

    _users_sigterm: Any = signal.SIG_DFL
    _lightnings_requeue: Callable[[], None] | None = None
    _request = _GO_ON
    _limit: threading.Timer | None = None
    step_info: StepInfo | None
    _trainer: Any

    def connect(self, model: Any) -> None:
        super().connect(model)
        self._users_sigterm = signal.getsignal(signal.SIGTERM)  # before Lightning's; it puts it back at the end

    def process_dataloader(self, dataloader: Any) -> Any:
        self._take_signals()  # Lightning has set its own by now, and no batch was drawn yet
        return super().process_dataloader(dataloader)

    def on_train_start(self) -> None:
        super().on_train_start()
        self._take_signals()  # again, where `configure_optimizers` had the loader made before Lightning set its own

    def _take_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        environment = getattr(self, "cluster_environment", None)
        if not getattr(environment, "auto_requeue", False):
            signal.signal(signal.SIGTERM, self._on_sigterm)
            return
        number: signal.Signals = getattr(environment, "requeue_signal", None) or signal.SIGUSR1
        lightnings = signal.getsignal(number)
        if callable(lightnings) and lightnings != self._on_requeue:
            self._lightnings_requeue = functools.partial(lightnings, number, None)
            signal.signal(number, self._on_requeue)

    # --- in the signal ---

    def _on_requeue(self, number: int, frame: Any) -> None:
        self._request = max(self._request, _REQUEUE)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        """Passes it on to the ranks started by this one, and to the user's own handler."""
        for rank in self._ranks_of_launcher():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, number)
        if callable(self._users_sigterm):
            self._users_sigterm(number, frame)
        if self._request != _END and self._is_fitting() and self._checkpoint_path() is not None:
            self._request = _END
            self._limit = threading.Timer(_UPDATE_SECONDS, os.kill, (os.getpid(), number))
            self._limit.daemon = True
            self._limit.start()
            return
        self._end_run()

    def _is_fitting(self) -> bool:
        return bool(
            self._trainer.state.fn == "fit" and not self._trainer.sanity_checking and self._trainer.fit_loop.max_batches
        )

    def _end_run(self) -> None:
        ranks = self._ranks_of_launcher()
        atexit.register(_await_end, list(ranks))
        # Lightning watches them, and would kill this process as soon as one has ended, before it has come to its own end.
        ranks.clear()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end has begun
        raise SIGTERMException(128 + signal.SIGTERM)

    def _ranks_of_launcher(self) -> list[subprocess.Popen[bytes]]:
        ranks: list[subprocess.Popen[bytes]] = getattr(self.launcher, "procs", [])
        return ranks

    # --- between two updates ---

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """All ranks agree here, before the first batch of an accumulation window, whether they are to end."""
        super().on_train_batch_start(batch, batch_idx)
        info = self.step_info
        step, accumulate = (batch_idx, self._trainer.accumulate_grad_batches) if info is None else (info.step, info.accumulate)
        if step % accumulate or (self._checkpoint_path() is None and self._lightnings_requeue is None):
            return
        request = torch.tensor(self._request, device=self.root_device)
        agreed = int(self.reduce(request, reduce_op="max"))
        if agreed == _REQUEUE:
            self._request = _GO_ON
            assert self._lightnings_requeue is not None
            self._lightnings_requeue()
        elif agreed == _END:
            path = self._checkpoint_path()
            assert path is not None
            self._trainer.save_checkpoint(path)
            rank_zero_info(f"SIGTERM: the run ends, and can be gone on with from {path}")
            self._end_run()

    def teardown(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._request = _GO_ON
        super().teardown()

    def _checkpoint_path(self) -> Path | None:
        callback = self._trainer.checkpoint_callback
        folder = callback.dirpath if isinstance(callback, ModelCheckpoint) else None
        return None if folder is None else Path(folder) / "preempted.ckpt"


def _await_end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Kills those that have not ended within a bound."""
    deadline = time.monotonic() + _END_SECONDS
    for rank in ranks:
        try:
            rank.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
