"""`odb-train` as a user runs it: fresh processes, real ranks, real data, cut down to a few steps."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import TINY_MODEL, CommandResult, odb_train, run_command

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

TESTS = Path(__file__).parents[1]
SECONDS = 240.0  # for one run on a busy machine; an idle one takes about 20
TINY = (
    "data.limit=60",
    "data.cutoff=128",
    "data.val_limit=12",
    "odb.l_max=512",
    "odb.num_workers=1",
    *TINY_MODEL,
    "optim.lr=0.01",
    "callbacks.progress.seconds=0",
    "extras.print_config=false",
    "checkpoint.at_end=false",
)
FIELDS = """
    status world_size l_max loader strategy zero_stage epochs steps updates idle_steps rounds exchange_seconds outstanding_depth
    samples_emitted samples_expected identities_missing identities_repeated dropped over_budget tokens_real tokens_padded
    tokens_supervised padding budget_fill lockstep_efficiency schedule_efficiency samples_per_second tokens_per_second
    loader_wait_share step_seconds distinct_shapes peak_memory_bytes length_cv length_short_share train_loss val_loss
    val_loss_before
"""


def the_run(folder: Path, task: str = "quickstart") -> Path:
    (run,) = (folder / "logs" / task / "runs").iterdir()
    return run


def summary_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def succeeded(result: CommandResult) -> None:
    assert result.status == 0, result.output[-6000:]


def test_the_quickstart_trains_on_two_ranks_under_zero_2_and_sums_it_up(tmp_path: Path) -> None:
    # The first run writes each kind of file: an audit, checkpoints by the step and at the end.
    more = ("audit=true", "checkpoint.at_end=true", "checkpoint.every_n_steps=5")
    result = odb_train(*TINY, *more, cwd=tmp_path, seconds=SECONDS)
    succeeded(result)
    run = the_run(tmp_path)
    summary = summary_of(run)
    assert set(summary) >= set(FIELDS.split())
    assert (summary["status"], summary["world_size"], summary["zero_stage"], summary["loader"]) == ("ok", 2, 2, "odb")
    assert (summary["identities_missing"], summary["identities_repeated"], summary["samples_emitted"]) == (0, 0, 60)
    assert summary["val_loss"] < summary["val_loss_before"]
    assert summary["optimizer_state_elements"] < 1.2 * summary["parameters"]  # AdamW has 2 a parameter, of which each rank half
    assert 0 <= summary["padding"] < 0.5 and 0 < summary["budget_fill"] <= 1
    assert "60/60 samples (100%)" in result.output and "identities: missing / repeated" in result.output
    assert "l_max: 512" in (run / "config.yaml").read_text()
    logged = [json.loads(line) for rank in (0, 1) for line in (run / "audit" / f"rank{rank}.jsonl").read_text().splitlines()]
    assert sorted(sample for line in logged for sample in line["sample_ids"]) == list(range(60))
    assert len(logged) == 2 * summary["steps"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["last.ckpt", "update=5.ckpt"]


def test_the_standard_recipe_writes_the_same_summary_for_fixed_batches(tmp_path: Path) -> None:
    succeeded(odb_train("recipe=standard", *TINY, cwd=tmp_path, seconds=SECONDS))
    summary = summary_of(the_run(tmp_path, "standard"))
    assert set(summary) >= set(FIELDS.split())
    assert (summary["status"], summary["world_size"], summary["loader"], summary["l_max"]) == ("ok", 2, "fixed", 512)
    assert (summary["samples_emitted"], summary["identities_missing"], summary["zero_stage"]) == (60, 0, 2)
    assert summary["steps"] == 8  # 30 samples a rank in batches of 512 / 128
    assert summary["val_loss"] < summary["val_loss_before"]


def test_an_instruction_file_trains_under_ddp(tmp_path: Path) -> None:
    data = os.environ.get("ODB_TEST_DATA")
    if not data:
        pytest.skip("ODB_TEST_DATA names no folder with sample files")
    file = Path(data) / "lf_alpaca_en_demo.json"
    arguments = ("recipe=sft", f"data.path={file}", "strategy=odb_ddp", "validate=false", "optimized_metric=train_loss")
    succeeded(odb_train(*arguments, *TINY, "trainer.accumulate_grad_batches=2", cwd=tmp_path, seconds=SECONDS))
    summary = summary_of(the_run(tmp_path, "sft"))
    assert (summary["status"], summary["strategy"], summary["samples_emitted"]) == ("ok", "odb_ddp", 60)
    assert (summary["identities_missing"], summary["val_loss"]) == (0, None)
    assert summary["updates"] == (summary["steps"] + 1) // 2


def test_a_sweep_runs_each_job_as_two_ranks_with_its_own_budget(tmp_path: Path) -> None:
    result = odb_train("-m", *TINY, "odb.l_max=256,512", "strategy=odb_deepspeed_stage_1", cwd=tmp_path, seconds=2 * SECONDS)
    succeeded(result)
    (sweep,) = (tmp_path / "logs" / "quickstart" / "multiruns").iterdir()
    summaries = [summary_of(sweep / number) for number in ("0", "1")]
    assert [summary["l_max"] for summary in summaries] == [256, 512]
    assert [summary["world_size"] for summary in summaries] == [2, 2]
    assert [summary["zero_stage"] for summary in summaries] == [1, 1]
    assert [summary["identities_missing"] for summary in summaries] == [0, 0]
    assert not (tmp_path / "logs" / "quickstart" / "runs").exists()
    assert "odb.l_max=256" in result.output[result.output.index("┃") :]


def test_ranks_of_torchrun_agree_on_one_folder(tmp_path: Path) -> None:
    arguments = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29713", "-m", "odb_lightning.train")
    command = [sys.executable, *arguments, *TINY, "strategy=odb_ddp", "validate=false", "optimized_metric=train_loss"]
    succeeded(run_command(command, cwd=tmp_path, seconds=SECONDS))
    summary = summary_of(the_run(tmp_path))
    assert (summary["status"], summary["world_size"], summary["identities_missing"]) == ("ok", 2, 0)


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_rank_that_dies_ends_the_run_with_a_word_about_it(how: str, tmp_path: Path) -> None:
    crash = ("+callbacks.crash._target_=crashing.Crash", f"+callbacks.crash.how={how}", "+callbacks.crash._convert_=all")
    result = odb_train(*TINY, *crash, "validate=false", cwd=tmp_path, seconds=SECONDS, environment={"PYTHONPATH": str(TESTS)})
    assert result.status != 0
    summary = summary_of(the_run(tmp_path))
    assert summary["status"] == "failed" and summary["error"]
    assert summary["steps"] == 1
    if how == "raise":
        assert "crash on purpose" in result.output


def test_ctrl_c_ends_the_run_as_interrupted(tmp_path: Path) -> None:
    crash = ("+callbacks.crash._target_=crashing.Crash", "+callbacks.crash.how=interrupt", "+callbacks.crash._convert_=all")
    result = odb_train(*TINY, *crash, "validate=false", cwd=tmp_path, seconds=SECONDS, environment={"PYTHONPATH": str(TESTS)})
    assert result.status != 0
    assert summary_of(the_run(tmp_path))["status"] == "interrupted"


TERMINATED = """
import signal, subprocess, sys, time

