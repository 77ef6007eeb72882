"""What goes wrong ends the loader within a bound, is told in the user's words, and leaves no process."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from odb_lightning import ODBDataLoader, ODBLoaderError, Timeouts
from odb_lightning.runtime.collate_process import START_AGAIN, collate_main
from odb_lightning.runtime.forking import can_meet_peers
from tests.loader_data import (
    Counted,
    Fails,
    Lengths,
    UserError,
    collate,
    make_loader,
    plain_list,
    raise_in_the_users_code,
    some_pids,
)
from tests.loader_processes import all_end, no_process_is_left  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_process_is_left")]

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [4] * 100


def failure_of(loader: ODBDataLoader) -> str:
    """The text of the error that an epoch ends with."""
    with pytest.raises(ODBLoaderError) as caught:
        list(loader)
    return str(caught.value)


def length_fn_that_fails(sample: Any) -> int:
    if sample["input_ids"][0] == 37:
        raise_in_the_users_code(37)
    return len(sample["input_ids"])


def collate_that_fails(samples: list[Any]) -> Any:
    if any(sample["input_ids"][0] == 37 for sample in samples):
        raise_in_the_users_code(37)
    return collate(samples)


def count_that_fails(batch: Any) -> int:
    if 37 in batch["input_ids"][:, 0]:
        raise_in_the_users_code(37)
    return 1


class TestErrorsInTheUsersCode:
    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize(
        ("options", "where"),
        [
            ({"dataset": Fails(LENGTHS, at=37)}, r"dataset\[37\]"),
            ({"length_fn": length_fn_that_fails}, r"length_fn for dataset\[37\]"),
            ({"collate_fn": collate_that_fails}, r"collate_fn for samples \[.*\b37\b.*\]"),
            ({"num_supervised_fn": count_that_fails}, r"num_supervised_fn for samples \[.*\b37\b.*\]"),
        ],
        ids=["dataset", "length_fn", "collate_fn", "num_supervised_fn"],
    )
    def test_the_sample_and_the_original_traceback_are_told(
        self, options: dict[str, Any], where: str, num_workers: int
    ) -> None:
        options = {"dataset": Lengths(LENGTHS), "num_workers": num_workers} | options
        text = failure_of(make_loader(options.pop("dataset"), **options))
        assert re.match(rf"rank 0 failed in {where}: .*UserError: bad sample 37\n", text), text
        assert "Original traceback on rank 0" in text
        assert 'raise UserError(f"bad sample {index}", code=7)' in text, "down to the line that raised"
        assert "loader_data.py" in text

    @pytest.mark.parametrize(
        ("returned", "match"),
        [
            (None, "TypeError"),
            (3.5, "TypeError.*float"),
            (-1, "length_fn returned -1"),
            ("4", "TypeError"),
            (torch.ones(2), "TypeError|only"),
        ],
        ids=str,
    )
    def test_a_length_that_is_none(self, returned: Any, match: str) -> None:
        text = failure_of(make_loader(Lengths(LENGTHS), length_fn=lambda sample: returned, shuffle=False))
        assert text.startswith("rank 0 failed in length_fn for dataset[0]: ")
        assert re.search(match, text)

    def test_lengths_may_be_any_kind_of_whole_number(self) -> None:
        kinds = [int, torch.tensor, lambda n: torch.tensor(n).numpy()[()], lambda n: torch.tensor(n, dtype=torch.uint8)]
        with make_loader(
            Lengths([1, 2, 3, 4]),
            length_fn=lambda s: kinds[len(s["input_ids"]) - 1](len(s["input_ids"])),
            num_supervised_fn=len,
        ) as loader:
            assert sum(batch.step.num_tokens_real for batch in loader) == 10
            assert type(loader.stats.length_sum) is int

    def test_a_sample_without_a_length(self) -> None:
        text = failure_of(make_loader([{"text": "x"}]))
        assert "rank 0 failed in length_fn for dataset[0]" in text
        assert "pass length_fn=" in text

    def test_a_collate_fn_that_returns_nothing(self) -> None:
        assert "collate_fn returned None; it has to return the batch" in failure_of(
            make_loader(Lengths(LENGTHS), collate_fn=lambda samples: None)
        )

    def test_a_count_of_targets_that_is_none(self) -> None:
        text = failure_of(make_loader(Lengths(LENGTHS), num_supervised_fn=lambda batch: float("nan")))
        assert "num_supervised_fn for samples" in text
        assert "returned nan" in text

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_a_sample_that_cant_be_sent(self, num_workers: int) -> None:
        dataset = [{"input_ids": [1], "f": lambda: None}]
        text = failure_of(make_loader(dataset, num_workers=num_workers))
        assert "[0]" in text
        assert "pickle" in text

    def test_a_batch_that_cant_be_sent_names_what_made_it(self) -> None:
        text = failure_of(make_loader(Lengths([4, 4]), collate_fn=lambda samples: {"f": lambda: None}))
        assert "pickle" in text
        assert "collate_fn" in text

    def test_an_error_in_worker_init_fn(self) -> None:
        text = failure_of(make_loader(Lengths(LENGTHS), worker_init_fn=raise_in_the_users_code))
        assert "bad sample 0" in text

    @pytest.mark.parametrize(("length", "policy"), [(0, "empty"), (65, "oversize")])
    def test_policies_can_be_errors(self, length: int, policy: str) -> None:
        text = failure_of(make_loader(Lengths([3, length, 3]), **{policy: "error"}))
        assert text.startswith("rank 0 failed in dataset[1]: ")
        assert f"{policy}='error'" in text

    def test_stop_iteration_in_the_users_code_is_an_error_not_an_end(self) -> None:
        def stops(_: Any) -> Any:
            raise StopIteration

        for options in ({"length_fn": stops}, {"collate_fn": stops}, {"length_fn": stops, "num_workers": 0}):
            assert "StopIteration" in failure_of(make_loader(Lengths(LENGTHS), **options))

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_a_data_set_that_raises_stop_iteration_has_failed(self, num_workers: int) -> None:
        class Stops(Lengths):
            def __getitem__(self, index: int) -> dict[str, Any]:
                return super().__getitem__(index) if index != 37 else next(iter(()))

        text = failure_of(make_loader(Stops(LENGTHS), num_workers=num_workers))
        assert text.startswith("rank 0 failed in dataset[37]: StopIteration\n")

    def test_the_loader_can_be_used_again(self) -> None:
        dataset = Fails(LENGTHS, at=37)
        loader = make_loader(dataset)
        failure_of(loader)
        dataset.at = -1
        assert sorted(itertools.chain.from_iterable(batch.step.sample_ids for batch in loader)) == list(range(100))
        loader.close()


class TestDeathOfAProcess:
    LIMIT = 20.0

    def check(self, iteration: Any, pids: list[int], match: str) -> None:
        begin = time.monotonic()
        with pytest.raises(ODBLoaderError, match=match):
            list(iteration)
        assert time.monotonic() - begin < self.LIMIT
        assert all_end(pids)

    def test_a_worker_that_is_killed(self) -> None:
        loader = make_loader(Lengths([4] * 5000), num_workers=2)
        iteration, workers, collator = some_pids(loader)
        os.kill(workers[0], signal.SIGKILL)
        self.check(iteration, [*workers, collator], r"rank 0 failed.*worker.*(killed by signal|exited unexpectedly)")

    @pytest.mark.parametrize("how", ["kill", "exit"])
    def test_a_sample_that_kills_its_worker(self, how: str) -> None:
        loader = make_loader(Fails(LENGTHS, at=37, how=how))
        with pytest.raises(ODBLoaderError, match=r"rank 0 failed.*worker.*(killed by signal|exited unexpectedly)"):
            list(loader)

    @pytest.mark.parametrize(("how", "code"), [("kill", -9), ("exit", 3)])
    def test_a_sample_that_kills_the_collate_process(self, how: str, code: int) -> None:
        loader = make_loader(Fails(LENGTHS, at=37, how=how), num_workers=0)
        with pytest.raises(ODBLoaderError, match=f"collate process of rank 0 ended unexpectedly with exit code {code}"):
            list(loader)

    def test_a_collate_process_that_is_killed(self) -> None:
        loader = make_loader(Lengths([4] * 5000), num_workers=2)
        iteration, workers, collator = some_pids(loader)
        os.kill(collator, signal.SIGKILL)
        self.check(iteration, [*workers, collator], "exit code -9")

    def test_a_collate_process_that_dies_between_epochs(self) -> None:
        """The next epoch starts others, and says so."""
        loader = make_loader(Lengths(LENGTHS))
        (collator,) = {batch.data["collate_pid"] for batch in loader}
        os.kill(collator, signal.SIGKILL)
        assert all_end([collator])
        assert loader._process is not None
        loader._process._process.join(5)  # a process can be seen to have ended before it can be waited for
        with (
            pytest.warns(UserWarning, match="processes have ended since the last epoch; they are started again") as caught,
            loader,
        ):
            batches = list(loader)
        assert caught[0].filename == __file__, "the warning points at the user's line"
        assert sum(batch.step.num_samples for batch in batches) == 100
        assert {batch.step.epoch for batch in batches} == {1}

    def test_the_training_process_is_killed(self) -> None:
        context = get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_report_pids_and_die, args=(theirs,))
        child.start()
        theirs.close()
        pids = ours.recv()
        child.join(20.0)
        assert child.exitcode == -9
        assert len(pids) >= 2
        assert all_end(pids)


def _report_pids_and_die(connection: Any) -> None:
    _iteration, workers, collator = some_pids(make_loader(Lengths([4] * 5000), num_workers=2))
    connection.send([*workers, collator])
    os.kill(os.getpid(), signal.SIGKILL)


class TestStartMethods:
    """Slow, those that start any: each process imports torch."""

    def test_what_cant_be_sent_under_spawn_is_named_with_the_mend(self) -> None:
        """At construction, without pickling what is large."""
        dataset = [{"input_ids": [1], "f": lambda: None}] * 10_000
        with pytest.raises(TypeError, match=r'^dataset=.*multiprocessing_context="fork"') as caught:
            make_loader(dataset, multiprocessing_context="spawn")
        assert len(str(caught.value)) < 2000, "not the whole data set"
        with pytest.raises(TypeError, match=r"^collate_fn=.*<lambda>"):
            make_loader(Lengths(LENGTHS), collate_fn=lambda samples: 1, multiprocessing_context="forkserver")
        with pytest.raises(TypeError, match=r"^dataset=.*can't be sent"):
            make_loader([threading.Lock()], multiprocessing_context="spawn")
        counted = Counted(LENGTHS)  # its counter can be sent to a child at its start, and not otherwise
        make_loader(counted, multiprocessing_context="spawn")
        assert make_loader(dataset, multiprocessing_context="fork").dataset is dataset

    @pytest.mark.slow
    @pytest.mark.timeout(150)
    def test_spawn_gives_what_fork_gives(self) -> None:
        expected = contents(make_loader(Lengths([4 + n % 20 for n in range(60)])))
        assert contents(make_loader(Lengths([4 + n % 20 for n in range(60)]), multiprocessing_context="spawn")) == expected

    @pytest.mark.slow
    @pytest.mark.timeout(150)
    def test_forkserver_gives_what_fork_gives_and_notices_a_killed_worker(self) -> None:
        """Its workers are no children of the collate process, which gets no signal when one dies."""
        dataset = Lengths([4 + n % 20 for n in range(60)])
        expected = contents(make_loader(dataset))
        loader = make_loader(dataset, multiprocessing_context=get_context("forkserver"))
        batches = list(loader)
        assert [(batch.step.sample_ids, batch.data["labels"].tolist()) for batch in batches] == expected
        (worker,) = {pid for batch in batches for pid in batch.data["pids"]}
        os.kill(worker, signal.SIGKILL)
        assert all_end([worker])
        begin = time.monotonic()
        failure_of(loader)
        assert time.monotonic() - begin < 30
        loader.close()


def contents(loader: ODBDataLoader) -> list[Any]:
    with loader:
        return [(batch.step.sample_ids, batch.data["labels"].tolist()) for batch in loader]


def test_errors_that_cant_be_pickled_are_told_all_the_same() -> None:
    with pytest.raises(UserError):
        raise_in_the_users_code(3)
    assert "UserError: bad sample 3" in failure_of(
        make_loader(Fails(LENGTHS, at=3), collate_fn=plain_list, num_supervised_fn=len)
    )


class TestForkedAtABadMoment:
    """A thread of the training process held a lock just then: its child would wait for it for ever, and is forked again."""

    def loader(self, monkeypatch: pytest.MonkeyPatch, bad_forks: int) -> ODBDataLoader:
        left = get_context("fork").Value("i", bad_forks)

        def can_meet_peers(limit: float) -> bool:
            with left.get_lock():
                left.value -= 1
                return left.value < 0

        monkeypatch.setattr("odb_lightning.runtime.collate_process.can_meet_peers", can_meet_peers)
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return make_loader(Lengths(LENGTHS), rank=0, world_size=2, store=store, timeouts=Timeouts(setup=1))

    def test_it_is_forked_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "rank 0 did not meet rank 1 within" in failure_of(self.loader(monkeypatch, bad_forks=2))

    def test_but_not_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "ended unexpectedly with exit code 75" in failure_of(self.loader(monkeypatch, bad_forks=99))

    def test_one_that_says_nothing_is_given_up_and_forked_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        left = get_context("fork").Value("i", 2)

        def silent_twice(*arguments: Any) -> None:
            with left.get_lock():
                left.value -= 1
            if left.value >= 0:
                signal.pause()
            collate_main(*arguments)

        monkeypatch.setattr("odb_lightning.runtime.client.collate_main", silent_twice)
        monkeypatch.setattr("odb_lightning.runtime.client._FORK_SECONDS", 0.5)
        with make_loader(Lengths(LENGTHS)) as loader:
            assert sum(len(batch.step.sample_ids) for batch in loader) == len(LENGTHS)
        left.value = 99
        with make_loader(Lengths(LENGTHS), timeouts=Timeouts(setup=1)) as loader:
            assert "did not start within Timeouts(setup=1) seconds" in failure_of(loader)

    def test_a_lock_on_names_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        closed = threading.Event()
        assert can_meet_peers(20)
        monkeypatch.setattr("socket.gethostbyaddr", lambda address: closed.wait(10))
        assert not can_meet_peers(0.1)
        closed.set()

    @pytest.mark.timeout(180)
    @pytest.mark.skipif(torch.__version__ < (2, 13), reason="it is known to be there in torch 2.13")
    def test_a_lock_of_torchs_flight_recorder_is_noticed(self) -> None:
        """Forks beside threads that do nothing but collectives, until one inherits the lock: about one in fifty does."""
        with collectives_in_threads():
            ends = (end_of_a_fork_that_forms_a_group() for _ in range(1000))
            assert next((end for end in ends if end not in (0, SILENT)), "none inherited a lock") == START_AGAIN


def group_of_one() -> Any:
    return torch.distributed.ProcessGroupGloo(torch.distributed.HashStore(), 0, 1, timedelta(seconds=10))


@contextmanager
def collectives_in_threads() -> Iterator[None]:
    is_over = threading.Event()

    def run() -> None:
        group = group_of_one()
        while not is_over.is_set():
            for work in [group.allreduce([torch.ones(4)]) for _ in range(256)]:
                work.wait()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


SILENT = 1000


def end_of_a_fork_that_forms_a_group() -> int | None:
    """START_AGAIN if it knows that it can't, SILENT if it stands still before it runs at all; None if it hangs."""
    context = get_context("fork")
    ours, theirs = context.Pipe()

    def form() -> None:
        theirs.send_bytes(b"runs")
        if not can_meet_peers(2):
            os._exit(START_AGAIN)
        group_of_one().allreduce([torch.ones(4)]).wait()
        os._exit(0)

    process = context.Process(target=form)
    process.start()
    process.join(10)
    end = process.exitcode if ours.poll() else SILENT
    process.kill()
    process.join()
    ours.close()
    theirs.close()
    return end
