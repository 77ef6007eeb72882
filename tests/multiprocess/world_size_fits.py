"""Fits that are gone on with by another number of ranks, and what of their checkpoints can be (see ranks.py)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

from tests.multiprocess import resumed_fits
from tests.multiprocess.resumed_fits import fit
from tests.multiprocess.training_cases import _whole, make_strategy


def go_on(strategy: str, place: str, checkpoint: str | None, batches: list[int], accumulate: int) -> dict[str, Any]:
    """From `checkpoint`, if one is given, to the end of the second epoch, with a checkpoint after each of `batches`."""
    size = int(os.environ["WORLD_SIZE"])
    return fit(strategy, size, Path(place), batches, checkpoint=checkpoint, accumulate=accumulate, max_epochs=2)


def refused(strategy: str, place: str, checkpoint: str) -> dict[str, Any]:
    """The error with which a fit does not begin, and the weights alone, as it advises to take."""
    with pytest.raises(ValueError) as refusal:
        go_on(strategy, place, checkpoint, [], 1)
    file = Path(place) / "weights.ckpt"
    convert_zero_checkpoint_to_fp32_state_dict(str(Path(place) / checkpoint), str(file))
    model = resumed_fits.Model(False, False)
    model.load_state_dict(torch.load(file, weights_only=False)["state_dict"])
    return {"error": str(refusal.value), "weights": _weights(model)}


def universal(strategy: str, place: str, checkpoint: str) -> dict[str, Any]:
    """What was trained from the universal checkpoint, as the error advises to make, and the weights at first."""
    folder, count = Path(place) / checkpoint, ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    folders = ["--input_folder", str(folder / "checkpoint"), "--output_folder", str(folder / "universal")]
    sys.argv = ["ds_to_universal", *folders, "--inject_missing_state", *count]
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(ds_to_universal.parse_arguments())
    weights: list[float] = []
    resumed_fits.make_strategy = _universal
    resumed_fits.Model.on_train_start = lambda module: weights.extend(_weights(module))  # type: ignore[method-assign]
    return go_on(strategy, place, checkpoint, [], 1) | {"weights": weights}


def _universal(*arguments: Any) -> Any:
    strategy = make_strategy(*arguments)
    strategy.config["checkpoint"] = {"load_universal": True}
    return strategy


def _weights(model: Any) -> list[float]:
    return [float(weight) for weight in _whole(list(model.network.parameters()))]
