"""Metrics and predictions of the language model on ranks with unequal data, run by every rank (see ranks.py)."""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import lightning
import torch
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric

from odb_lightning import ODBDataLoader
from odb_lightning.models import CausalLM
from tests.multiprocess.fitting import make, num_ranks
from tests.multiprocess.trainers import make_trainer
from tests.multiprocess.training_cases import Samples, make_sample, pad

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

ALL = [0, 2, 3, 5, 6, 7, 9, 10, 13]
"""5 and 6 have no target."""
CASES: dict[str, tuple[list[list[int]], int]] = {
    "rank 1 idle": ([ALL[:-1], ALL[-1:]], 12),
    "rank 0 has no sample": ([[], ALL], 48),
    "one process": ([ALL], 12),
    "one process, larger batches": ([ALL], 48),
}
"""The ranks' samples, and the budget."""


def pad_with_mask(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = pad(samples)
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
    return batch


class Measured(CausalLM):
    """With metrics of a user's: a mean, and one that keeps every value."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mean_length, self.lengths = MeanMetric(), CatMetric()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        lengths = batch["attention_mask"].sum(1).float()
        self.mean_length.update(lengths)
        self.lengths.update(lengths)
        self.log("mean_length", self.mean_length, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("num_lengths", float(self.lengths.compute().numel()))
        self.lengths.reset()


def make_model() -> Measured:
    """That a fit leaves as it is."""
    torch.manual_seed(0)
    return Measured(config=TINY, lr=0.0)


def all_cases(strategy: str) -> dict[str, Any]:
    return {name: _case(strategy, *case) for name, case in CASES.items() if len(case[0]) == num_ranks(strategy)}


def _case(strategy: str, shards: list[list[int]], l_max: int) -> dict[str, Any]:
    """What each loop of the trainer gives on this rank."""
    shard = shards[int(os.environ["RANK"])]

    def loader() -> ODBDataLoader:
        options: dict[str, Any] = {"num_workers": 0, "shuffle": False, "num_supervised_fn": "causal"}
        return ODBDataLoader(Samples(), l_max=l_max, collate_fn=pad_with_mask, sampler=shard, **options)

    def trainer() -> lightning.Trainer:
        return make_trainer(make(strategy), devices=len(shards))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = trainer()
        fitted.fit(make_model(), loader(), loader())
        return {
            "fit": {name: float(value) for name, value in fitted.callback_metrics.items()},
            "validate": trainer().validate(make_model(), loader(), verbose=False)[0],
            "test": trainer().test(make_model(), loader(), verbose=False)[0],
            "predict": _as_numbers(trainer().predict(make_model(), loader())),
        }


def _as_numbers(predictions: Any) -> list[Any]:
    """`[sample, loss, targets]` of each, and None for an idle step."""
    rows: list[Any] = []
    for prediction in predictions:
        if prediction is None:
            rows.append(None)
            continue
        losses, num_targets = prediction["loss"].tolist(), prediction["num_targets"].tolist()
        rows.extend(map(list, zip(prediction["sample_ids"], losses, num_targets, strict=True)))
    return rows


def reference(sample_ids: list[int]) -> tuple[dict[str, float], dict[int, tuple[float, int]]]:
    """Loss, perplexity and accuracy over all targets, and each sample's loss and targets: one by one, in float64."""
    model = make_model().double()
    total, hits, count = 0.0, 0, 0
    of_samples: dict[int, tuple[float, int]] = {}
    for index in sample_ids:
        batch = pad_with_mask([make_sample(index)])
        labels = batch["labels"][0, 1:]
        with torch.no_grad():
            logits = model.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[0, :-1]
        logits, targets = logits[labels != -100], labels[labels != -100]
        losses = -logits.log_softmax(-1).gather(1, targets[:, None])
        of_samples[index] = (float(losses.mean()), len(targets))
        total, hits, count = total + float(losses.sum()), hits + int((logits.argmax(-1) == targets).sum()), count + len(targets)
    return {"loss": total / count, "perplexity": math.exp(total / count), "token_accuracy": hits / count}, of_samples
