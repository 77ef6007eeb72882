"""What a row of a batch takes of its memory budget and of a step's time, as functions of its padded length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

RowCost = Callable[[int], float]
"""The cost of one row, padded to the given length, in units fine enough to be rounded; must not fall with the length."""


def tokens(length: int) -> int:
    """Padded tokens: one per position."""
    return length


@dataclass(frozen=True)
class QuadraticCost:
    """`a * length + b * length ** 2`: the second term is attention's.

    With the defaults, tokens at the price that they have in a short row of a model of about 7 billion parameters
    (`length + length ** 2 / 24576`, the ratio that verl uses).
    """

    a: float = 1.0
    b: float = 1 / 24576

    def __post_init__(self) -> None:
        if not (self.a >= 0 and self.b >= 0 and self.a + self.b > 0):
            raise ValueError(
                f"the coefficients of a quadratic cost must not be negative, nor both zero: a={self.a}, b={self.b}"
            )

    def __call__(self, length: int) -> float:
        return self.a * length + self.b * length * length


_BY_NAME: dict[str, RowCost] = {"tokens": tokens, "quadratic": QuadraticCost()}


def named_cost(choice: str | RowCost, option: str) -> RowCost:
    """The function that `option` names or is. Raises ValueError for another name, TypeError for what can't be called."""
    if isinstance(choice, str):
        if choice not in _BY_NAME:
            raise ValueError(
                f"{option}={choice!r} is unknown: choose {' or '.join(map(repr, _BY_NAME))}, or a function of a length"
            )
        return _BY_NAME[choice]
    if not callable(choice):
        raise TypeError(f"{option} has to be {' or '.join(map(repr, _BY_NAME))} or a function of a length, got {choice!r}")
    return choice


def describe_cost(cost: RowCost) -> str:
    """The same for functions that are the same on two ranks."""
    if isinstance(cost, QuadraticCost):
        return repr(cost)
    return str(getattr(cost, "__qualname__", type(cost).__qualname__))


class RowLimits:
    """How many rows a batch may have, and what they cost, by the length of the longest; whole numbers throughout.

    A batch of n rows of padded length l keeps within the budget if `n * budget(l) <= l_max`. One row always may.
    """

    def __init__(self, l_max: int, max_rows: int | None = None, budget: RowCost = tokens, cost: RowCost | None = None) -> None:
        """Raises ValueError for `l_max` or `max_rows` below 1."""
        if l_max < 1:
            raise ValueError(f"l_max must be at least 1 token, got {l_max}")
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        self.l_max = l_max
        self._max_rows = max_rows
        self._budget = budget
        self._cost = budget if cost is None else cost
        self._known: dict[int, tuple[int, int]] = {}

    def is_oversize(self, length: int) -> bool:
        """Whether a single row of this length is over the budget."""
        return self._budget(length) > self.l_max

    def __call__(self, length: int) -> tuple[int, int]:
        """Rows at most, and the cost of each. Raises ValueError for a length or a cost that is not positive."""
        if length in self._known:
            return self._known[length]
        unit, cost = self._budget(length), self._cost(length)
        for value in (length, unit, cost):
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"a length and what it costs must be positive, got {value!r} for length {length}")
        rows = max(int(self.l_max // unit), 1)
        self._known[length] = (rows if self._max_rows is None else min(rows, self._max_rows), max(round(cost), 1))
        return self._known[length]
