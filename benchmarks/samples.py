"""The samples that the benchmarks load, and collates for them. Needs torch and numpy alone, for the peers' environment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

MEAN_LENGTH, L_MAX, BUFFER_SIZE = 500, 8192, 1024
LAWS = ("0.3", "0.5", "1.0", "bi0.8")
"""Of the lengths of `Tokens`: a lognormal's CV, or two of them, a quarter of the samples from the longer."""
PAD_VALUES = {"input_ids": 0, "labels": -100, "attention_mask": 0}

SCHEDULE_L_MAX = 12288
SCHEDULE_LAWS = ("CV 0.29", "CV 0.48", "bimodal", "heavy")


def _lognormal(rng: np.random.Generator, n: int, mean: float, cv: float) -> np.ndarray[Any, Any]:
    variance = math.log1p(cv * cv)
    return rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), n)


def law_lengths(law: str, n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """`n` lengths of mean 500, from 8 to `L_MAX`."""
    rng = np.random.default_rng(seed)
    if law == "bi0.8":
        short, long = (_lognormal(rng, n, MEAN_LENGTH * part, 0.2) for part in (0.56, 2.32))
        drawn = np.where(rng.random(n) < 0.75, short, long)
    else:
        drawn = _lognormal(rng, n, MEAN_LENGTH, float(law))
    return np.clip(np.rint(drawn), 8, L_MAX).astype(np.int64)


def schedule_lengths(law: str, n: int, seed: int) -> np.ndarray[Any, Any]:
    """`n` lengths of one of the `SCHEDULE_LAWS`."""
    rng = np.random.default_rng(seed)
    if law == "bimodal":
        drawn = np.exp(rng.normal(np.where(rng.random(n) < 0.5, math.log(120), math.log(1000)), 0.35))
    else:
        mean, cv = {"CV 0.29": (600, 0.29), "CV 0.48": (1200, 0.48), "heavy": (1800, 0.94)}[law]
        drawn = _lognormal(rng, n, mean, cv)
    return np.clip(np.rint(drawn), 1, SCHEDULE_L_MAX).astype(np.int64)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Three int64 tensors a sample; two fifths of the labels are masked. The first id of a sample is its index."""

    def __init__(self, num_samples: int, law: str) -> None:
        self.lengths = law_lengths(law, num_samples)
        self.ids = torch.arange(1, L_MAX + 1)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = int(self.lengths[index])
        ids = self.ids[:length].clone()
        ids[0] = index
        labels = ids.clone()
        labels[: 2 * length // 5] = -100
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones(length, dtype=torch.int64)}


class Images(Dataset[dict[str, torch.Tensor]]):
    """A float32 image of 1 MB, and 200 to 499 ids."""

    def __init__(self, num_samples: int, law: str = "") -> None:
        self.lengths = 200 + np.arange(num_samples) % 300
        self.image = torch.zeros(3, 296, 296)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(index, index + int(self.lengths[index])), "image": self.image.clone()}


class Objects(Dataset[dict[str, Any]]):
    """No tensors: 100 to 399 ids in a list, a string, a dictionary."""

    def __init__(self, num_samples: int, law: str = "") -> None:
        self.lengths = 100 + np.arange(num_samples) % 300

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = int(self.lengths[index])
        return {
            "input_ids": list(range(index, index + length)),
            "text": "x" * length,
            "meta": {"id": index, "tags": ["a", "b"]},
        }


def pad(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The usual pad collate."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    batch = {key: torch.full((len(samples), longest), value) for key, value in PAD_VALUES.items()}
    for row, sample in enumerate(samples):
        for key, values in batch.items():
            values[row, : len(sample[key])] = sample[key]
    return batch


def pad_arrays(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """The same batch as arrays, which a `DataLoader` pickles rather than shares."""
    return _arrays(pad(samples))


def stack_images(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {"input_ids": ids, "image": torch.stack([sample["image"] for sample in samples])}


def stack_image_arrays(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, Any]:
    return _arrays(stack_images(samples))


def pad_objects(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = [sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples]
    return {
        "input_ids": torch.tensor(ids),
        "text": [sample["text"] for sample in samples],
        "meta": [sample["meta"] for sample in samples],
    }


def pad_object_arrays(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return _arrays(pad_objects(samples))


def _arrays(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


@dataclass(frozen=True)
class Kind:
    """A kind of samples, and how loaders are set for it."""

    dataset: Callable[..., Any]
    collate: Callable[..., Any]
    collate_arrays: Callable[..., Any]
    num_samples: int
    l_max: int
    fixed_batch: int
    buffer_size: int


KINDS = {
    "tokens": Kind(Tokens, pad, pad_arrays, 20_000, L_MAX, 16, BUFFER_SIZE),
    "images": Kind(Images, stack_images, stack_image_arrays, 2_000, 4096, 8, 256),
    "objects": Kind(Objects, pad_objects, pad_object_arrays, 20_000, 4096, 16, BUFFER_SIZE),
}


class Shard(Sampler[int]):
    """This rank's part of a seeded permutation: every `world_size`-th of it, without padding."""

    def __init__(self, num_samples: int, rank: int, world_size: int) -> None:
        self.views: list[int] = np.random.default_rng(0).permutation(num_samples)[rank::world_size].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.views)

    def __len__(self) -> int:
        return len(self.views)


def plain_loader(kind: Kind, dataset: Any, num_workers: int, shard: Shard, collate: Callable[..., Any]) -> DataLoader[Any]:
    """Torch's, with a fixed batch. Its workers are kept, so that their processor time can be read after the last batch."""
    return DataLoader(
        dataset,
        batch_size=kind.fixed_batch,
        sampler=shard,
        num_workers=num_workers,
        prefetch_factor=4,
        collate_fn=collate,
        persistent_workers=True,
    )
