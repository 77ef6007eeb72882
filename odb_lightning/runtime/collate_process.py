"""The collate process: one per rank and loader, parent of the workers, owner of the exchange group."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection

import torch

from odb_lightning.runtime.counting import TargetCounter
from odb_lightning.runtime.epoch import EpochRun
from odb_lightning.runtime.errors import Failure, PeerFailure, RaisedFailure
from odb_lightning.runtime.exchange import Exchange, SoloExchange
from odb_lightning.runtime.fetch import Fetcher
from odb_lightning.runtime.forking import can_meet_peers
from odb_lightning.runtime.gloo import GlooExchange, has_abandoned_group
from odb_lightning.runtime.guard import end_with_parent, exit_put_off, keep_freed_memory, own_signals
from odb_lightning.runtime.presence import Presence
from odb_lightning.runtime.ring import BatchSender, SharedMemory
from odb_lightning.runtime.seeding import derive_seed, seed_everything_local
from odb_lightning.runtime.settings import HELPER_VARIABLE, EpochRequest, LoaderSettings
from odb_lightning.runtime.stand_in import StandIn

MAX_READY_BATCHES = 8
"""Batches that wait for the training process at most."""
_WORKER_SECONDS = 1.0
"""For a worker to end the sample that it is at, where the process ends."""
_MEET_SECONDS = 10.0
"""To find out whether it can."""
START_AGAIN = 75
"""The exit code of a process that was forked at a bad moment."""
_TRAINER_GONE = Failure("its training process", "it is gone without a word; it may have been killed")


def collate_main(
    settings: LoaderSettings,
    batches: Connection,
    requests: Connection,
    stop: Connection,
    memory: SharedMemory,
    is_forked: bool,
) -> None:
    """Serves epochs until it is told to stop, or its parent is gone."""
    gc.freeze()  # what was inherited is not this process's to delete: it may hold threads, which stayed behind
    gc.set_threshold(10_000)  # thousands of samples at hand are looked through less often
    own_signals(in_order=True)
    keep_freed_memory()
    os.environ[HELPER_VARIABLE] = "1"
    torch.set_num_threads(1)
    end_with_parent(stop)
    has_peers = settings.world_size > 1
    if has_peers and is_forked and not can_meet_peers(min(_MEET_SECONDS, settings.timeouts.setup / 2)):
        os._exit(START_AGAIN)
    batches.send_bytes(b"started")
    process = _CollateProcess(settings, BatchSender(batches, memory, MAX_READY_BATCHES), memory)
    with contextlib.suppress(SystemExit):  # how a stop reaches the main thread
        _serve_epochs(process, requests)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end has begun
    process.close()
    if has_abandoned_group():
        os._exit(0)


def _serve_epochs(process: _CollateProcess, requests: Connection) -> None:
    # Also after a failure, or an epoch that was to be the last one: the training process may be batches behind, and what it has
    # not taken yet would be lost with this process. It ends this process when it has.
    while True:
        try:
            request = requests.recv()
        except (EOFError, RuntimeError):  # RuntimeError: torch's word of a worker that died; the next epoch starts anew
            return
        if request is None:
            process.tell_what_was_heard()
        else:
            process.serve(request)


def _kill_workers() -> None:
    for worker in multiprocessing.active_children():
        worker.kill()


def _collate_seeded(settings: LoaderSettings, samples: list[object]) -> object:
    seed_everything_local(derive_seed(settings.seed, "stand-in"))
    return settings.collate_fn(samples)


class _CollateProcess:
    """What is kept over epochs: the workers, the warnings given, the stand-in."""

    def __init__(self, settings: LoaderSettings, sender: BatchSender, memory: SharedMemory) -> None:
        self._settings = settings
        self._sender = sender
        self._memory = memory
        self._counter = TargetCounter(settings.num_supervised_fn)
        self._stand_in = StandIn(functools.partial(_collate_seeded, settings), self._counter)
        self._fetcher: Fetcher | None = None
        self._last_exchange: Exchange = SoloExchange(Presence())

    def close(self) -> None:
        """Ends the workers, before multiprocessing's exit handler would terminate them and torch would call that a failure."""
        self._last_exchange.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler takes the end of a worker for a failure
        limit = threading.Timer(_WORKER_SECONDS, _kill_workers)
        limit.daemon = True
        limit.start()
        self._fetcher = None
        limit.cancel()
        _kill_workers()

    def tell_what_was_heard(self) -> None:
        """Of a peer that failed after this rank had come to the end of its epoch."""
        self._report(self._last_exchange.heard())

    def _count_progress(self) -> None:
        self._memory.progress[0] += 1

    def serve(self, request: EpochRequest) -> None:
        """Runs one epoch, and reports how it failed, if it did."""
        rank = self._settings.rank
        self._last_exchange.close()
        presence = Presence(request.epoch, self._count_progress)
        exchange: Exchange = SoloExchange(presence)
        told: str | None = None
        try:
            if request.store is not None:
                size, timeouts = self._settings.world_size, self._settings.timeouts
                exchange = GlooExchange(request.store, rank, size, timeouts, presence, request.before)
            self._last_exchange = exchange
            if self._fetcher is None:
                self._fetcher = Fetcher(self._settings)
            run = EpochRun(self._settings, request, self._fetcher, self._sender, self._counter, self._stand_in)
            # The workers exist by now: forked later, they would keep the group's sockets open after this process died.
            if isinstance(exchange, GlooExchange):
                exchange.meet()
                self._check_knobs(exchange, request)
            run.run(exchange)
        except RaisedFailure as error:
            told = error.failure.describe(rank)
        except PeerFailure as error:
            told = f"a peer ended this iteration: {error}"
        except (EOFError, ConnectionError):
            exchange.publish(_TRAINER_GONE)
        except SystemExit:
            parent = multiprocessing.parent_process()
            if parent is not None and not parent.is_alive():
                exchange.publish(_TRAINER_GONE)
            raise
        except Exception as error:
            failure = Failure.of(error, "the collate process")
            exchange.publish(failure)
            told = failure.describe(rank)
        finally:
            with exit_put_off():
                exchange.leave()
        if told is not None:
            # Not before: the training process ends this one as soon as it knows, and the peers have to hear of it first.
            self._report(told)

    def _report(self, text: str | None) -> None:
        with contextlib.suppress(EOFError, ConnectionError):  # the training process may be gone
            self._sender.send("failure", text)

    def _check_knobs(self, exchange: GlooExchange, request: EpochRequest) -> None:
        knobs = {"epoch": request.epoch, "accumulate": request.accumulate, "max_steps": request.max_steps}
        difference = exchange.compare_knobs(self._settings.shared_knobs() | knobs | request.data_knobs)
        failure = None
        if difference is not None:
            error = f"{difference}; every rank has to be given the same"
            failure = Failure("comparing the loader's options with rank 0's", f"ValueError: {error}")
            exchange.publish(failure)
        try:
            num_failures = exchange.all_reduce_sum([failure is not None])[0]
        except PeerFailure:
            if failure is None:
                raise
            num_failures = 1  # a peer that found the same has left already
        if num_failures:
            raise exchange.peer_failure() if failure is None else RaisedFailure(failure)
