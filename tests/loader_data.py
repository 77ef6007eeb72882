"""Data sets and collate functions for tests of the loader; at top level, since spawned processes import them."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor

from odb_lightning import ODBDataLoader

IGNORED = -100


class Lengths:
    """A sample per length: its index as token ids, prompt labels masked (the first `masked`), the pid of the worker."""

    def __init__(self, lengths: Sequence[int], masked: int = 1) -> None:
        self.lengths = list(lengths)
        self.masked = masked

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.full((self.lengths[index],), index)
        labels = ids.clone()
        labels[: self.masked] = IGNORED
        return {"input_ids": ids, "labels": labels, "pid": os.getpid()}


class Augmented(Lengths):
    """Samples whose length and values come from each of the three random generators."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        length = self.lengths[index] + random.randrange(3) + int(np.random.randint(3)) + int(torch.randint(3, ()))
        return {"input_ids": torch.randint(0, 1000, (length,)), "drawn": drawn, "id": index}


class Fails(Lengths):
    """Raises, or dies of a signal, at one sample."""

    def __init__(self, lengths: Sequence[int], at: int, how: str = "raise") -> None:
        super().__init__(lengths)
        self.at = at
        self.how = how

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.at:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "exit":
                os._exit(3)
            raise_in_the_users_code(index)
        return super().__getitem__(index)


class Counted(Lengths):
    """Counts calls of `__getitem__` in all processes (under fork)."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.calls = get_context("fork").Value("q", 0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self.calls.get_lock():
            self.calls.value += 1
        return super().__getitem__(index)


class UserError(Exception):
    """An error of the user's own that can't be pickled."""

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code


def raise_in_the_users_code(index: int) -> None:
    raise UserError(f"bad sample {index}", code=7)


def pad(rows: Sequence[Tensor], value: int = 0) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "input_ids": pad([sample["input_ids"] for sample in samples]),
        "labels": pad([sample["labels"] for sample in samples], IGNORED),
        "pids": [sample["pid"] for sample in samples],
        "collate_pid": os.getpid(),
    }


def collate_augmented(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Draws from the three generators, too."""
    return {
        "input_ids": pad([sample["input_ids"] for sample in samples]),
        "ids": [sample["id"] for sample in samples],
        "drawn": [sample["drawn"] for sample in samples],
        "drawn_by_collate": [random.random(), float(np.random.rand()), float(torch.rand(()))],
    }


def plain_list(samples: list[Any]) -> list[Any]:
    return samples


def lognormal_lengths(count: int, seed: int = 0, longest: int = 200) -> list[int]:
    rng = random.Random(seed)
    return [min(int(rng.lognormvariate(2.5, 0.7)) + 1, longest) for _ in range(count)]


class WithMeta(dict[str, Any]):
    """A batch that is more than its items."""

    meta: Any = None


def collate_with_meta(samples: list[dict[str, Any]]) -> WithMeta:
    batch = WithMeta(collate(samples))
    batch.meta = {"rows": len(samples), "first": samples[0]["input_ids"][:1]}
    return batch


def collate_in_place(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Changes the samples it is given, as some do."""
    for sample in samples:
        sample["input_ids"] += 1
        sample["more"]["values"] += 1
        sample.pop("id")
    return {
        "input_ids": pad([sample["input_ids"] for sample in samples]),
        "values": [sample["more"]["values"].tolist() for sample in samples],
    }


class Stored:
    """Keeps its samples, and hands out the tensors themselves."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.samples = [
            {"input_ids": torch.full((n,), i), "more": {"values": torch.zeros(2)}, "id": i} for i, n in enumerate(lengths)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.samples[index])


def make_loader(dataset: Any, l_max: int = 64, **options: Any) -> ODBDataLoader:
    """A small loader that starts fast."""
    defaults: dict[str, Any] = {"collate_fn": collate, "buffer_size": 32, "num_workers": 1, "multiprocessing_context": "fork"}
    return ODBDataLoader(dataset, l_max=l_max, **(defaults | options))


def epoch_of(loader: ODBDataLoader) -> list[tuple[int, int, tuple[Any, ...]]]:
    """Epoch, step and sample ids of each batch of a pass."""
    return [(batch.step.epoch, batch.step.step, batch.step.sample_ids) for batch in loader]


def some_pids(loader: ODBDataLoader) -> tuple[Any, list[int], int]:
    """An iteration under way, with the pids of its workers, as far as they are known, and of its collate process."""
    iteration = iter(loader)
    batch = next(iteration)
    return iteration, sorted(set(batch.data["pids"])), batch.data["collate_pid"]
