"""What ends a fit on one rank ends it on all, within a bound, with the first cause told everywhere, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from odb_lightning.runtime.settings import HELPER_PROCESS_NAME
from tests.helpers import signal_group
from tests.multiprocess.failure_cases import FAILED, OUT_OF_MEMORY, SAMPLE, SHARD, STEP
from tests.multiprocess.ranks import RankResult, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]

NOTICED_SECONDS = 30.0
"""From the failure to the end of all ranks' processes. The loaders' own limits are minutes and hours."""
GONE = "rank {} failed in its training process: it is gone without a word"


def launch(
    case: str,
    folder: Path,
    world_size: int = 2,
    *,
    on_started: Callable[[list[int]], None] | None = None,
    **arguments: Any,
) -> list[RankResult]:
    """How the ranks ended, which was within the bound, and without leaving anything."""
    scratch = folder / "scratch"
    scratch.mkdir()
    before = set(os.listdir("/dev/shm"))
    results = run_ranks(
        f"tests.multiprocess.failure_cases:{case}",
        world_size,
        folder,
        seconds=90,
        check=False,
        environment={"TMPDIR": str(scratch)},
        on_started=on_started,
        notes=str(folder),
        **arguments,
    )
    took = time.monotonic() - float((folder / FAILED).read_text())
    assert took < NOTICED_SECONDS, outputs(results)
    assert list(scratch.iterdir()) == []
    assert left_in_shared_memory(before) == set()
    return results


def left_in_shared_memory(before: set[str]) -> set[str]:
    """What is new in /dev/shm, and not at work in a process: others come and go, with the other tests of the machine."""
    deadline = time.monotonic() + 5.0
    while new := _not_mapped(set(os.listdir("/dev/shm")) - before):
        if time.monotonic() > deadline:
            return new
        time.sleep(0.1)
    return set()


def _not_mapped(names: set[str]) -> set[str]:
    """Those of files in /dev/shm that no process has mapped: by their inodes, as who makes a semaphore has it mapped by another
    name."""
    inodes: dict[int, str] = {}
    for name in names:
        with suppress(OSError):  # gone by now
            inodes[os.stat(f"/dev/shm/{name}").st_ino] = name
    mapped: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped.update(map(int, re.findall(r" (\d+) +/dev/shm/", maps.read_text())))
    return {name for inode, name in inodes.items() if inode not in mapped}


def outputs(results: list[RankResult]) -> str:
    return "\n".join(f"--- rank {rank}: {result.status}\n{result.output[-6000:]}" for rank, result in enumerate(results))


def check_told(results: list[RankResult], *patterns: str, on: list[int] | None = None) -> None:
    """That these ranks (all) failed, with this in the output of each."""
    for rank in range(len(results)) if on is None else on:
        assert results[rank].status != 0, outputs(results)
        for pattern in patterns:
            assert re.search(pattern, results[rank].output), f"no {pattern!r} of rank {rank} in\n{outputs(results)}"


def check_in_the_middle(results: list[RankResult], at_least: int = STEP) -> None:
    for result in results:
        for steps in re.findall(r"ended the fit after (\d+) steps", result.output):
            assert int(steps) >= at_least, outputs(results)


def in_the_middle(folder: Path, act: Callable[[list[int]], None], world_size: int = 2) -> Callable[[list[int]], None]:
    """Acts on the ranks once all of them are in the middle of an epoch."""

    def on_started(pids: list[int]) -> None:
        deadline = time.monotonic() + 40
        while not all((folder / f"step{rank}").exists() for rank in range(world_size)):
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        (folder / FAILED).write_text(str(time.monotonic()))
        act(pids)

    return on_started


class TestAnErrorOfTheUsersOwn:
    @pytest.mark.parametrize("rank", [1, 0])
    @pytest.mark.parametrize("where", ["training_step", "on_train_batch_end", "validation_step"])
    def test_in_a_hook(self, tmp_path: Path, where: str, rank: int) -> None:
        results = launch("fit", tmp_path, where=where, rank=rank)
        raised = (rf"UserError: bad sample {rank}\n", rf"in {where}\n", r"raise UserError\(f\"bad sample")
        check_told(results, *raised)
        check_told(results, rf"rank {rank} failed in its training loop: .*UserError: bad sample {rank}\n", on=[1 - rank])
        check_in_the_middle(results)

    def test_out_of_memory_in_the_backward(self, tmp_path: Path) -> None:
        results = launch("fit", tmp_path, where="backward", how="out of memory")
        check_told(results, rf"OutOfMemoryError: {OUT_OF_MEMORY}", r"in _fail\n")
        check_told(results, "rank 1 failed in its training loop: .*OutOfMemoryError", on=[0])
        check_in_the_middle(results)

    @pytest.mark.parametrize(
        ("where", "told"),
        [
            ("getitem", r"dataset\[{}\]"),
            ("length_fn", r"length_fn for dataset\[{}\]"),
            ("collate_fn", r"collate_fn for samples \[.*\b{}\b.*\]"),
        ],
    )
    def test_in_the_loader(self, tmp_path: Path, where: str, told: str) -> None:
        at = SHARD + SAMPLE
        results = launch("fit", tmp_path, where=where)
        cause = rf"rank 1 failed in {told.format(at)}: .*UserError: bad sample {at}\n"
        check_told(results, cause, r"in raise_in_the_users_code\n", r"raise UserError\(f\"bad sample")
        check_in_the_middle(results)

    def test_on_one_of_four_ranks(self, tmp_path: Path) -> None:
        results = launch("fit", tmp_path, 4, where="training_step", rank=2)
        check_told(results, r"UserError: bad sample 2\n", r"in training_step\n")
        check_told(results, r"rank 2 failed in its training loop: .*UserError: bad sample 2\n", on=[0, 1, 3])

    @pytest.mark.parametrize(("where", "code"), [("sampler", "__iter__"), ("len", "__len__")])
    def test_before_the_first_batch(self, tmp_path: Path, where: str, code: str) -> None:
        results = launch("fit", tmp_path, where=where)
        check_told(results, r"UserError: bad sample 0\n", rf"in {code}\n", r"raise UserError\(f\"bad sample")
        check_told(results, r"rank 1 failed in beginning an epoch: .*UserError: bad sample 0\n", on=[0])

    def test_a_data_set_that_cant_be_sent_is_named_at_construction(self, tmp_path: Path) -> None:
        results = launch("fit", tmp_path, where="spawn")
        check_told(results, r"TypeError: dataset=<.* can't be sent .* 'spawn'", r"in fit\n")

    def test_other_options_on_another_rank(self, tmp_path: Path) -> None:
        check_told(launch("fit", tmp_path, where="l_max"), "l_max is 24 on rank 1 and 16 on rank 0")


class TestAProcessThatIsKilled:
    def test_a_worker(self, tmp_path: Path) -> None:
        results = launch("fit", tmp_path, where="getitem", how="kill")
        check_told(results, r"rank 1 failed.*worker.*(killed by signal|exited unexpectedly)")
        check_in_the_middle(results)

    def test_the_collate_process(self, tmp_path: Path) -> None:
        results = launch("fit", tmp_path, where="collate_fn", how="kill")
        check_told(results, "the collate process of rank 1 ended unexpectedly with exit code -9")
        check_told(results, "rank 1 failed in its loader: the collate process of rank 1", on=[0])
        check_in_the_middle(results)

    def test_a_rank(self, tmp_path: Path) -> None:
        results = launch("fit", tmp_path, where="training_step", how="kill")
        assert results[1].status == -signal.SIGKILL
        check_told(results, GONE.format(1), on=[0])
        check_in_the_middle(results)

    def test_a_rank_of_four(self, tmp_path: Path) -> None:
        results = launch("fit", tmp_path, 4, where="training_step", rank=2, how="kill")
        assert results[2].status == -signal.SIGKILL
        check_told(results, GONE.format(2), on=[0, 1, 3])

    def test_the_rank_that_holds_the_store(self, tmp_path: Path) -> None:
        """What its collate process had to say is gone with it."""
        results = launch("fit", tmp_path, where="training_step", rank=0, how="kill")
        assert results[0].status == -signal.SIGKILL
        lost = r"lost the collate process of .*the store of the job is gone, too, which rank 0 holds"
        check_told(results, f"{GONE.format(0)}|{lost}", on=[1])
        check_in_the_middle(results)


class TestSignals:
    def test_ctrl_c(self, tmp_path: Path) -> None:
        """As a terminal sends it: to all processes of the job."""

        def interrupt(pids: list[int]) -> None:
            for pid in pids:
                signal_group(pid, signal.SIGINT)

        results = launch("fit", tmp_path, on_started=in_the_middle(tmp_path, interrupt))
        check_told(results, "KeyboardInterrupt")
        assert f"Process {HELPER_PROCESS_NAME}" not in outputs(results), "it leaves Ctrl-C to its rank"
        check_in_the_middle(results)

    def test_ctrl_c_of_one_rank_alone(self, tmp_path: Path) -> None:
        """C22"""
        results = launch("fit", tmp_path, on_started=in_the_middle(tmp_path, lambda pids: os.kill(pids[1], signal.SIGINT)))
        check_told(results, "KeyboardInterrupt")
        check_in_the_middle(results)

    @pytest.mark.parametrize("to", [[1], [0], [0, 1]], ids=str)
    def test_sigterm(self, tmp_path: Path, to: list[int]) -> None:
        def terminate(pids: list[int]) -> None:
            for rank in to:
                os.kill(pids[rank], signal.SIGTERM)

        results = launch("fit", tmp_path, on_started=in_the_middle(tmp_path, terminate))
        check_told(results, "SIGTERMException ended the fit after", on=to)
        assert {results[rank].status for rank in to} == {128 + signal.SIGTERM}, outputs(results)
        others = sorted({0, 1} - set(to))
        check_told(results, f"rank {to[0]} failed in its training loop: .*SIGTERMException", on=others)
        check_in_the_middle(results)

    def test_sigterm_without_lightning(self, tmp_path: Path) -> None:
        results = launch("loop", tmp_path, on_started=in_the_middle(tmp_path, lambda pids: os.kill(pids[1], signal.SIGTERM)))
        assert results[1].status == -signal.SIGTERM
        check_told(results, f"ODBLoaderError: .*{GONE.format(1)}", on=[0])


class TestLeavingEarly:
    @pytest.mark.parametrize("case", ["stops_everywhere", "leaves_loop"])
    def test_on_all_ranks(self, tmp_path: Path, case: str) -> None:
        results = launch(case, tmp_path)
        assert {result.status for result in results} == {0}, outputs(results)
        assert {result.value for result in results} == {STEP + 1}

    def test_on_one_rank(self, tmp_path: Path) -> None:
        results = launch("fit", tmp_path, where="on_train_batch_end", how="stop")
        check_told(results, r"Another rank failed first:\n(\[rank0\]: )?.*rank 1.* left .*before (its|the) end", on=[0])

    def test_after_the_end_of_an_epoch(self, tmp_path: Path) -> None:
        for result in run_ranks("tests.multiprocess.failure_cases:closes_after_an_epoch", 2, tmp_path):
            assert max(result.value) < 5, sorted(result.value)


def test_a_fork_of_a_rank_ends_and_leaves_the_loaders_processes_alone(tmp_path: Path) -> None:
    """Whose handlers for the exit of the interpreter know of them, as of children."""
    (result,) = run_ranks("tests.multiprocess.failure_cases:forks", 1, tmp_path)
    assert result.value == {"ended": True, "samples": 40, "collators": 1}, result.output


class TestWhatRunsOut:
    def test_few_descriptors_suffice(self, tmp_path: Path) -> None:
        (result,) = run_ranks("tests.multiprocess.failure_cases:few_descriptors", 1, tmp_path)
        assert sorted(result.value) == list(range(1500))

    def test_no_sample_goes_through_the_shared_memory_file_system(self, tmp_path: Path) -> None:
        (result,) = run_ranks("tests.multiprocess.failure_cases:large_samples", 1, tmp_path)
        assert result.value == {"seen": list(range(120)), "found": [], "processes": 4}

    def test_a_small_shared_memory_file_system_suffices(self, tmp_path: Path) -> None:
        (result,) = run_ranks("tests.multiprocess.failure_cases:small_shared_memory", 1, tmp_path)
        if "refused" in result.value:
            pytest.skip(f"a mount of its own is not permitted here ({result.value['refused']})")
        assert (result.value["seen"], result.value["found"]) == (list(range(120)), [])


class TestSlowAndDead:
    def test_who_is_slow_is_waited_for(self, tmp_path: Path) -> None:
        results = launch("slow", tmp_path)
        assert [result.value.get("samples") for result in results] == [60, 20], outputs(results)
        assert results[0].value["waited"] > 7.5, "more than any limit, or this tests nothing"

    def test_who_hangs_is_named(self, tmp_path: Path) -> None:
        ended = launch("hangs", tmp_path)[0].value
        late = r"waited Timeouts\(exchange=3\) seconds for rank 1 \(round \d+ of epoch 0, fetching samples\)"
        assert re.search(late, ended["error"]), ended
        assert ended["seconds"] < 10

    def test_who_is_stopped_is_named(self, tmp_path: Path) -> None:
        ended = launch("stopped", tmp_path)[0].value
        assert re.search(r"lost rank 1 \(round \d+ of epoch 0, .*\): no sign of life within Timeouts\(peer=4\)", ended["error"])
        assert ended["seconds"] < 15
