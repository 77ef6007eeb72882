"""What a rank makes of peers that are slow, silent, gone or never there: two ranks as threads of one process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from odb_lightning import Timeouts
from odb_lightning.runtime.errors import Failure, ODBLoaderError, PeerFailure
from odb_lightning.runtime.gloo import GlooExchange
from odb_lightning.runtime.meeting import Meeting
from odb_lightning.runtime.presence import FINISHED, LEFT, Presence
from odb_lightning.runtime.settings import StoreAddress

pytestmark = pytest.mark.timeout(60)

LIMITS = Timeouts(setup=20.0, exchange=1.0, peer=2.0)


class Pair:
    """Two ranks' exchanges, met; each made and used by a thread."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.address = StoreAddress("odb/0/0", host="127.0.0.1", port=self.store.port)
        self.threads = ThreadPoolExecutor(2)
        self.exchanges: list[GlooExchange] = []

    def make(self, rank: int, limits: Timeouts = LIMITS, world_size: int = 2) -> GlooExchange:
        exchange = GlooExchange(self.address, rank, world_size, limits, Presence(epoch=5))
        self.exchanges.append(exchange)
        return exchange

    def both(self, function: Callable[[GlooExchange], Any]) -> list[Any]:
        return [future.result(20) for future in [self.threads.submit(function, exchange) for exchange in self.exchanges]]

    def met(self, limits: Timeouts = LIMITS) -> tuple[GlooExchange, GlooExchange]:
        ours, theirs = self.make(0, limits), self.make(1, limits)
        self.both(GlooExchange.meet)
        return ours, theirs

    def waiting(self, exchange: GlooExchange) -> Future[Any]:
        return self.threads.submit(exchange.all_reduce_max, [1])

    def close(self) -> None:
        # The peer first: what still waits for it then fails, and can be cleaned up.
        for exchange in reversed(self.exchanges):
            exchange.close()
        self.threads.shutdown(cancel_futures=True)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_reductions_and_a_broadcast(pair: Pair) -> None:
    pair.met()
    assert pair.both(lambda e: e.all_reduce_max([e.rank, -e.rank])) == [[1, 0]] * 2
    assert pair.both(lambda e: e.all_reduce_sum([e.rank, 2**50])) == [[1.0, 2.0**51]] * 2
    assert pair.both(lambda e: e.broadcast(b"abc" if e.rank == 1 else None, 1)) == [b"abc"] * 2
    assert all(exchange.seconds > 0 for exchange in pair.exchanges)
    assert all(exchange.presence.exchanges == 4 for exchange in pair.exchanges)


def test_a_slow_peer_is_waited_for_as_long_as_it_gets_on(pair: Pair) -> None:
    """Three times `Timeouts.exchange`; without progress it is not."""
    ours, theirs = pair.met()
    theirs.presence.round = 7
    theirs.presence.note("collating")
    result = pair.waiting(ours)
    got_on = threading.Event()
    for _ in range(15):
        theirs.presence.tick()
        got_on.wait(0.2)
    assert not result.done()
    begin = time.monotonic()
    with pytest.raises(PeerFailure, match=r"waited Timeouts\(exchange=1\) .* rank 1 \(round 7 of epoch 5, collating\)"):
        result.result(20)
    assert time.monotonic() - begin < 5


def test_progress_of_a_peer_is_progress_for_the_training_process(pair: Pair) -> None:
    ours, theirs = pair.met()
    signs: list[int] = []
    ours.presence.on_progress = lambda: signs.append(1)
    result = pair.waiting(ours)
    deadline = time.monotonic() + 20
    before = len(signs)
    while len(signs) < before + 3 and time.monotonic() < deadline:
        theirs.presence.tick()
        threading.Event().wait(0.1)
    assert len(signs) >= before + 3
    theirs.all_reduce_max([3])
    assert result.result(20) == [3]


def test_a_peer_without_a_sign_of_life_is_dead(pair: Pair) -> None:
    ours, theirs = pair.met(Timeouts(setup=5, exchange=60, peer=1))
    theirs.presence.note("fetching samples")
    theirs._beacon._write()
    theirs._beacon._stopped.set()  # as if its machine had lost the network
    with pytest.raises(PeerFailure, match=r"lost rank 1 \(round 0 of epoch 5, fetching samples\): no sign of life .*peer=1"):
        pair.waiting(ours).result(20)


def test_a_peer_that_left_is_told_from_one_that_died(pair: Pair) -> None:
    ours, theirs = pair.met()
    result = pair.waiting(ours)
    theirs.close()
    assert theirs.presence.phase == LEFT
    with pytest.raises(PeerFailure, match=r"rank 1 \(round 0 of epoch 5\) left the iteration before its end, by a break"):
        result.result(20)


def test_the_first_failure_published_is_what_all_are_told(pair: Pair) -> None:
    ours, theirs = pair.met()
    result = pair.waiting(ours)
    trainers = [Meeting(pair.address, rank, 2) for rank in range(2)]
    for trainer in trainers:
        trainer.connect(5.0)
    assert trainers[1].tell(Failure("its training loop", "ValueError: first", "line 3")) is None
    assert trainers[0].tell(Failure("its training loop", "an effect")) == (
        "rank 1 failed in its training loop: ValueError: first\n\nOriginal traceback on rank 1:\nline 3"
    )
    theirs.close()
    with pytest.raises(PeerFailure, match=r"^rank 1 failed in its training loop: ValueError: first\n\nOriginal traceback"):
        result.result(20)


