"""However a loader is left, its processes end at once, and nothing piles up."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from odb_lightning import ODBDataLoader
from tests.helpers import run_command
from tests.loader_data import Lengths, make_loader, some_pids
from tests.loader_processes import all_end, no_process_is_left, runs  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_process_is_left")]

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [4] * 100


class Abandoned(Exception):
    pass


def leave_by_break(loader: ODBDataLoader) -> list[int]:
    for batch in loader:
        return [batch.data["collate_pid"], *batch.data["pids"]]
    raise AssertionError


def leave_by_exception(loader: ODBDataLoader) -> list[int]:
    pids: list[int] = []
    try:
        for batch in loader:
            pids += [batch.data["collate_pid"], *batch.data["pids"]]
            raise Abandoned
    except Abandoned:
        pass
    return pids


def leave_by_close(loader: ODBDataLoader) -> list[int]:
    iteration, workers, collator = some_pids(loader)
    loader.close()
    assert next(iteration, None) is None
    return [*workers, collator]


def leave_by_deleting_the_iterator(loader: ODBDataLoader) -> list[int]:
    iteration, workers, collator = some_pids(loader)
    del iteration
    return [*workers, collator]


class TestLeaving:
    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize("leave", [leave_by_break, leave_by_exception, leave_by_close, leave_by_deleting_the_iterator])
    def test_an_iteration_that_is_left_takes_its_processes_along(self, leave: Any, num_workers: int) -> None:
        loader = make_loader(Lengths([4] * 5000), num_workers=num_workers)
        begin = time.monotonic()
        pids = leave(loader)
        assert all_end(pids, 1.0), "at once, not when the loader goes"
        assert time.monotonic() - begin < 20
        assert loader.l_max == 64

    def test_a_loader_that_is_dropped_after_an_epoch_ends_its_processes(self) -> None:
        loader = make_loader(Lengths(LENGTHS))
        (collator,) = {batch.data["collate_pid"] for batch in loader}
        assert runs(collator), "it is kept for the next epoch"
        del loader
        gc.collect()
        assert all_end([collator])

    def test_a_loader_that_is_not_persistent_has_no_process_after_an_epoch(self) -> None:
        loader = make_loader(Lengths(LENGTHS), persistent_workers=False)
        pids = {batch.data["collate_pid"] for batch in loader}
        assert all_end(pids)
        loader.close()

    def test_an_epoch_that_ends_at_its_limit_ends_without_a_word(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Where the workers are not kept, they are being ended as the loader is told to, too. Spawned: a fork would report
        what is raised in a finaliser as this process does."""
        loader = make_loader(Lengths([4] * 400), num_workers=2, persistent_workers=False, multiprocessing_context="spawn")
        loader.attach(rank=0, world_size=1, accumulate=1, max_steps=3)
        assert len(list(loader)) == 3
        loader.close()
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_leaving_does_not_wait_for_a_slow_sample(self, num_workers: int) -> None:
        loader = make_loader(SlowAfter(LENGTHS, 40), num_workers=num_workers, shuffle=False)
        begin = time.monotonic()
        pids = leave_by_break(loader)
        assert all_end(pids)
        assert time.monotonic() - begin < 25

    def test_closing_is_quick_each_time(self) -> None:
        seconds = []
        for _ in range(60):
            loader = make_loader(Lengths([4] * 8), num_workers=0, buffer_size=4)
            list(loader)
            begin = time.monotonic()
            loader.close()
            seconds.append(time.monotonic() - begin)
        assert max(seconds) < 5, sorted(seconds)[-3:]

    def test_nothing_piles_up_over_epochs_and_processes(self) -> None:
        def descriptors(pid: int | str = "self") -> int:
            return len(os.listdir(f"/proc/{pid}/fd"))

        with make_loader(Lengths(LENGTHS)) as loader:
            (collator,) = {batch.data["collate_pid"] for batch in loader}
            before = (descriptors(), descriptors(collator))
            for _ in range(5):
                list(loader)
            assert (descriptors(), descriptors(collator)) == before
        gc.collect()
        before_processes = descriptors()
        for _ in range(4):
            loader = make_loader(Lengths(LENGTHS), num_workers=0)
            leave_by_break(loader)
            loader.close()
        gc.collect()
        assert descriptors() <= before_processes


class SlowAfter(Lengths):
    """Takes a minute for each sample after the first ones."""

    def __init__(self, lengths: list[int], first: int) -> None:
        super().__init__(lengths)
        self.first = first

    def __getitem__(self, index: int) -> Any:
        if index >= self.first:
            time.sleep(60)
        return super().__getitem__(index)


SCRIPT = """
import itertools
import torch
from odb_lightning import ODBDataLoader
from tests.loader_data import Lengths, plain_list
from tests.loader_processes import all_end, no_process_is_left, runs  # noqa: F401  (a fixture)

class ThreeTensors(Lengths):
    def __getitem__(self, index):
        ids = torch.full((4,), index)
        return {"input_ids": ids, "labels": ids + 1, "attention_mask": ids > 0, "more": [ids.clone()]}

if __name__ == "__main__":
    options = {"collate_fn": plain_list, "num_supervised_fn": len, "buffer_size": 512, "num_workers": 2}
    loader = ODBDataLoader(ThreeTensors([4] * 2000), l_max=64, **options)
    assert sorted(itertools.chain.from_iterable(batch.step.sample_ids for batch in loader)) == list(range(2000))
    left = iter(loader)
    kept = [next(left) for _ in range(3)]
    print("reached the end")
"""


def test_few_descriptors_suffice_and_the_interpreter_ends_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """256 descriptors with 512 samples of four tensors in the window, and as many in messages."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ["bash", "-c", f"ulimit -n 256 && exec {sys.executable} {script}"]
    result = run_command(command, cwd=tmp_path, seconds=60, environment={"PYTHONPATH": str(ROOT)})
    assert result.status == 0, result.output
    assert result.output.strip() == "reached the end"
