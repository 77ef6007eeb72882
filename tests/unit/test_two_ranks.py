"""What loaders tell each other when one leaves early, or fails between or in the tail of epochs, or when the store goes.

One is a fork of this process. On more ranks, and with Lightning: tests/multiprocess.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from odb_lightning import ODBDataLoader, ODBLoaderError, Timeouts
from odb_lightning.runtime import collate_process, meeting
from odb_lightning.sampling import ShardedSampler
from tests.loader_data import Lengths, UserError, make_loader, raise_in_the_users_code
from tests.loader_processes import no_process_is_left  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_process_is_left")]

SECONDS = 20
LIMITS = Timeouts(setup=SECONDS, exchange=SECONDS, worker=SECONDS, batch=SECONDS)
SHORT, LONG = [4] * 40, [4] * 4000
"""A few steps on each rank, which the loader plans to the end though none was taken; and many more than that."""
FAILED = r"^(a peer ended this iteration: )?rank {0} failed in its training loop: .*UserError: bad sample {0}\n"


def loader_of(rank: int, port: int, lengths: list[int] = SHORT, **options: Any) -> ODBDataLoader:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    ours: dict[str, Any] = {"l_max": 16, "rank": rank, "world_size": 2, "store": store, "timeouts": LIMITS}
    return make_loader(Lengths(lengths), **(ours | options))


@contextmanager
def another_process(act: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Runs `act(connection, *arguments)`; gives the other end of the connection. It has to end well, and in time."""
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=act, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        yield ours
        process.join(SECONDS)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        ours.close()


def answer(connection: Any) -> Any:
    assert connection.poll(SECONDS), "no answer"
    return connection.recv()


@contextmanager
def hosted_store(port: int = 0) -> Iterator[int]:
    """A store of several tenants in a process of its own, as that of a launcher: its port. (The process that holds a store is
    better not the one that forks: see `forking.can_meet_peers`.)"""

    def host(connection: Any) -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)
        connection.send(store.port)
        connection.poll(3 * SECONDS)

    with another_process(host) as connection:
        yield answer(connection)
        connection.send("end")


@pytest.fixture
def port() -> Iterator[int]:
    """Of a store."""
    with hosted_store() as port:
        yield port


def own_error(rank: int) -> UserError:
    try:
        raise_in_the_users_code(rank)
    except UserError as error:
        return error
    raise AssertionError


# --- leaving in the middle of an epoch ---


def error_in_the_body_of_a_loop(loader: ODBDataLoader) -> None:
    try:
        for _ in loader:
            raise_in_the_users_code(1)
    except UserError as error:
        assert loader._iteration is None, "a `for` loop drops its iteration before anyone hears of the error"
        assert loader.close(error) is None  # as a strategy does


def error_inside_of_with(loader: ODBDataLoader) -> None:
    with pytest.raises(UserError), loader:
        for _ in loader:
            raise_in_the_users_code(1)


def error_beside_an_iterator(loader: ODBDataLoader) -> None:
    iteration = iter(loader)
    next(iteration)
    assert loader.close(own_error(1)) is None


def close_a_generator(loader: ODBDataLoader) -> None:
    def batches() -> Iterator[Any]:
        with loader:
            yield from loader

    generator = batches()
    next(generator)
    generator.close()


def leave_by_break(loader: ODBDataLoader) -> None:
    with loader:
        for _ in loader:
            break


LEFT = r"^a peer ended this iteration: rank 1 \(round \d+ of epoch 0\) left the iteration before its end, by a break"


@pytest.mark.parametrize(
    ("leave", "num_workers", "told"),
    [
        (error_in_the_body_of_a_loop, 0, FAILED.format(1)),
        (error_in_the_body_of_a_loop, 2, FAILED.format(1)),
        (error_inside_of_with, 2, FAILED.format(1)),
        (error_beside_an_iterator, 2, FAILED.format(1)),
        (close_a_generator, 2, LEFT),
        (leave_by_break, 2, LEFT),
    ],
)
def test_what_a_peer_is_told_of_a_rank_that_leaves(
    port: int, leave: Callable[[ODBDataLoader], None], num_workers: int, told: str
) -> None:
    def rank_1(_: Any) -> None:
        leave(loader_of(1, port, LONG, num_workers=num_workers))

    with another_process(rank_1), loader_of(0, port, LONG) as loader, pytest.raises(ODBLoaderError, match=told):
        list(loader)


