"""Validation and prediction on ranks with unequal data, run by every rank (see ranks.py)."""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning
import torch
from torch import Tensor

from odb_lightning import ODBDataLoader
from odb_lightning.models import CausalLM
from tests.multiprocess.trainers import make_trainer
from tests.multiprocess.training_cases import Samples, make_sample, make_strategy, pad

TINY = {
    "model_type": "qwen3",
    "vocab_size": 17,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
}


class Predicting(CausalLM):
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> list[int]:
        return batch["sample"].tolist()


def pad_with_mask(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = pad(samples)
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
    batch["sample"] = torch.tensor([int(sample["input_ids"].sum()) for sample in samples])
    return batch


def make_model() -> Predicting:
    torch.manual_seed(0)
    return Predicting(config=TINY)


def evaluate(strategy: str, shards: list[list[int]]) -> dict[str, Any]:
    """What validation and prediction give on this rank, and the validation loss of one process without padding."""
    rank = int(os.environ["RANK"])

    def loader() -> ODBDataLoader:
        return ODBDataLoader(Samples(), l_max=24, collate_fn=pad_with_mask, sampler=shards[rank], num_workers=0, shuffle=False)

    def trainer() -> lightning.Trainer:
        return make_trainer(make_strategy(strategy, "token", False), devices=len(shards))

    warnings.simplefilter("ignore")
    validated = trainer().validate(make_model(), loader(), verbose=False)[0]
    predictions = trainer().predict(make_model(), loader()) if strategy == "ddp" else None
    return {
        "val_loss": validated["val_loss"],
        "predictions": predictions,
        "expected": _reference([index for shard in shards for index in shard]),
    }


def _reference(sample_ids: list[int]) -> float:
    """The mean over all targets, each sample by itself."""
    model = make_model().double()
    total, count = 0.0, 0
    for index in sample_ids:
        batch = pad_with_mask([make_sample(index)])
        targets = batch["labels"][0, 1:]
        with torch.no_grad():
            logits = model.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
        total, count = total + float(losses), count + int((targets != -100).sum())
    return total / count


def expected_predictions(sample_ids: list[int]) -> list[int]:
    return sorted(int(make_sample(index)["input_ids"].sum()) for index in sample_ids)
