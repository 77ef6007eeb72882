"""What the ranks of tests/multiprocess/test_loader_ranks.py do. Each case gives back something that JSON can hold."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from odb_lightning import ODBBatch, ODBDataLoader, Timeouts, current_shard
from tests.helpers import running_members
from tests.loader_data import IGNORED, Fails, Lengths, collate, lognormal_lengths, raise_in_the_users_code
from tests.loader_processes import all_end

TIMEOUTS = Timeouts(setup=20, exchange=25, worker=25, batch=30)
"""Far above what a failure may take to be noticed, so that a test can tell; and far below the limit on the whole run."""

CASE_SECONDS = 60

LENGTHS = [*lognormal_lengths(70, seed=3, longest=50), 100, 100, 0]


_LOADER_OPTIONS = (
    "l_max",
    "buffer_size",
    "max_rows",
    "shuffle",
    "oversize",
    "accumulate",
    "num_workers",
    "seed",
    "mode",
    "quota",
)


@dataclasses.dataclass(frozen=True)
class Form:
    """A loader and the shards it is given (None: the default sampler's)."""

    lengths: tuple[int, ...]
    shards: tuple[tuple[int, ...], ...] | None = None
    l_max: int = 64
    buffer_size: int = 16
    max_rows: int | None = None
    shuffle: bool = True
    oversize: str = "emit"
    accumulate: int = 1
    num_workers: int = 1
    seed: int = 0
    mode: str = "join"
    quota: int | None = None

    def loader(self, own_rank: int, **options: Any) -> ODBDataLoader:
        own = {name: getattr(self, name) for name in _LOADER_OPTIONS}
        if self.shards is not None:
            own["sampler"] = self.shards[own_rank] if own_rank < len(self.shards) else ()
        return make_loader(Lengths(self.lengths), **(own | options))


def _cut(*sizes: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive ids in shards of these sizes."""
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))


FORMS = {
    "default": Form(tuple(LENGTHS)),
    "in-order": Form(tuple(LENGTHS), shuffle=False, buffer_size=1024),
    "no-workers": Form(tuple(LENGTHS), num_workers=0, seed=9, l_max=200),
    "dropping": Form(tuple(LENGTHS), oversize="drop", max_rows=3),
    "window-of-one": Form(tuple(LENGTHS[:20]), buffer_size=1),
    "unequal": Form(tuple(LENGTHS), _cut(40, 3, 0, 20), accumulate=3),
    "first-is-empty": Form(tuple(LENGTHS), _cut(0, 30, 7, 1), shuffle=False),
    "views-repeat": Form(tuple(LENGTHS), ((5, 5, 6), (5, 7, 7, 7), (), (1,))),
    "all-long-on-one": Form(tuple([200] * 6 + [5] * 40), _cut(6, 20, 10, 10), l_max=100),
    "5-6-7": Form((5, 6, 7), l_max=1024, buffer_size=1024),
    "8-and-2": Form(tuple([100] * 24), _cut(8, 2, 4, 4), l_max=100, accumulate=4),
    "4-4-8-4": Form(tuple([100] * 20), _cut(4, 4, 8, 4), l_max=100),
    "10-short-1-long": Form(tuple([64] * 10 + [900]), l_max=1024, buffer_size=8),
    "8-and-5": Form(tuple(LENGTHS), _cut(8, 5)),
    "40-and-29": Form(tuple(LENGTHS), _cut(40, 29), buffer_size=8),
    "all-over-budget": Form(tuple(range(65, 85)), _cut(7, 2, 0, 11)),
    "huge-outlier": Form((*LENGTHS[:40], 20_000), l_max=100),
    "zeros": Form((0, 0, 4, 0, 9, 0, 3, 8, 0, 0, 5), _cut(2, 5, 0, 4), l_max=20),
    "minimal": Form((1, 64, 65, 3, 640), l_max=64),
    "nothing": Form(()),
    "all-dropped": Form((0, 0, 0)),
}

NON_JOIN_FORMS = {
    "24-and-5": Form(tuple(LENGTHS), _cut(24, 5, 0, 7), mode="non_join"),
    "empty": Form(tuple(LENGTHS), _cut(30, 0, 0, 1), mode="non_join", accumulate=3),
    "quota": Form(tuple(LENGTHS), _cut(9, 20, 30, 10), mode="non_join", quota=150, num_workers=0, shuffle=False),
    "small-quota": Form(tuple(LENGTHS), _cut(30, 20, 3, 10), mode="non_join", quota=11, accumulate=2),
    "zeros": Form((0, 0, 4, 0, 9, 0, 0, 8, 0, 0, 5), _cut(5, 2, 0, 4), l_max=20, mode="non_join"),
    "window-of-one": Form(tuple(LENGTHS), _cut(12, 5, 1, 7), mode="non_join", buffer_size=1),
}


def position() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def make_loader(dataset: Any, **options: Any) -> ODBDataLoader:
    defaults: dict[str, Any] = {
        "l_max": 64,
        "collate_fn": collate,
        "buffer_size": 16,
        "num_workers": 1,
        "multiprocessing_context": "fork",
        "timeouts": TIMEOUTS,
    }
    return ODBDataLoader(dataset, **(defaults | options))


def record(batch: ODBBatch) -> dict[str, Any]:
    facts = dataclasses.asdict(batch.step) | {"sample_ids": list(batch.step.sample_ids)}
    if batch.step.is_idle:
        return facts | {"stand_in": describe(batch.stand_in), "data": repr(batch.data)}
    assert batch.stand_in is None
    return facts | {"data": describe(batch.data)}


def describe(data: Any) -> dict[str, Any]:
    targets = int((data["labels"][:, 1:] != IGNORED).sum())
    return {"ids": data["input_ids"][:, 0].tolist(), "shape": list(data["input_ids"].shape), "targets": targets}


def run_form(name: str, epochs: int = 2, joins: bool = True) -> dict[str, Any]:
    """All steps of all epochs of a form."""
    with (FORMS if joins else NON_JOIN_FORMS)[name].loader(position()[0]) as loader:
        steps = [record(batch) for _ in range(epochs) for batch in loader]
        stats = dataclasses.asdict(loader.stats)
    return {"steps": steps, "stats": stats}


def stand_ins() -> dict[str, Any]:
    """r0 has six samples, r1 one with targets, r2 none, r3 one without targets: what they get when idle, altered each time."""
    lengths = (9, 8, 7, 6, 5, 4, 3, 2)
    shards = ((0, 1, 2, 3, 4, 5), (6,), (), (7,))
    rank, _ = position()
    loader = make_loader(Lengths(lengths, masked=2), sampler=shards[rank], l_max=9, max_rows=1, shuffle=False)
    seen = []
    with loader:
        for _ in range(2):
            for batch in loader:
                seen.append(record(batch))
                if batch.step.is_idle:
                    batch.stand_in["input_ids"].fill_(-1)
                    batch.stand_in["labels"].fill_(-1)
                    batch.stand_in.clear()
    return {"steps": seen}


def shortest_stand_in() -> dict[str, Any]:
    """r0 is idle at last. Of its first group, in the order of this seed, the shortest sample has no targets."""
    lengths = [*(12, 3, 2, 8, 4), *[4] * 40]
    shards = ((0, 1, 2, 3, 4), tuple(range(5, 45)))
    rank, _ = position()
    with make_loader(Lengths(lengths, masked=3), sampler=shards[rank], l_max=36, seed=2, alignment="paper") as loader:
        return {"steps": [record(batch) for batch in loader]}


def _error_of(batches: Iterable[Any]) -> dict[str, Any]:
    """How an epoch ends: the text of the error, the seconds it took, and whether all of this rank's processes are gone."""
    begin = time.monotonic()
    try:
        count = sum(1 for _ in batches)
        return {"error": None, "batches": count}
    except Exception as error:
        seconds = time.monotonic() - begin
        left = [pid for pid in running_members(os.getpgrp()) if pid != os.getpid()]
        return {"type": type(error).__name__, "error": str(error), "seconds": seconds, "clean": all_end(left)}


def _collate_that_fails(samples: list[Any]) -> Any:
    if any(int(sample["input_ids"][0]) == 37 for sample in samples):
        raise_in_the_users_code(37)
    return collate(samples)


def _length_that_fails(sample: Any) -> int:
    if int(sample["input_ids"][0]) == 37:
        raise_in_the_users_code(37)
    return len(sample["input_ids"])


def fails_on_rank_1(how: str, num_workers: int = 1) -> dict[str, Any]:
    """Sample 37 is on rank 1 alone (in any world size); what goes wrong with it."""
    rank, world_size = position()
    others = [index for index in range(60) if index != 37]
    shard = [*others[rank::world_size], *([37] if rank == 1 else [])]
    options: dict[str, Any] = {"sampler": shard, "num_workers": num_workers}
    dataset: Any = Lengths([4] * 60)
    if how == "collate":
        options["collate_fn"] = _collate_that_fails
    elif how == "length":
        options["length_fn"] = _length_that_fails
    else:
        dataset = Fails([4] * 60, at=37, how=how)
    return _error_of(make_loader(dataset, **options))


def knobs_differ(name: str, values: list[Any]) -> dict[str, Any]:
    rank, _ = position()
    return _error_of(make_loader(Lengths([4] * 60), **{name: values[rank % len(values)]}))


def data_knobs_differ(how: str) -> dict[str, Any]:
    """What decides which samples a rank sees; no option of the loader differs but this."""
    is_here = position()[0] == 1
    if how == "length":
        return _error_of(make_loader(Lengths([4] * (59 if is_here else 60))))
    if how == "deal_sampler":
        return _error_of(make_loader(Lengths([4] * 60), sampler=range(60), deal_sampler=is_here))
    stream = _Stream([4] * 60, is_split=False)
    if how == "sharding":
        return _error_of(make_loader(stream, sharding="dataset" if is_here else "loader"))
    return _error_of(make_loader(stream, sharding="loader", num_workers=2 if is_here else 0))


def leaves_alone(how: str, rank_that_leaves: int) -> dict[str, Any]:
    """One rank's training loop ends early; the others go on."""
    rank, _ = position()
    loader = make_loader(Lengths([40] * 2000))

    def batches() -> Iterable[Any]:
        for number, batch in enumerate(loader):
            yield batch
            if rank == rank_that_leaves and number == 3:
                if how == "raise":
                    raise RuntimeError("the user's own")
                return

    return _error_of(batches())


def breaks_everywhere() -> dict[str, Any]:
    """All ranks leave their loop, and begin anew: twice."""
    rank, _ = position()
    form = FORMS["default"]
    steps = []
    with form.loader(rank) as loader:
        for epoch in range(2):
            for batch in loader:
                assert batch.step.epoch == epoch
                if batch.step.step == 2:
                    break
        steps += [record(batch) for batch in loader]
    return {"steps": steps}


def train_and_val() -> dict[str, Any]:
    """Validation in the middle of each training epoch, and after it."""
    rank, _ = position()
    train, val = FORMS["default"].loader(rank), FORMS["in-order"].loader(rank)
    trained: list[Any] = []
    validated: list[list[Any]] = []
    with train, val:
        for _ in range(2):
            for batch in train:
                trained.append(record(batch))
                if batch.step.step == 4:
                    validated.append([record(batch) for batch in val])
            validated.append([record(batch) for batch in val])
    return {"train": trained, "val": validated}


class _Slow(Lengths):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005 * (index % 5))
        return super().__getitem__(index)


def slow_rank() -> dict[str, Any]:
    """Samples of rank 1 take their time; rank 0's training loop does."""
    rank, _ = position()
    form = FORMS["default"]
    options: dict[str, Any] = {}
    steps = []
    loader = make_loader(
        (_Slow if rank == 1 else Lengths)(form.lengths),
        l_max=form.l_max,
        buffer_size=form.buffer_size,
        num_workers=1 + rank % 2,
        **options,
    )
    with loader:
        for batch in loader:
            steps.append(record(batch))
            time.sleep(0.005 if rank == 0 else 0)
    return {"steps": steps}


def random_draws(num_workers: int) -> Any:
    """Random transforms and collates, whose draws must not depend on the workers of this or of any rank."""
    rank, _ = position()
    with make_loader(_Drawing([4] * 40), num_workers=(num_workers + rank) % 3, collate_fn=_drawing_collate) as loader:
        return [[list(batch.step.sample_ids), batch.data] for batch in loader if not batch.step.is_idle]


class _Stream(IterableDataset[Any]):
    """The same samples in every process; or this process's part of them."""

    def __init__(self, lengths: list[int], is_split: bool) -> None:
        self.lengths = lengths
        self.is_split = is_split

    def __iter__(self) -> Iterator[Any]:
        samples = Lengths(self.lengths)
        shard = current_shard() if self.is_split else (0, 1)
        for index in range(len(samples))[shard[0] :: shard[1]]:
            yield samples[index]


def iterable(how: str, num_workers: int) -> dict[str, Any]:
    """The steps of two epochs over a data set without an index; the samples say which they are."""
    rank, world_size = position()
    dataset: Any
    if how == "hugging face":
        from datasets import Dataset

        rows = [{"input_ids": [index] * length} for index, length in enumerate(LENGTHS)]
        dataset = Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
        if num_workers == 0 and world_size > 1:
            from datasets.distributed import split_dataset_by_node

            dataset = split_dataset_by_node(dataset, rank, world_size)  # by the user: not once more
        options: dict[str, Any] = {"collate_fn": _first_ids}
    else:
        dataset = _Stream(LENGTHS, is_split=how == "dataset")
        options = {"sharding": how}
    with make_loader(dataset, num_workers=num_workers, shuffle=False, **options) as loader:
        steps = [record(batch) for _ in range(2) for batch in loader]
        return {"steps": steps, "expected": loader.stats.views_expected}


def _first_ids(samples: list[Any]) -> dict[str, Any]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(sample["input_ids"]) for sample in samples], batch_first=True)
    return {"input_ids": ids, "labels": ids}


