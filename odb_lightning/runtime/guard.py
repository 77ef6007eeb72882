"""No process outlives the one it works for."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

_PARENT_POLL_SECONDS = 0.5
_ORDERLY_END_SECONDS = 10.0
_SIGNAL_AGAIN_SECONDS = 0.05
_RAISE_AGAIN_SECONDS = 1.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 2**30


def _end() -> None:
    """Ends this process, its own children first: in order if its main thread can be interrupted, so that clean-up handlers run,
    and at once if that thread does not react (it may wait for peers)."""
    main, deadline = threading.main_thread(), time.monotonic() + _ORDERLY_END_SECONDS
    _OrderlyExit.is_wanted = True
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        while main.is_alive() and time.monotonic() < deadline:
            # Until it was handled: a signal that comes just before a blocking call does not interrupt that call.
            if main.ident is not None and signal.getsignal(signal.SIGTERM) is _exit_in_order:
                signal.pthread_kill(main.ident, signal.SIGTERM)
            main.join(_SIGNAL_AGAIN_SECONDS)
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    for child in children:
        child.join(1.0)
    os._exit(1)


def end_with_parent(stop: Connection | None = None) -> None:
    """Ends this process when its parent is gone or a message comes on `stop`, whatever its main thread waits for.

    Works with fork, spawn and forkserver. The sentinel alone is not enough: a sibling forked later can hold its other
    end, hence the look at the parent's id (which under forkserver is the fork server's and does not change).
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sources: list[Any] = [parent.sentinel] if stop is None else [parent.sentinel, stop]
    parent_id = os.getppid()

    def watch() -> None:
        while not wait(sources, _PARENT_POLL_SECONDS) and os.getppid() == parent_id:
            pass
        _end()

    threading.Thread(target=watch, name="odb-guard", daemon=True).start()


def end_with_launcher() -> None:
    """Ends this process when the one that started it is gone: for a rank that a launcher started."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_PARENT_POLL_SECONDS)
        _end()

    threading.Thread(target=watch, name="odb-launcher-watch", daemon=True).start()


def keep_freed_memory() -> None:
    """Has this process keep what it frees for its next message or batch, where the C library is glibc: to map and unmap large
    blocks each time costs more than to fill them."""
    with contextlib.suppress(AttributeError, OSError):
        options = ctypes.CDLL(None).mallopt
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            options(option, _KEPT_BYTES)


class _OrderlyExit:
    """When the exception that ends the main thread is raised: again if it was lost, as one inside of a finaliser is."""

    last_raised = 0.0
    is_put_off = False
    is_wanted = False
    """By this process itself. What others send it (SIGTERM to all of a job) is for its training process to act on."""


def _exit_in_order(*_: object) -> None:
    now = time.monotonic()
    if _OrderlyExit.is_wanted and not _OrderlyExit.is_put_off and now - _OrderlyExit.last_raised >= _RAISE_AGAIN_SECONDS:
        _OrderlyExit.last_raised = now
        raise SystemExit(0)


def _report_unraisable(found: Any) -> None:
    """As ever, but for the end itself where it was lost, which comes again."""
    if not isinstance(found.exc_value, SystemExit):
        sys.__unraisablehook__(found)


@contextmanager
def exit_put_off() -> Iterator[None]:
    """A stop waits for what is done inside: clean-up, which takes no time."""
    _OrderlyExit.is_put_off = True
    try:
        yield
    finally:
        _OrderlyExit.is_put_off = False


def own_signals(*, in_order: bool = False) -> None:
    """Leaves Ctrl-C and SIGTERM to the training process, which ends this one: at once or, `in_order`, by an exception in its
    main thread, so that clean-up runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_in_order if in_order else signal.SIG_IGN)
    if in_order:
        sys.unraisablehook = _report_unraisable


class GuardedWorkerInit:
    """A `worker_init_fn` that guards the worker, then calls the user's."""

    def __init__(self, user_init: Callable[[int], None] | None) -> None:
        self.user_init = user_init

    def __call__(self, worker_id: int) -> None:
        own_signals()
        end_with_parent()
        keep_freed_memory()
        if self.user_init is not None:
            self.user_init(worker_id)


class TimeLimit:
    """A context that may be entered again and again; raises TimeoutError in the main thread if one takes too long."""

    def __init__(self, seconds: float, message: str) -> None:
        self.seconds = seconds
        self.message = message

    def _expired(self, *_: object) -> NoReturn:
        raise TimeoutError(self.message)

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, self._expired)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