def test_a_peer_that_leaves_as_soon_as_it_hears_is_not_taken_for_the_cause(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that failed looks for peers that have left before it."""
    heard = get_context("fork").Event()
    publish = meeting.publish_failure

    def publish_until_heard(*arguments: Any) -> str | None:
        earlier = publish(*arguments)
        assert heard.wait(SECONDS)
        return earlier

    monkeypatch.setattr(meeting, "publish_failure", publish_until_heard)

    def rank_1(_: Any) -> None:
        error_in_the_body_of_a_loop(loader_of(1, port, LONG))

    with another_process(rank_1):
        with loader_of(0, port, LONG) as loader, pytest.raises(ODBLoaderError, match=FAILED.format(1)):
            list(loader)
        heard.set()


# --- failing in the tail, when the loaders have planned the epoch to its end ---


@pytest.mark.parametrize("has_begun", [False, True], ids=["before the peer's next epoch", "while the peer begins it"])
@pytest.mark.parametrize("persistent_workers", [True, False])
def test_a_failure_in_the_tail_is_told_to_a_peer_that_begins_the_next_epoch(
    port: int, persistent_workers: bool, has_begun: bool
) -> None:
    """A peer that came to the end of its epoch is not taken for one that left it."""

    def rank_1(connection: Any) -> None:
        loader = loader_of(1, port, persistent_workers=persistent_workers)
        iteration = iter(loader)
        next(iteration)
        answer(connection)
        if has_begun:
            root, number = loader._meeting.address.prefix.rsplit("/", 1)  # type: ignore[union-attr]
            loader._store.wait([f"{root}/{int(number) + 1}/ready/0"], timedelta(seconds=SECONDS))
        assert loader.close(own_error(1)) is None
        connection.send("told")

    with another_process(rank_1) as peer, loader_of(0, port, persistent_workers=persistent_workers) as loader:
        assert sum(batch.step.num_samples for batch in loader) == 20
        peer.send("finished")
        if not has_begun:
            answer(peer)
        begin = time.monotonic()
        with pytest.raises(ODBLoaderError, match=FAILED.format(1)):
            list(loader)
        assert time.monotonic() - begin < SECONDS / 2, "not by the limit on meeting"


def test_a_failure_in_the_tail_is_the_first_cause_of_what_follows_from_it(port: int) -> None:
    def rank_1(connection: Any) -> None:
        loader = loader_of(1, port)
        iteration = iter(loader)
        next(iteration)
        assert loader.close(own_error(1)) is None
        connection.send("told")

    with another_process(rank_1) as peer:
        loader = loader_of(0, port)
        iteration = iter(loader)
        next(iteration)
        answer(peer)
        cause = loader.close(RuntimeError("connection closed by peer"))
        assert cause is not None and cause.startswith("rank 1 failed in its training loop: ")


def test_a_failure_in_the_tail_of_the_rank_that_holds_the_store_was_heard_in_time() -> None:
    """It waits for its peers to hear of it before the store goes with it."""

    def rank_0(connection: Any) -> None:
        collate_process._MEET_SECONDS = 2.0  # it forks while its peer connects
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        connection.send(store.port)
        loader = loader_of(0, store.port)
        iteration = iter(loader)
        next(iteration)
        deadline = time.monotonic() + SECONDS
        while store.add(f"{loader._meeting.address.prefix}/finished", 0) < 2:  # type: ignore[union-attr]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert loader.close(own_error(0)) is None

    with another_process(rank_0) as peer:
        loader = loader_of(1, answer(peer))
        iteration = iter(loader)
        next(iteration)
        with pytest.raises(EOFError):
            answer(peer)
        cause = loader.close(RuntimeError("connection closed by peer"))
        assert cause is not None and cause.startswith("rank 0 failed in its training loop: ")


# --- the store, between two epochs ---


def epochs_of(rank: int, port: int, next_epoch: Callable[[], None], persistent_workers: bool) -> list[list[Any]]:
    with loader_of(rank, port, persistent_workers=persistent_workers) as loader:
        epochs = []
        for _ in range(2):
            epochs.append([sample_id for batch in loader for sample_id in batch.step.sample_ids])
            next_epoch()
        return epochs


@pytest.mark.parametrize("persistent_workers", [True, False])
def test_a_store_of_several_tenants_that_is_made_anew_between_epochs(persistent_workers: bool) -> None:
    def rank_1(connection: Any) -> None:
        def next_epoch() -> None:
            connection.send("next")
            answer(connection)

        connection.send(epochs_of(1, answer(connection), next_epoch, persistent_workers))

    stores = [hosted_store()]
    port = stores[-1].__enter__()

    def next_epoch() -> None:
        answer(peer)
        stores[-1].__exit__(None, None, None)
        stores.append(hosted_store(port))
        assert stores[-1].__enter__() == port
        peer.send("next")

    with another_process(rank_1) as peer:
        peer.send(port)
        epochs = epochs_of(0, port, next_epoch, persistent_workers)
        theirs = answer(peer)
    stores[-1].__exit__(None, None, None)
    assert [sorted(ours + others) for ours, others in zip(epochs, theirs, strict=True)] == [list(range(40))] * 2


def test_a_store_that_is_gone_when_an_epoch_begins_is_named_soon() -> None:
    def rank_1(connection: Any) -> None:
        with loader_of(1, answer(connection)) as loader:
            list(loader)
            answer(connection)

    with another_process(rank_1) as peer, hosted_store() as port:
        peer.send(port)
        loader = loader_of(0, port)
        assert sum(batch.step.num_samples for batch in loader) == 20
        peer.send("end")
    begin = time.monotonic()
    with loader, pytest.raises(ODBLoaderError, match=rf"rank 0 found no store at 127.0.0.1:{port} within Timeouts"):
        list(loader)
    assert time.monotonic() - begin < SECONDS / 2


@pytest.mark.parametrize("how", ["limit", "quota"])
def test_a_rank_whose_epoch_ended_by_its_limit_is_not_accused_and_hears(port: int, how: str) -> None:
    """By max_steps, as with limit_train_batches=N, or by the quota of non-join."""

    def make(rank: int) -> Any:
        loader = loader_of(rank, port, **({"mode": "non_join", "quota": 20} if how == "quota" else {}))
        if how == "limit":
            loader.attach(rank=rank, world_size=2, accumulate=1, max_steps=3)
        return loader

    def rank_1(connection: Any) -> None:
        loader = make(1)
        iteration = iter(loader)
        next(iteration)
        answer(connection)
        connection.send(loader.close(own_error(1)))

    with another_process(rank_1) as peer, make(0) as loader:
        assert list(loader)
        peer.send("finished")
        assert answer(peer) is None, "accused"
        with pytest.raises(ODBLoaderError, match=FAILED.format(1)):
            list(loader)


kept: Any = None


@pytest.mark.parametrize("in_the_middle", [False, True])
def test_a_training_process_of_multiprocessing_ends(in_the_middle: bool) -> None:
    """One that keeps its loader (a global): multiprocessing joins children there before it runs atexit handlers."""

    def train() -> None:
        global kept
        loader = make_loader(Lengths([4] * 400))
        kept = (loader, iter(loader))
        next(kept[1])
        if not in_the_middle:
            list(kept[1])

    process = get_context("fork").Process(target=train)
    process.start()
    process.join(10)
    code = process.exitcode
    process.kill()
    process.join()
    assert code == 0


def test_a_fork_that_drops_its_copy_of_an_iteration_leaves_the_originals_processes_alone() -> None:
    with make_loader(Lengths([4] * 400)) as loader:
        iteration = iter(loader)
        samples = next(iteration).step.num_samples
        pid = os.fork()
        if pid == 0:
            del iteration
            os._exit(0)
        os.waitpid(pid, 0)
        assert samples + sum(batch.step.num_samples for batch in iteration) == 400


class StopsInSampler:
    def __iter__(self) -> Iterator[int]:
        return iter([next(iter(()))])


class StopsInLen(Lengths):
    def __len__(self) -> int:
        raise StopIteration


class StopsInSetEpoch:
    def set_epoch(self, epoch: int) -> None:
        raise StopIteration

    def __iter__(self) -> Iterator[Any]:
        return iter([Lengths([4])[0]])


@pytest.mark.parametrize("where", ["sampler", "len", "set_epoch"])
def test_stop_iteration_while_an_epoch_begins_is_no_end(where: str) -> None:
    dataset: Any = {"sampler": Lengths([4] * 5), "len": StopsInLen([4] * 5), "set_epoch": StopsInSetEpoch()}[where]
    with (
        make_loader(dataset, sampler=StopsInSampler() if where == "sampler" else None) as loader,
        pytest.raises((RuntimeError, ODBLoaderError)),
    ):
        list(loader)


def test_a_failure_after_the_end_of_an_epoch_is_told(port: int) -> None:
    """As in on_train_epoch_end, or in a validation of one's own: the peer is not left to wait for Timeouts(setup)."""

    def rank_1(connection: Any) -> None:
        with pytest.raises(type(own_error(1))), loader_of(1, port) as loader:
            list(loader)
            raise own_error(1)
        answer(connection)

    limits = Timeouts(setup=8, exchange=SECONDS, worker=SECONDS, batch=SECONDS)
    with another_process(rank_1) as peer, loader_of(0, port, timeouts=limits) as loader:
        list(loader)
        begin = time.monotonic()
        try:
            with pytest.raises(ODBLoaderError, match=FAILED.format(1)):
                list(loader)
        finally:
            peer.send("end")
        assert time.monotonic() - begin < 5


def test_a_seed_may_be_any_kind_of_whole_number() -> None:
    loader = make_loader(Lengths([4] * 5), seed=np.int64(3))
    assert sorted(loader._views(0, 1)) == list(range(5))
    assert list(ShardedSampler(5, rank=0, world_size=1, seed=3)) == list(loader._views(0, 1))


@pytest.mark.parametrize("name", ["max_rows", "quota"])
def test_on_several_ranks_knobs_may_be_any_kind_of_whole_number(port: int, name: str) -> None:
    more = {"mode": "non_join"} if name == "quota" else {}

    def rank_1(_: Any) -> None:
        with loader_of(1, port, **{name: 4}, **more) as loader:
            list(loader)

    with another_process(rank_1), loader_of(0, port, **{name: np.int64(4)}, **more) as loader:
        list(loader)
