"""What a row of a batch takes of its memory budget and of a step's time, as functions of its padded length."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

RowCost = Callable[[int], float]
"""The cost of one row, padded to the given length, in any unit; must be positive, and not fall with the length."""

LARGEST = 2**40
"""Of lengths, patches and costs: sums and products of them have to be whole numbers of 64 bits."""
_FINE, _SCALED = 2**10, 2**24


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


def describe_cost(cost: RowCost, l_max: int) -> str:
    """The same for functions that are the same on two ranks, as far as can be seen: what it gives for some lengths."""
    if cost is tokens or isinstance(cost, QuadraticCost):
        return "tokens" if cost is tokens else repr(cost)
    return f"{getattr(cost, '__qualname__', type(cost).__qualname__)}: {[f'{cost(n):.6g}' for n in _some_lengths(l_max)]}"


def _some_lengths(l_max: int) -> list[int]:
    return [2**power for power in range(l_max.bit_length())]


class RowLimits:
    """How many rows a batch may have, and what they cost, by the length of the longest; whole numbers throughout.

    A batch of n rows of padded length l keeps within the budget if `n * budget(l) <= l_max`. One row always may.
    """

    def __init__(self, l_max: int, max_rows: int | None = None, budget: RowCost = tokens, cost: RowCost | None = None) -> None:
        """Raises ValueError for `l_max` or `max_rows` below 1 or too large, and for a budget or a cost that is no positive
        number, or falls, at some lengths up to `l_max`."""
        if not 1 <= l_max <= LARGEST:
            raise ValueError(f"l_max must be at least 1 token, got {l_max}" if l_max < 1 else f"l_max={l_max} is too large")
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        self.l_max = l_max
        self._max_rows = max_rows
        self._budget = budget
        self._cost = budget if cost is None else cost
        self._cost_option = "budget" if cost is None else "cost"
        self._rows: dict[int, int] = {}
        self._costs: dict[int, int] = {}
        self._units: list[tuple[int, float]] = []
        """Lengths seen, ascending, and what the budget takes for them."""
        largest = self._value(self._cost_option, self._cost, l_max)
        self._scale = 1.0 if _FINE <= largest <= LARGEST or self._cost is tokens else _SCALED / largest
        if budget is not tokens or cost is not None:
            for length in _some_lengths(l_max):
                self(length)

    def is_oversize(self, length: int) -> bool:
        """Whether a single row of this length is over the budget."""
        if self._budget is tokens:
            return length > self.l_max
        return self._value("budget", self._budget, length) > self.l_max

    def describe(self, length: int) -> str:
        """What a row of this length takes."""
        if self._budget is tokens:
            return f"has length {length}, over l_max={self.l_max}"
        return f"has length {length}, which takes {self._budget(length):,.6g} of a budget of l_max={self.l_max}"

    def __call__(self, length: int) -> tuple[int, int]:
        """Rows at most, and the cost of each. Raises ValueError for a length, a budget or a cost that can't be."""
        if length in self._rows:
            return self._rows[length], self._costs[length]
        if not 1 <= length <= LARGEST:
            raise ValueError(f"a length must be from 1 to {LARGEST}, got {length}")
        unit = self._value("budget", self._budget, length)
        self._check_does_not_fall(length, unit)
        cost = min(self._scale * self._value(self._cost_option, self._cost, length), LARGEST)
        rows = max(int(self.l_max // unit), 1)
        self._costs[length] = max(round(cost), 1)
        self._rows[length] = rows if self._max_rows is None else min(rows, self._max_rows)
        return self._rows[length], self._costs[length]

    def of_each(self, lengths: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The same for many: rows at most, and costs."""
        for length in set(lengths) - self._rows.keys():
            self(length)
        rows = np.fromiter(map(self._rows.__getitem__, lengths), dtype=np.int64, count=len(lengths))
        return rows, np.fromiter(map(self._costs.__getitem__, lengths), dtype=np.int64, count=len(lengths))

    def _value(self, option: str, function: RowCost, length: int) -> float:
        if function is tokens:
            return length
        try:
            value = float(function(length))
        except Exception as error:
            raise ValueError(f"{option} failed for a row of length {length}: {type(error).__name__}: {error}") from error
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{option} gave {value} for a row of length {length}: it has to give a positive number")
        return value

    def _check_does_not_fall(self, length: int, unit: float) -> None:
        if self._budget is tokens:
            return
        place = bisect.bisect_left(self._units, (length,))
        neighbours = [*self._units[max(place - 1, 0) : place], (length, unit), *self._units[place : place + 1]]
        for (shorter, less), (longer, more) in pairwise(neighbours):
            if less > more:
                raise ValueError(
                    f"budget falls from {less:g} for a row of length {shorter} to {more:g} for one of length {longer}; it must "
                    "not, as the longest row decides what a batch takes"
                )
        self._units.insert(place, (length, unit))
