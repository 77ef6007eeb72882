"""Whom a process belongs to: a rank ends with the launcher that started it; a forked copy of a loader ends nothing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import pytest

from odb_lightning import train
from odb_lightning.runtime import client, guard
from tests.loader_data import Lengths, make_loader
from tests.loader_processes import all_end, no_process_is_left, runs  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_process_is_left")]

SECONDS = 20


def as_odb_train_does() -> None:
    os.environ["LOCAL_RANK"] = "1"
    train._end_with_the_run()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


@pytest.mark.parametrize("begin", [guard.end_with_launcher, as_odb_train_does])
def test_a_rank_ends_with_the_launcher_that_is_killed(begin: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its main thread waits for, and with its children."""
    monkeypatch.setattr(guard, "_ORDERLY_END_SECONDS", 0.5)
    context = get_context("fork")
    ours, theirs = context.Pipe()

    def wait_for_ever() -> None:
        threading.Event().wait(3 * SECONDS)

    def rank() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        begin()
        child = context.Process(target=wait_for_ever)
        child.start()
        theirs.send([os.getpid(), child.pid])
        wait_for_ever()

    def launch() -> None:
        process = context.Process(target=rank)
        process.start()
        process.join()

    launcher = context.Process(target=launch)
    launcher.start()
    try:
        assert ours.poll(SECONDS)
        pids = ours.recv()
        assert all(map(runs, pids))
        os.kill(launcher.pid or 0, signal.SIGKILL)
        assert all_end(pids)
    finally:
        launcher.kill()
        launcher.join()


class TestAForkedCopyOfALoader:
    """Its processes are the original's. Of one whose interpreter ends: tests/multiprocess/test_failures.py."""

    @staticmethod
    def in_a_fork(act: Callable[[], Any]) -> Any:
        """What `act` gives in a fork, which has to end in time."""
        context = get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=lambda: theirs.send(act()))
        process.start()
        theirs.close()
        try:
            assert ours.poll(SECONDS)
            result = ours.recv()
            process.join(SECONDS)
            assert process.exitcode == 0
            return result
        finally:
            process.kill()
            process.join()

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_it_leaves_the_originals_alone_however_it_ends(self, num_workers: int) -> None:
        with make_loader(Lengths([4] * 400), num_workers=num_workers) as loader:
            iteration = iter(loader)
            first = next(iteration)

            def end_in_all_ways() -> bool:
                assert loader._process is not None and loader._process.is_inherited
                loader.close()
                client._close_all()
                loader.__del__()
                return True

            assert self.in_a_fork(end_in_all_ways)
            assert self.in_a_fork(lambda: True), "and as it is"
            assert runs(first.data["collate_pid"])
            rest = [sample_id for batch in iteration for sample_id in batch.step.sample_ids]
            assert sorted([*first.step.sample_ids, *rest]) == list(range(400))

    def test_it_can_be_iterated_with_processes_of_its_own(self) -> None:
        def epoch() -> tuple[list[int], set[int]]:
            with loader:
                batches = list(loader)
            return (
                sorted(sample_id for batch in batches for sample_id in batch.step.sample_ids),
                {batch.data["collate_pid"] for batch in batches},
            )

        with make_loader(Lengths([4] * 40)) as loader:
            (collator,) = {batch.data["collate_pid"] for batch in loader}
            ids, collators = self.in_a_fork(epoch)
            assert ids == list(range(40))
            assert len(collators) == 1 and collators != {collator}
            assert not all_end([collator], 0.0)
            assert {batch.data["collate_pid"] for batch in loader} == {collator}
