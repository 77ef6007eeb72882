"""The training process's handle on its collate process."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import multiprocessing.util
import os
import time
import weakref
from typing import Any

from odb_lightning.runtime.collate_process import START_AGAIN, collate_main
from odb_lightning.runtime.errors import ODBLoaderError
from odb_lightning.runtime.ring import BatchReceiver, Readiness, SharedMemory
from odb_lightning.runtime.settings import HELPER_PROCESS_NAME, EpochRequest, LoaderSettings

_RING_BYTES = (2**28, 2**25)
"""Of address space: memory is used for the most that was under way at once. The less where a limit does not allow the more."""
_POLL_SECONDS = 1.0
_START_ATTEMPTS = 3
_FORK_SECONDS = 30.0
"""For a forked process to run: some lock of its parent's, held for ever, may stop it before it can tell."""

_live: weakref.WeakSet[CollateProcess] = weakref.WeakSet()


def _close_all() -> None:
    for process in list(_live):
        process.close()


class _AtExit:
    """Closes what is left when this process ends. Before multiprocessing waits for children, one of which would wait for ever:
    so by its means, which are those of a child that it started, too."""

    _process_id = 0

    def ensure(self) -> None:
        """Also in a process that was forked without multiprocessing, and has inherited this object."""
        if self._process_id != os.getpid():
            self._process_id = os.getpid()
            multiprocessing.util.Finalize(None, _close_all, exitpriority=100)


_at_exit = _AtExit()


def _new_ring() -> SharedMemory:
    most, least = _RING_BYTES
    try:
        return SharedMemory(most)
    except OSError:
        return SharedMemory(least)


class CollateProcess:
    """Starts the process; `begin` an epoch, `receive` its messages, `close` it at any time."""

    def __init__(self, settings: LoaderSettings, pin_memory: bool) -> None:
        self._timeouts = settings.timeouts
        self._rank = settings.rank
        self._owner = os.getpid()
        self._stand_in: Any = None
        self.is_stopping = False
        for attempts_left in reversed(range(_START_ATTEMPTS)):
            self._start(settings)
            if self._has_started(may_start_again=self._is_forked and attempts_left > 0):
                break
            self.close()
            self.is_stopping = False
        self._receiver = BatchReceiver(self._batches, self._memory, pin_memory)
        self._arrival = Readiness(self._batches)

    def _has_started(self, may_start_again: bool) -> bool:
        """Waits for the process to say so. False, if it may start again, for one that was forked at a bad moment: it says that,
        or nothing at all. For other ends see `receive`."""
        setup = self._timeouts.setup
        is_given_up_sooner = may_start_again and setup > _FORK_SECONDS
        try:
            if self._batches.poll(_FORK_SECONDS if is_given_up_sooner else setup):
                self._batches.recv_bytes()
                return True
            self._process.kill()
            if is_given_up_sooner:
                return False
            raise ODBLoaderError(
                f"the collate process of rank {self._rank} did not start within Timeouts(setup={setup:.0f}) seconds"
            )
        except (EOFError, ConnectionError):
            self._process.join(self._timeouts.stop)
            return not may_start_again or self._process.exitcode != START_AGAIN
        except BaseException:
            self.close()
            raise

    def _start(self, settings: LoaderSettings) -> None:
        context: Any = multiprocessing.get_context(settings.start_method)
        self._is_forked = context.get_start_method() == "fork"
        self._memory = _new_ring()
        self._batches, batches = context.Pipe()
        requests, self._requests = context.Pipe(duplex=False)
        stop, self._stop = context.Pipe(duplex=False)
        arguments = (settings, batches, requests, stop, self._memory, self._is_forked)
        # Not daemonic: daemonic processes can't have workers.
        self._process = context.Process(target=collate_main, args=arguments, name=HELPER_PROCESS_NAME, daemon=False)
        try:
            self._process.start()
        except Exception as error:
            self._close_connections()
            if multiprocessing.current_process().daemon:
                raise RuntimeError("a loader can't be iterated in a daemonic process: those may not have children") from error
            raise
        finally:
            for connection in (batches, requests, stop):
                connection.close()
        self._memory.close()
        _at_exit.ensure()
        _live.add(self)

    def begin(self, request: EpochRequest) -> None:
        """Asks for an epoch. Only after the messages of the one before were taken, up to "end"."""
        try:
            self._requests.send(request)
        except OSError as error:
            raise self._ended() from error

    @property
    def is_alive(self) -> bool:
        return bool(self._process.is_alive())

    def receive(self) -> tuple[str, Any, Any]:
        """The next message. Raises ODBLoaderError if the process has ended, or if none comes and nothing was got done within
        `Timeouts.batch`."""
        deadline, progress = time.monotonic() + self._timeouts.batch, int(self._memory.progress[0])
        while not self._arrival.within(min(_POLL_SECONDS, max(deadline - time.monotonic(), 0.0))):
            if not self._process.is_alive() and not self._arrival.within():
                raise self._ended()
            if progress != self._memory.progress[0]:
                deadline, progress = time.monotonic() + self._timeouts.batch, int(self._memory.progress[0])
            if time.monotonic() >= deadline:
                raise ODBLoaderError(
                    f"rank {self._rank} got no batch within Timeouts(batch={self._timeouts.batch:.0f}) seconds; its collate "
                    "process is alive: a sample, a collate_fn or a peer takes too long"
                )
        try:
            kind, facts, payload = self._receiver.receive()
        except (EOFError, ConnectionError) as error:
            raise self._ended() from error
        if kind == "stand_in":
            self._stand_in = payload
            return self.receive()
        return kind, facts, payload

    def failure_within(self, seconds: float) -> str | None:
        """The failure that this epoch ends with, or that was heard of since its end, if it comes in this time; the batches
        before it are given up."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(EOFError, OSError):
            self._requests.send(None)
            while self._batches.poll(max(deadline - time.monotonic(), 0.0)):
                kind, facts, _ = self._receiver.receive()
                if kind == "failure":
                    return None if facts is None else str(facts)
        return None

    def stand_in(self) -> Any:
        """A copy of this rank's stand-in batch, so that what is done to one does not reach the next. There is one from the
        first idle step on."""
        return copy.deepcopy(self._stand_in)

    def _ended(self) -> ODBLoaderError:
        self._process.join(self._timeouts.stop)
        return ODBLoaderError(
            f"the collate process of rank {self._rank} ended unexpectedly with exit code {self._process.exitcode}; a negative "
            "code is the signal that killed it (-9: often the machine ran out of memory)"
        )

    def stop(self) -> None:
        """Tells the process to end, without waiting for it: `close` has to follow."""
        if self.is_inherited:
            return
        self.is_stopping = True
        with contextlib.suppress(OSError):
            self._stop.send_bytes(b"stop")

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked copy, of a process that is its original's."""
        return os.getpid() != self._owner

    def close(self) -> None:
        """Ends the process and its workers, at once. Peers that wait for this rank's collate process are released."""
        if self.is_inherited:
            return
        _live.discard(self)
        if self._stop.closed:
            return
        self.stop()
        self._process.join(self._timeouts.stop)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._close_connections()

    def _close_connections(self) -> None:
        for connection in (self._batches, self._requests, self._stop):
            connection.close()
        self._memory.close()