command = [sys.executable, "-m", "odb_lightning.train", *sys.argv[1:]]
process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
told = None
for line in process.stdout:  # to the end of all its processes
    print(line, end="", flush=True)
    if " samples (" in line and told is None:
        process.send_signal(signal.SIGTERM)
        told = time.monotonic()
sys.exit(process.wait() if told is not None and time.monotonic() - told < 60 else "it did not train, or did not end in time")
"""
"""Runs `odb-train`, and sends a SIGTERM to its main process, and to no other, once it trains."""


def test_sigterm_to_the_main_process_ends_the_run_as_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TERMINATED, *TINY, "validate=false", "trainer.max_epochs=500", "checkpoint.at_end=true"]
    result = run_command(command, cwd=tmp_path, seconds=SECONDS)
    assert result.status == 128 + signal.SIGTERM, result.output[-6000:]
    summary = summary_of(the_run(tmp_path))
    assert summary["status"] == "interrupted"
    assert summary["steps"] > 0
    assert (the_run(tmp_path) / "checkpoints" / "preempted.ckpt").is_dir(), "as ZeRO's are"


def test_a_refused_value_is_named_before_anything_starts(tmp_path: Path) -> None:
    result = odb_train("odb.l_max=-1", cwd=tmp_path, seconds=100)
    assert result.status != 0
    assert "odb.l_max=-1 cannot be used" in result.output
    assert "Traceback" not in result.output and "deepspeed" not in result.output.lower()
    assert summary_of(the_run(tmp_path))["status"] == "failed"