class _Drawing(Lengths):
    def __getitem__(self, index: int) -> Any:
        return {"input_ids": [1, 2, 3], "drawn": [random.random(), float(torch.rand(()))]}


def _drawing_collate(samples: list[Any]) -> Any:
    return {"drawn": [sample["drawn"] for sample in samples], "by_collate": random.random()}


def in_a_store_of_the_users_own() -> dict[str, Any]:
    rank, world_size = position()
    (port,) = _agreed_ports(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    with FORMS["default"].loader(rank, rank=rank, world_size=world_size, store=store) as loader:
        steps = [record(batch) for _ in range(2) for batch in loader]
    dist.barrier()
    return {"steps": steps}


def _agreed_ports(count: int) -> list[int]:
    ports: list[Any] = [None]
    if position()[0] == 0:
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            for free in sockets:
                free.bind(("127.0.0.1", 0))
            ports = [[free.getsockname()[1] for free in sockets]]
    dist.broadcast_object_list(ports)
    agreed: list[int] = ports[0]
    return agreed


def _explicit(rank: int, world_size: int, _victim: int | None) -> Any:
    with FORMS["default"].loader(rank, rank=rank, world_size=world_size) as loader:
        return {"steps": [record(batch) for _ in range(2) for batch in loader]}


def _killed(rank: int, world_size: int, victim: int | None) -> Any:
    loader = make_loader(Lengths([40] * 2000), rank=rank, world_size=world_size)

    def batches() -> Iterable[Any]:
        for number, batch in enumerate(loader):
            yield batch
            if rank == victim and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    return _error_of(batches())


def _as_a_process_of_its_own(do: Callable[..., Any], rank: int, world_size: int, port: int, victim: int | None = None) -> Any:
    """`do` in a training process that does not use torch.distributed and may be killed; None if it was."""

    def target(connection: Any) -> None:
        os.setpgid(0, 0)
        os.environ["MASTER_PORT"] = str(port)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            connection.send(do(rank, world_size, victim))

    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=target, args=(theirs,))
    child.start()
    theirs.close()
    try:
        result = ours.recv() if ours.poll(CASE_SECONDS) else {"error": "hangs"}
    except EOFError:
        result = None
    child.join(10)
    left = running_members(child.pid or 0)
    result = {"result": result, "clean": all_end(left)}
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return result


