"""Samples of different lengths to one padded batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from odb_lightning.runtime.counting import IGNORE_INDEX


@dataclass(frozen=True)
class PadCollator:
    """`input_ids`, `attention_mask`, `labels`, int64 of shape (samples, longest), padded on the right.

    Labels are -100 in the padding, whatever `pad_id` is. `pad_to_multiple_of` rounds the width up, for fewer distinct
    shapes; the budget l_max knows nothing of it, so choose l_max a multiple of it.
    """

    pad_id: int
    pad_to_multiple_of: int | None = None

    def __call__(self, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        lengths = [len(sample["input_ids"]) for sample in samples]
        width = max(lengths)
        if self.pad_to_multiple_of:
            width += -width % self.pad_to_multiple_of
        shape = (len(samples), width)
        input_ids = torch.full(shape, self.pad_id, dtype=torch.int64)
        labels = torch.full(shape, IGNORE_INDEX, dtype=torch.int64)
        attention_mask = torch.zeros(shape, dtype=torch.int64)
        for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
            input_ids[row, :length] = sample["input_ids"]
            labels[row, :length] = sample["labels"]
            attention_mask[row, :length] = 1
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
