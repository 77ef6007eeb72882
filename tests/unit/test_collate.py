"""Padding on the right."""

from __future__ import annotations

import pickle

import torch

from odb_lightning.data import PadCollator

SAMPLES = [
    {"input_ids": torch.tensor([5, 6, 7]), "labels": torch.tensor([-100, 6, 7])},
    {"input_ids": torch.tensor([0]), "labels": torch.tensor([0])},
]


def test_fields_are_padded_on_the_right_to_the_longest():
    batch = PadCollator(pad_id=9)(SAMPLES)
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    assert batch["input_ids"].tolist() == [[5, 6, 7], [0, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [0, -100, -100]]
    assert all(field.dtype == torch.int64 for field in batch.values())


def test_the_width_is_rounded_up_when_asked_to():
    assert PadCollator(0, pad_to_multiple_of=8)(SAMPLES)["labels"].shape == (2, 8)
    assert PadCollator(0, pad_to_multiple_of=3)(SAMPLES)["labels"].shape == (2, 3)


def test_it_travels_to_another_process():
    collate = pickle.loads(pickle.dumps(PadCollator(9, 4)))
    assert collate == PadCollator(9, 4) and collate(SAMPLES)["input_ids"].shape == (2, 4)
