"""`odb-train ckpt_path=last`: a run that was killed is gone on with as if it had not been."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiprocess.ranks import RankResult, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(400)]


def run(folder: Path, name: str, *overrides: str, check: bool = True) -> list[RankResult]:
    return run_ranks(
        "tests.recipes.resumed_runs:run", 2, folder, seconds=120, check=check, place=str(folder), name=name, overrides=overrides
    )


def logged(*runs: Path) -> dict[tuple[int, int, int], tuple[int, list[int]]]:
    """The update and samples of each (rank, epoch, step); the last line of one counts."""
    lines = {}
    for folder in runs:
        for rank in (0, 1):
            for text in (folder / "audit" / f"rank{rank}.jsonl").read_text().splitlines():
                line = json.loads(text)
                lines[rank, line["epoch"], line["step"]] = line["update"], line["sample_ids"]
    return lines


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    if checkpoint.is_file():
        return torch.load(checkpoint, weights_only=False)["state_dict"]
    return torch.load(checkpoint / "checkpoint" / "mp_rank_00_model_states.pt", weights_only=False)["module"]


KILLED = ("+callbacks.crash._target_=tests.crashing.Crash", "+callbacks.crash.how=kill", "+callbacks.crash._convert_=all")
DIES = ("+callbacks.dies._target_=tests.recipes.resumed_runs.DiesWriting", "+callbacks.dies._convert_=all")


@pytest.mark.parametrize(
    ("strategy", "end", "update"),
    [
        ("odb_ddp", (*KILLED, "+callbacks.crash.step=8"), 6),
        ("odb_deepspeed_stage_2", (*DIES, "+callbacks.dies.rank=1", "+callbacks.dies.update=6"), 3),
    ],
    ids=["killed in a step, DDP", "killed while it writes, ZeRO-2"],
)
def test_a_killed_run_is_gone_on_with(strategy: str, end: tuple[str, ...], update: int, tmp_path: Path) -> None:
    whole = run(tmp_path, "whole", f"strategy={strategy}", "task_name=whole")[0].value
    killed = run(tmp_path, "1", f"strategy={strategy}", "task_name=killed", *end, check=False)
    assert any(rank.status == -9 for rank in killed), killed[1].output[-4000:]
    (rank, _) = run(tmp_path, "2", f"strategy={strategy}", "task_name=killed", "ckpt_path=last")
    resumed: dict[str, Any] = rank.value

    runs = tmp_path / "logs" / "killed" / "runs"
    assert f"Restored all states from the checkpoint at {runs / '1' / 'checkpoints' / f'update={update}.ckpt'}" in rank.output
    passed_over = "update=6.ckpt.part: it was being written when its run ended" in rank.output
    assert passed_over == (update == 3)
    of_whole = tmp_path / "logs" / "whole" / "runs" / "whole"
    assert logged(runs / "1", runs / "2") == logged(of_whole)
    before, after = (weights_of(path / "checkpoints" / "last.ckpt") for path in (of_whole, runs / "2"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)

    so_far = sum(len(ids) for (_, epoch, step), (_, ids) in logged(of_whole).items() if epoch == 0 and step <= update)
    told = next(line for line in rank.output.splitlines() if line.startswith("epoch "))
    assert told.startswith(f"epoch 0 · {so_far}/60 samples")
    # Losses and identities are of whole epochs, the rest is what this run has done.
    assert resumed["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-12)
    assert resumed["val_loss"] == whole["val_loss"] and resumed["val_loss_before"] is None
    assert (resumed["identities_missing"], resumed["identities_repeated"], resumed["epochs"]) == (0, 0, 2)
    assert resumed["steps"] == resumed["updates"] == whole["steps"] - update
    trained = sum(len(ids) for (_, epoch, step), (_, ids) in logged(of_whole).items() if epoch == 1 or step >= update)
    assert resumed["samples_emitted"] == resumed["samples_expected"] == trained