def run_cases(cases: dict[str, list[list[Any]]], victims: dict[str, list[int]]) -> dict[str, Any]:
    """For each world size, largest first, the results of `[name, function, arguments]` in turn on that many of the ranks. A
    case that fails does not spoil the others. One call for all, since to start ranks takes longer than most of the cases."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    ports = _agreed_ports(12)
    dist.destroy_process_group()
    results: dict[str, Any] = {}
    for size in sorted(map(int, cases), reverse=True):
        if rank >= size:
            break
        os.environ["MASTER_PORT"] = str(ports.pop())
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", rank=rank, world_size=size)
        mine = results[str(size)] = {}
        for name, function, arguments in cases[str(size)]:
            dist.barrier()
            mine[name] = guarded(globals()[function], **arguments)
        dist.barrier()
        dist.destroy_process_group()
        position_here = {"rank": rank, "world_size": size}
        mine["explicit"] = guarded(_as_a_process_of_its_own, do=_explicit, port=ports.pop(), **position_here)
        for victim in victims[str(size)]:
            mine[f"killed {victim}"] = guarded(
                _as_a_process_of_its_own, do=_killed, port=ports.pop(), victim=victim, **position_here
            )
    return results


def guarded(function: Callable[..., Any], **arguments: Any) -> Any:
    def too_late(*_: object) -> None:
        raise TimeoutError(f"not done after {CASE_SECONDS} s")

    signal.signal(signal.SIGALRM, too_late)
    signal.alarm(CASE_SECONDS)
    begin = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(**arguments)
    except Exception:
        result = {"exception": traceback.format_exc()}
    finally:
        signal.alarm(0)
    print(f"{function.__name__} {arguments}: {time.monotonic() - begin:.2f} s", flush=True)
    return result
