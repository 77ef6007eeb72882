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
_SAME_SIGNAL_SECONDS = 5.0
_GO_ON, _REQUEUE, _END = range(3)


class EndsOnSigterm(Strategy):
    """A rank that is told to end lets all of them make a checkpoint (`preempted.ckpt`, beside those of the first
    ModelCheckpoint) before the next update, and then ends the run by an exception, and so with a non-zero status.

    It ends at once, without one: where it is not in training, if there is no ModelCheckpoint, at a further SIGTERM after some
    seconds (a process may get the same one twice), and if the update under way takes too long. SLURM's requeue signal, which
    Lightning answers with a checkpoint and a new job, waits for the next update in the same way; SIGTERM then says nothing new.

    A handler of the user's own is called at the end. Lightning's begins a collective inside of the signal, of which the peers
    know nothing: it waits for them, and they for it.
    """

    _users_sigterm: Any = signal.SIG_DFL
    _lightnings_requeue: Callable[[], None] | None = None
    _request = _GO_ON
    _requested_at = 0.0
    _is_saving = False
    _limit: threading.Timer | None = None
    step_info: StepInfo | None
    _trainer: Any

    def connect(self, model: Any) -> None:
        super().connect(model)
        # Before Lightning's, which puts it back at the end.
        before = signal.getsignal(signal.SIGTERM)
        owner = getattr(before, "__self__", None)
        self._users_sigterm = owner._users_sigterm if isinstance(owner, EndsOnSigterm) else before

    def process_dataloader(self, dataloader: Any) -> Any:
        if signal.getsignal(signal.SIGTERM) != self._users_sigterm:
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
        signal.signal(signal.SIGTERM, self._on_sigterm_of_slurm)
        number: signal.Signals = getattr(environment, "requeue_signal", None) or signal.SIGUSR1
        lightnings = signal.getsignal(number)
        if callable(lightnings) and lightnings != self._on_requeue:
            self._lightnings_requeue = functools.partial(lightnings, number, None)
            signal.signal(number, self._on_requeue)

    def teardown(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._request = _GO_ON
        if signal.getsignal(signal.SIGTERM) in (self._on_sigterm, self._on_sigterm_of_slurm):
            signal.signal(signal.SIGTERM, self._users_sigterm)
        super().teardown()

    # --- in the signal ---

    def _on_requeue(self, number: int, frame: Any) -> None:
        self._request = max(self._request, _REQUEUE)

    def _on_sigterm_of_slurm(self, number: int, frame: Any) -> None:
        """The job ends soon, which its requeue signal has said before; what is left of its time is used."""

    def _on_sigterm(self, number: int, frame: Any) -> None:
        """Passes it on to the ranks started by this one."""
        if self._request == _END and (self._is_saving or time.monotonic() - self._requested_at < _SAME_SIGNAL_SECONDS):
            return
        for rank in self._ranks_of_launcher():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, number)
        if self._request != _END and self._is_fitting() and self._checkpoint_path() is not None:
            self._request, self._requested_at = _END, time.monotonic()
            self._limit_update()
        else:
            self._end_run(frame)

    def _is_fitting(self) -> bool:
        state = self._trainer.state
        return bool(state.fn == "fit" and state.status == "running" and not self._trainer.sanity_checking)

    def _limit_update(self) -> None:
        self._limit = threading.Timer(_UPDATE_SECONDS, self._update_took_too_long)
        self._limit.daemon = True
        self._limit.start()

    def _update_took_too_long(self) -> None:
        if self._trainer.validating or self._is_saving:
            self._limit_update()
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def _end_run(self, frame: Any = None) -> None:
        ranks = self._ranks_of_launcher()
        atexit.register(_await_end, list(ranks))
        # Lightning watches them, and would kill this process as soon as one has ended, before it has come to its own end.
        ranks.clear()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end has begun
        if callable(self._users_sigterm):
            self._users_sigterm(signal.SIGTERM, frame)
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
            self._request, self._is_saving = _END, True
            path = self._checkpoint_path()
            self._trainer.save_checkpoint(path)
            self._is_saving = False
            rank_zero_info(f"SIGTERM: the run ends, and can be gone on with from {path}")
            self._end_run()

    def _checkpoint_path(self) -> str | None:
        for callback in self._trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
                return f"{callback.dirpath}/preempted.ckpt"
        return None


def _await_end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Kills those that have not ended within a bound."""
    deadline = time.monotonic() + _END_SECONDS
    for rank in ranks:
        try:
            rank.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
