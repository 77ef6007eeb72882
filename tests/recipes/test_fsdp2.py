"""`odb-train strategy=odb_model_parallel` as a user runs it: two real ranks under FSDP2, saved and gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import TINY_MODEL, odb_train

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(400)]

SECONDS = 180.0  # for one run on a busy machine; an idle one takes about 15
TINY = (
    "strategy=odb_model_parallel",
    "data.limit=48",
    "data.cutoff=64",
    "data.val_limit=7",
    "odb.l_max=256",
    "odb.num_workers=0",
    *TINY_MODEL,
    "model.config.num_hidden_layers=2",
    "optim.lr=0.01",
    "extras.print_config=false",
    "logger=none",
)


def run(folder: Path, *more: str) -> tuple[dict[str, Any], Path]:
    """The summary of a run, and its folder."""
    runs = folder / "logs" / "quickstart" / "runs"
    before = set(runs.iterdir()) if runs.exists() else set()
    result = odb_train(*TINY, *more, cwd=folder, seconds=SECONDS)
    assert result.status == 0, result.output[-6000:]
    (made,) = set(runs.iterdir()) - before
    return json.loads((made / "summary.json").read_text()), made


def test_a_model_is_trained_in_shards_saved_and_gone_on_with(tmp_path: Path) -> None:
    first, made = run(tmp_path)
    assert (first["status"], first["strategy"], first["world_size"]) == ("ok", "odb_model_parallel", 2)
    assert (first["samples_emitted"], first["identities_missing"], first["identities_repeated"]) == (48, 0, 0)
    assert first["val_loss"] < first["val_loss_before"]
    saved = made / "checkpoints" / "last.ckpt"
    shards = [file.stat().st_size for file in saved.glob("*.distcp")]
    assert len(shards) == 2 and max(shards) < 1.1 * min(shards), "each rank has written its half"

    second, made = run(tmp_path, "ckpt_path=last", "trainer.max_epochs=2", "strategy.save_distributed_checkpoint=false")
    assert second["val_loss_before"] == pytest.approx(first["val_loss"], abs=1e-6), "the weights are those that were saved"
    assert (second["status"], second["epochs"], second["samples_emitted"]) == ("ok", 1, 48)
    assert second["val_loss"] < first["val_loss"]
    checkpoint = torch.load(made / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == first["updates"] + second["updates"]
    (optimizer,) = checkpoint["optimizer_states"]
    steps = {float(state["step"]) for state in optimizer["state"].values()}
    assert steps == {float(checkpoint["global_step"])}, "the optimizer's state was loaded, too"
    assert sum(weight.numel() for weight in checkpoint["state_dict"].values()) >= first["parameters"], "whole, in one file"
