"""Random state that depends on what is being done, never on which process does it or when."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from the parts, the same on every machine and in every process."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything_local(seed: int) -> None:
    """Seeds Python's, numpy's and torch's CPU generators; about 10 us, as it is done for every sample."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


class RandomState:
    """That of Python's, numpy's and torch's generators (the current CUDA device's too), as it is when this is made."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def put_back(self) -> None:
        """The generators are again as they were."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers and tensors."""
        version, numbers, gauss = self._python
        name, keys, *rest = self._numpy
        state: dict[str, Any] = {
            "python": [version, list(numbers), gauss],
            "numpy": [name, np.asarray(keys).tolist(), *rest],
            "torch": self._torch,
        }
        return state if self._cuda is None else state | {"cuda": self._cuda}

    @staticmethod
    def put_back_dict(state: dict[str, Any]) -> None:
        """As `to_dict` gave it."""
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(state["torch"].cpu())
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].cpu())


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Puts Python's, numpy's and torch's generators (the current CUDA device's too) back at the end."""
    state = RandomState()
    try:
        yield
    finally:
        state.put_back()