def test_a_rank_that_has_finished_is_neither_late_nor_dead_nor_gone(pair: Pair) -> None:
    """Its training process may be batches behind, and fail, or not take them for long."""
    ours, theirs = pair.met()
    ours._peers.look()
    assert ours._peers.stale(0.0) == [1], "of one that is under way a silence counts"
    pair.both(GlooExchange.finish)
    for silence in (theirs.leave, theirs.close, theirs.close):
        silence()
        assert theirs.presence.phase == FINISHED
        ours._peers.look()
        assert (ours._peers.stale(0.0), ours._peers.left()) == ([], [])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_has_finished_hears_of_a_failure_in_the_tail(pair: Pair, victim: int) -> None:
    exchanges = pair.met()
    pair.both(GlooExchange.finish)
    pair.both(GlooExchange.leave)
    trainer = Meeting(pair.address, victim, 2)
    trainer.connect(5.0)
    assert trainer.tell(Failure("its training loop", "ValueError: late")) is None, "nobody else was first"
    deadline = time.monotonic() + 20
    while exchanges[1 - victim].heard() is None and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    assert exchanges[1 - victim].heard() == f"rank {victim} failed in its training loop: ValueError: late"
    assert exchanges[victim].heard() is None, "its own"


def test_a_rank_that_never_comes_is_named_and_one_that_is_under_way_with_what_it_does(pair: Pair) -> None:
    ours, _ = pair.make(0, world_size=3), pair.make(1, world_size=3)
    ours._timeouts = Timeouts(setup=2.0)  # not for its connections, for which torch looks up names
    with pytest.raises(
        PeerFailure,
        match=r"rank 0 did not meet rank 1 \(round 0 of epoch 5, starting its workers\), rank 2 within Timeouts\(setup=2\)",
    ):
        ours.meet()


def test_a_failure_before_the_ranks_have_met_is_told_at_once(pair: Pair) -> None:
    ours, theirs = pair.make(0, Timeouts(setup=60)), pair.make(1, Timeouts(setup=60))
    result = pair.threads.submit(ours.meet)
    theirs.publish(Failure("starting", "RuntimeError: no data"))
    with pytest.raises(PeerFailure, match="rank 1 failed in starting: RuntimeError: no data"):
        result.result(20)


def test_without_the_store_a_lost_peer_is_told_all_the_same(pair: Pair) -> None:
    ours, theirs = pair.met()
    result = pair.waiting(ours)
    pair.store = None  # type: ignore[assignment]
    theirs._group = None
    with pytest.raises(PeerFailure, match=r"rank 0 lost"):
        result.result(20)


def test_a_presence_goes_through_the_store_whole() -> None:
    presence = Presence(epoch=3)
    presence.round, presence.exchanges, presence.beat = 4, 5, 6
    presence.note("collating")
    there = Presence.decode(presence.encode().encode())
    fields = ("epoch", "round", "phase", "exchanges", "progress", "beat")
    assert [getattr(there, name) for name in fields] == [3, 4, "collating", 5, 1, 6]
    assert there.describe(2) == "rank 2 (round 4 of epoch 3, collating)"


def test_a_store_that_comes_late_is_waited_for_and_one_that_never_comes_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = StoreAddress("odb/0/0", host="127.0.0.1", port=port)
    with pytest.raises(ODBLoaderError, match=rf"rank 1 found no store at 127.0.0.1:{port} within Timeouts\(setup=1\) seconds"):
        Meeting(address, 1, 2).connect(1.0)
    meeting = Meeting(address, 1, 2)
    with ThreadPoolExecutor(1) as threads:
        connected = threads.submit(meeting.connect, 20.0)
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        connected.result(25)
    assert meeting.tell(Failure("its training loop", "ValueError: no")) is None
    assert store.num_keys() > 0


def test_with_the_store_gone_there_is_nobody_to_tell(pair: Pair) -> None:
    meeting = Meeting(pair.address, 1, 2)
    meeting.connect(5.0)
    pair.store = None  # type: ignore[assignment]
    with pytest.raises(RuntimeError):
        meeting.tell(Failure("its training loop", "ValueError: no"))


def test_a_store_made_anew_at_the_same_place_is_found(pair: Pair) -> None:
    Meeting(pair.address, 1, 2).connect(5.0)
    pair.store = None  # type: ignore[assignment]
    pair.store = dist.TCPStore("127.0.0.1", pair.address.port, is_master=True, wait_for_workers=False)
    meeting = Meeting(pair.address, 1, 2)
    meeting.connect(5.0)
    assert meeting.tell(Failure("its training loop", "ValueError: no")) is None


def test_a_single_rank_has_nobody_to_tell() -> None:
    meeting = Meeting(None, 0, 1)
    meeting.connect(0.0)
    assert meeting.tell(Failure("its training loop", "ValueError: no")) is None
