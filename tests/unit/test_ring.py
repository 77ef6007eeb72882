"""Batches pass through a ring of shared memory: no message ever lies over one that is still to be read."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_lightning.runtime.ring import BatchReceiver, BatchSender, SharedMemory

_ALIGN = 64


class HasToWait(Exception):
    """The sender would wait for the receiver."""


def refuse_to_wait() -> None:
    raise HasToWait


@contextmanager
def ring(size: int, depth: int = 8, *, may_wait: bool = False) -> Iterator[tuple[BatchSender, Connection, SharedMemory]]:
    """A sender that raises HasToWait, instead of waiting, where it has to wait; and the other end of its pipe."""
    memory = SharedMemory(size)
    ours, theirs = multiprocessing.Pipe()
    sender = BatchSender(ours, memory, depth)
    with pytest.MonkeyPatch.context() as patch:
        if not may_wait:
            sender.while_waiting = refuse_to_wait
            patch.setattr("odb_lightning.runtime.ring._POLL_SECONDS", 0.0)
        try:
            yield sender, theirs, memory
        finally:
            ours.close()
            theirs.close()
            memory.close()


class Live(NamedTuple):
    """A message that was sent and not yet given back."""

    start: int | None
    extent: int
    payload: list[torch.Tensor]


def read_slowly(connection: Connection, payload: list[torch.Tensor]) -> Live:
    """The receiver's first half: where a message lies; it is copied out, and its space given back, later."""
    assert connection.poll(0), "the message is not there"
    _, number, _, sizes, start = pickle.loads(connection.recv_bytes())
    assert number == len(payload)
    if start is None:
        for size in sizes:
            assert len(connection.recv_bytes()) == size
        return Live(None, 0, payload)
    return Live(start, sum(-(-size // _ALIGN) * _ALIGN for size in sizes), payload)


def give_back(live: deque[Live], connection: Connection, memory: SharedMemory) -> None:
    """The receiver's second half, of the oldest message: it has to be there still."""
    oldest = live.popleft()
    offset = oldest.start
    for tensor in oldest.payload if offset is not None else ():
        assert offset is not None
        assert bytes(memory.array[offset : offset + tensor.numel()]) == bytes(tensor.numpy()), "a message was written over"
        offset += -(-tensor.numel() // _ALIGN) * _ALIGN
    memory.taken[0] += 1


def send_when_possible(
    sender: BatchSender, payload: list[torch.Tensor], live: deque[Live], connection: Connection, memory: SharedMemory
) -> None:
    """Sends; gives back as few messages as the sender asks for."""
    while True:
        try:
            sender.send("batch", len(payload), payload)
            break
        except HasToWait:
            assert live, "the sender waits although nothing is in flight"
            give_back(live, connection, memory)
    live.append(read_slowly(connection, payload))


def check_no_overlap(live: deque[Live], size: int) -> None:
    spans = sorted(
        (message.start, message.start + message.extent) for message in live if message.start is not None and message.extent
    )
    assert all(start >= 0 and end <= size for start, end in spans)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans)), spans


messages = st.lists(st.sampled_from([0, 1, 63, 64, 65, 200, 500, 900]) | st.integers(0, 1300), max_size=4)


@given(st.lists(st.tuples(messages, st.integers(0, 3)), max_size=40), st.integers(1, 6))
def test_messages_never_overlap_whatever_their_sizes_and_however_late_they_are_read(
    actions: list[tuple[list[int], int]], depth: int
) -> None:
    """After each message the receiver gives back up to 3; where the sender has to wait, one more."""
    size = 2048
    with ring(size, depth) as (sender, connection, memory):
        live: deque[Live] = deque()
        for number, (sizes, given_back) in enumerate(actions):
            payload = [torch.full((n,), (7 * number + i) % 255 + 1, dtype=torch.uint8) for i, n in enumerate(sizes)]
            send_when_possible(sender, payload, live, connection, memory)
            assert len(live) <= depth
            check_no_overlap(live, size)
            for _ in range(min(given_back, len(live))):
                give_back(live, connection, memory)
        while live:
            give_back(live, connection, memory)


def test_memory_is_used_up_to_its_end_and_again_from_its_beginning() -> None:
    with ring(1024) as (sender, connection, memory):
        live: deque[Live] = deque()
        starts = []
        for _ in range(6):
            payload = [torch.ones(320, dtype=torch.uint8)]
            send_when_possible(sender, payload, live, connection, memory)
            starts.append(live[-1].start)
        assert starts == [0, 320, 640, 0, 320, 640]


@pytest.mark.parametrize(("size", "through_memory"), [(512, True), (513, False), (5000, False)])
def test_a_message_over_half_the_memory_goes_through_the_pipe(size: int, through_memory: bool) -> None:
    """A larger one could wait for ever for a gap that is large enough."""
    with ring(1024) as (sender, connection, memory):
        payload = {"x": torch.arange(size, dtype=torch.int64).to(torch.uint8)}
        sender.send("batch", ("facts", 3), payload)
        assert connection.poll(0)
        kind, facts, received = BatchReceiver(_Spy(connection, through_memory), memory, pin_memory=False).receive()  # type: ignore[arg-type]
        assert (kind, facts) == ("batch", ("facts", 3))
        assert torch.equal(received["x"], payload["x"])
        sender.send("end", None)


class _Spy:
    """A connection that looks at how the message came."""

    def __init__(self, connection: Connection, through_memory: bool) -> None:
        self._connection = connection
        self._through_memory = through_memory

    def recv_bytes(self) -> bytes:
        message = self._connection.recv_bytes()
        assert (pickle.loads(message)[4] is not None) is self._through_memory
        return message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def test_messages_larger_than_pipe_and_memory_arrive_whole() -> None:
    sent = [
        {
            "x": torch.randn(300_000),
            "rows": [torch.arange(50_000), np.arange(40_000.0)],
            "empty": [torch.zeros(0, 3), np.zeros((0, 2))],
        },
        {"x": torch.zeros(3)},
        {"x": torch.ones(1_000_000, dtype=torch.bfloat16)},
    ]
    with ring(4096, may_wait=True) as (sender, connection, memory):
        received: list[Any] = []
        receiver = BatchReceiver(connection, memory, pin_memory=False)
        thread = threading.Thread(target=lambda: received.extend(receiver.receive() for _ in sent), daemon=True)
        thread.start()
        for number, payload in enumerate(sent):
            sender.send("batch", number, payload)
        thread.join(20.0)
        assert [facts for _, facts, _ in received] == [0, 1, 2]
        assert torch.equal(received[0][2]["x"], sent[0]["x"])
        assert received[0][2]["rows"][1].tolist() == list(range(40_000))
        assert received[0][2]["empty"][0].shape == (0, 3)
        assert received[0][2]["empty"][1].shape == (0, 2)
        assert received[2][2]["x"].dtype is torch.bfloat16


def test_what_was_received_does_not_change_with_later_messages() -> None:
    with ring(1024) as (sender, connection, memory):
        receiver = BatchReceiver(connection, memory, pin_memory=False)
        sender.send("batch", 0, torch.zeros(100))
        _, _, first = receiver.receive()
        for _ in range(5):
            sender.send("batch", 1, torch.ones(100))
            receiver.receive()
        assert first.tolist() == [0.0] * 100
        first.fill_(3)


def test_the_sender_is_at_most_so_many_messages_ahead_small_or_large() -> None:
    with ring(1024, depth=3) as (sender, connection, memory):
        receiver = BatchReceiver(connection, memory, pin_memory=False)
        sender.send("warning", "no payload")
        sender.send("batch", 1, torch.zeros(2))
        sender.send("batch", 2, torch.zeros(500))
        with pytest.raises(HasToWait):
            sender.send("batch", 3, torch.zeros(2))
        assert receiver.receive()[:2] == ("warning", "no payload")
        sender.send("batch", 3, torch.zeros(2))
        assert [receiver.receive()[1] for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("payload", [torch.zeros(3), torch.zeros(2000)], ids=["memory", "pipe"])
def test_a_receiver_that_is_gone_is_noticed(payload: torch.Tensor) -> None:
    with ring(1024, may_wait=True) as (sender, connection, _):
        connection.close()
        with pytest.raises((EOFError, ConnectionError)):
            for _ in range(20):
                sender.send("batch", 0, payload)


def test_a_payload_that_cant_be_pickled_leaves_the_ring_usable() -> None:
    with ring(1024, depth=2) as (sender, connection, memory):
        receiver = BatchReceiver(connection, memory, pin_memory=False)
        for _ in range(5):
            with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
                sender.send("batch", 0, [torch.zeros(2), lambda: None])
        sender.send("batch", 1, torch.zeros(2))
        assert receiver.receive()[1] == 1


def test_the_memory_gives_its_descriptor_back_and_stays_readable_while_it_is_mapped() -> None:
    before = set(os.listdir("/proc/self/fd"))
    memory = SharedMemory(4096)
    memory.array[:3] = 7
    memory.close()
    memory.close()
    assert memory.array[:4].tolist() == [7, 7, 7, 0]
    view = memory.array[1:3]
    del memory
    assert view.tolist() == [7, 7]
    del view
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def _write(memory: SharedMemory) -> None:
    memory.array[:] = np.arange(memory.size) % 251


def test_a_child_writes_into_the_same_memory() -> None:
    memory = SharedMemory(4096)
    child = multiprocessing.get_context("fork").Process(target=_write, args=(memory,))
    child.start()
    child.join(60.0)
    assert child.exitcode == 0
    assert memory.array[[0, 1, 250, 251, 4095]].tolist() == [0, 1, 250, 0, 4095 % 251]
    memory.close()
