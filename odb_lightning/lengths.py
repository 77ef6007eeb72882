"""Lengths to plan with, without training: drawn from a law, read from a file, or those that a data set really has.

All give int64 arrays. A value that can't be used raises ValueError, with a text that begins with its name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from odb_lightning.loader_options import length_of_input_ids
from odb_lightning.runtime.seeding import derive_seed, seed_everything_local

Lengths = NDArray[np.int64]

LONGEST = 2**31 - 1
_CHUNK_SIZE = 64


def lognormal(*, n: int, mean: float, cv: float, clip: int | None = None, seed: int = 0) -> Lengths:
    """`n` lengths whose logarithms are normal; `mean` and `cv` are those before what is above `clip` is cut to it."""
    _check_whole(n=n)
    _check_positive(mean=mean)
    _check_cv(cv)
    return _rounded(_draw_lognormal(_generator(seed), n, mean, cv), clip)


def bimodal(*, n: int, means: Sequence[float], share: float, cv: float, clip: int | None = None, seed: int = 0) -> Lengths:
    """`n` lengths of two lognormal laws with the same `cv`, `share` of them from the first of the two `means`."""
    _check_whole(n=n)
    if isinstance(means, str) or not isinstance(means, Sequence) or len(means) != 2:
        raise ValueError(f"means={means} cannot be used: give two numbers, [120, 1000]")
    for mean in means:
        _check_positive(means=mean)
    _check_cv(cv)
    if not _is_number(share) or not 0 <= share <= 1:
        raise ValueError(f"share={share} cannot be used: give a number from 0 to 1")
    rng = _generator(seed)
    is_first = rng.random(n) < share
    return _rounded(np.where(is_first, *(_draw_lognormal(rng, n, mean, cv) for mean in means)), clip)


def uniform(*, n: int, low: int, high: int, clip: int | None = None, seed: int = 0) -> Lengths:
    """`n` lengths from `low` to `high`, both included, all as likely."""
    _check_whole(n=n, low=low, high=high)
    if high < low:
        raise ValueError(f"high={high} cannot be used: give an integer of at least low={low}")
    return _rounded(_generator(seed).integers(low, high, n, endpoint=True), clip)


def from_file(*, path: str, limit: int | None = None) -> Lengths:
    """The lengths in a text file, an integer of 0 or more a line, in its order; blank lines are skipped. With a `limit`, at
    most so many, spread over the file."""
    if limit is not None:
        _check_whole(limit=limit)
    if not Path(path).is_file():
        raise ValueError(f"path={path} cannot be used: there is no such file")
    found = []
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text:
                continue
            if not (text.isdecimal() and len(text) <= 10 and int(text) <= LONGEST):
                raise ValueError(f"path={path}, line {number}: {text[:40]!r} is no length: give an integer from 0 to {LONGEST}")
            found.append(int(text))
    if not found:
        raise ValueError(f"path={path} holds no lengths: give an integer a line")
    lengths = np.array(found, dtype=np.int64)
    if limit is not None and limit < len(lengths):
        lengths = lengths[np.arange(limit) * len(lengths) // limit]
    return lengths


def of_dataset(dataset: Any, *, num_workers: int = 0, seed: int = 0, multiprocessing_context: str | None = None) -> Lengths:
    """The length that each sample of a map-style data set has in the first epoch of a loader with this seed, random
    transforms included. Raises what the data set raises."""
    loader: DataLoader[int] = DataLoader(
        _SampleLengths(dataset, seed),  # type: ignore[arg-type]
        batch_size=_CHUNK_SIZE,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        multiprocessing_context=multiprocessing_context if num_workers > 0 else None,
    )
    return np.array([length for chunk in loader for length in chunk], dtype=np.int64)


class _SampleLengths(Dataset[int]):
    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> int:
        seed_everything_local(derive_seed(f"{self._seed}/0", "sample", index))  # as the loader's workers do
        return length_of_input_ids(self._dataset[index])


def _as_it_is(lengths: list[int]) -> list[int]:
    return lengths


def _generator(seed: int) -> np.random.Generator:
    if isinstance(seed, bool) or not isinstance(seed, Integral) or int(seed) < 0:
        raise ValueError(f"seed={seed} cannot be used: give an integer of at least 0")
    return np.random.default_rng(int(seed))


def _draw_lognormal(rng: np.random.Generator, n: int, mean: float, cv: float) -> NDArray[np.float64]:
    variance = math.log1p(cv * cv)
    return rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), n)


def _rounded(lengths: NDArray[Any], clip: int | None) -> Lengths:
    if clip is not None:
        _check_whole(clip=clip)
    return np.clip(np.rint(lengths), 1, LONGEST if clip is None else min(clip, LONGEST)).astype(np.int64)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _check_whole(**values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= LONGEST:
            raise ValueError(f"{name}={value} cannot be used: give an integer from 1 to {LONGEST}")


def _check_positive(**values: Any) -> None:
    for name, value in values.items():
        if not _is_number(value) or not 0 < value <= LONGEST:
            raise ValueError(f"{name}={value} cannot be used: give a number above 0")


def _check_cv(cv: Any) -> None:
    if not _is_number(cv) or not 0 <= cv <= 100:
        raise ValueError(f"cv={cv} cannot be used: give a number from 0 to 100")
