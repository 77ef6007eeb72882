"""Groups of like cost on all ranks in the same step.

What a step takes is the time of its costliest rank. So each rank says what its groups would cost, and then forms, for each
step, the fullest group that keeps within the step's cost, out of all its window; what fits badly waits for better company.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_QUANTILES = 16
"""Costs of a rank's groups that go into the exchange, whatever their number."""

_SHARE = 0.35
"""Of the groups in the window, emitted in a round. The rest is the choice that the next round has."""
_FEW_GROUPS, _SHARE_OF_FEW = 16, 0.5
"""In a small window there is less to choose from anyhow."""
_STEP_PRICE = 0.11
"""What a step costs beside its rows, in full batches. A smaller group has less padding, but makes more steps."""
_SMALLER = (0.8, 0.64, 0.5)
"""Sizes tried, as shares of a full group."""
_WORTH_OF_WAITING = 0.25
"""What a sample counts for more when it has waited as long as it may."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SortedWindow:
    """A rank's samples, the longest first. All arrays have one entry per sample."""

    tickets: Ints
    rows: Ints
    """Most samples in a batch whose longest is this one."""
    cost: Ints
    """Of one row as long as this sample."""
    patches: Ints | None = None
    """Counted by the second budget, if there is one."""
    max_patches: int = 0

    def __len__(self) -> int:
        return len(self.tickets)

    def most(self) -> Ints:
        """Samples at most in the group that begins at each position."""
        positions = np.arange(len(self))
        most = np.minimum(self.rows, len(self) - positions)
        if self.patches is not None:
            most = np.minimum(most, _most_patches(self.patches, self.max_patches))
        return most


@dataclass(frozen=True)
class Groups:
    """The groups that a window falls into, the costliest first."""

    tickets: list[list[int]]
    costs: list[int]


def form_groups(window: SortedWindow) -> Groups:
    """From the longest sample on, each group as large as pays: see `_STEP_PRICE`."""
    sizes, found, start = _sizes(window), list[tuple[int, int, int]](), 0
    while start < len(window):
        size = int(sizes[start])
        found.append((-size * int(window.cost[start]), start, size))
        start += size
    found.sort()
    return Groups([window.tickets[at : at + size].tolist() for _, at, size in found], [-cost for cost, _, _ in found])


def cost_quantiles(costs: Sequence[int]) -> list[int]:
    """`NUM_QUANTILES` of the costs, which are given from the largest to the smallest; zeros if there are none."""
    if not costs:
        return [0] * NUM_QUANTILES
    return [costs[(2 * index + 1) * len(costs) // (2 * NUM_QUANTILES)] for index in range(NUM_QUANTILES)]


def num_steps(most_groups: int, fewest_groups: int, bound: int, is_last: bool) -> int:
    """Steps of a round, from numbers that all ranks share: the groups of active ranks, and what none of them can exceed. With
    nothing more to come (`is_last`) nothing is gained by waiting, and the round takes all that is left."""
    share = _SHARE if fewest_groups >= _FEW_GROUPS else _SHARE_OF_FEW
    return max(min(most_groups if is_last else int(fewest_groups * share), bound), 1)


def step_costs(quantiles: Sequence[int], num_steps: int) -> list[int]:
    """The cost that each step may have on every rank, from the largest quantiles of any rank."""
    costs = []
    for step in range(num_steps):
        # The middle of the step's share of the quantiles' range, in units of 1 / (2 * num_steps) of a quantile.
        at = min(max((2 * step + 1) * NUM_QUANTILES - num_steps, 0), 2 * num_steps * (NUM_QUANTILES - 1))
        index, rest = divmod(at, 2 * num_steps)
        following = quantiles[min(index + 1, NUM_QUANTILES - 1)]
        costs.append(quantiles[index] + (following - quantiles[index]) * rest // (2 * num_steps))
    return costs


def fullest_groups(window: SortedWindow, costs: Sequence[int], *, now: int, latest: int) -> list[list[int]]:
    """For each cost in turn the group, of the samples that are left, with most to do within it; none is empty.

    `now` is the number of tickets given out. What waited for long counts for more, and what waited for `latest` tickets
    goes first. Raises ValueError for more costs than samples.
    """
    if len(costs) > len(window):
        raise ValueError(f"{len(window)} samples can't be split into {len(costs)} groups")
    choice = _Choice(window, now, latest)
    groups = []
    for index, cost in enumerate(costs):
        start, size = choice.best(cost)
        groups.append(choice.take(start, min(size, len(choice) - (len(costs) - 1 - index))))
    return groups


def split_costliest(groups: Groups, target: int) -> list[list[int]]:
    """As many groups as `target`, the costliest first: halves of the costliest until there are enough, or the costliest of
    them. Raises ValueError if there are not as many samples."""
    heap = [(-cost, index, group) for index, (cost, group) in enumerate(zip(groups.costs, groups.tickets, strict=True))]
    if sum(map(len, groups.tickets)) < target:
        raise ValueError(f"{sum(map(len, groups.tickets))} samples can't be split into {target} groups")
    single: list[tuple[int, int, list[int]]] = []
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) + len(single) < target:
        cost, index, group = heapq.heappop(heap)
        if len(group) == 1:
            single.append((cost, index, group))
            continue
        half = len(group) // 2
        # Of the longer half the cost of a row is that of the group; of the other it is not known here, and is at most that.
        heapq.heappush(heap, (cost * half // len(group), index, group[:half]))
        heapq.heappush(heap, (cost * (len(group) - half) // len(group), number, group[half:]))
        number += 1
    return [group for _, _, group in sorted(heap + single)[:target]]


def _sums(values: Ints) -> Ints:
    """Of the first 0, 1, ... values."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(values)))


def _sizes(window: SortedWindow) -> Ints:
    """Samples of the group that begins at each position, as large as pays."""
    full = window.most()
    if len(window) == 0:
        return full
    sums, positions = _sums(window.cost), np.arange(len(window))
    price = _STEP_PRICE * float(np.median(full * window.cost))
    best = full
    worth = (sums[positions + full] - sums[:-1]) / (full * window.cost + price)
    for share in _SMALLER:
        sizes = np.maximum((full * share).astype(np.int64), 1)
        worth_then = (sums[positions + sizes] - sums[:-1]) / (sizes * window.cost + price)
        is_better = worth_then > worth
        best, worth = np.where(is_better, sizes, best), np.where(is_better, worth_then, worth)
    return best


class _Choice:
    """The samples left in a round, and what each group of them would be worth."""

    def __init__(self, window: SortedWindow, now: int, latest: int) -> None:
        sizes = _sizes(window)
        waited = (now - window.tickets) / latest
        self._worth = window.cost * (1.0 + _WORTH_OF_WAITING * waited)
        patches = np.zeros_like(sizes) if window.patches is None else window.patches
        self._samples = np.stack((window.tickets, window.cost, sizes, patches))
        self._max_patches = None if window.patches is None else window.max_patches
        self._positions = np.arange(len(window) + 1)
        self._sums = np.zeros(len(window) + 1)
        self._late = now - latest
        self._has_late = bool((window.tickets < self._late).any())

    def __len__(self) -> int:
        return int(self._samples.shape[1])

    def take(self, start: int, size: int) -> list[int]:
        """The tickets of a group, which is not there any more."""
        tickets: list[int] = self._samples[0, start : start + size].tolist()
        self._samples = np.concatenate((self._samples[:, :start], self._samples[:, start + size :]), axis=1)
        self._worth = np.concatenate((self._worth[:start], self._worth[start + size :]))
        return tickets

    def best(self, cost: int) -> tuple[int, int]:
        """Begin and size of the group within `cost` that is worth most; one with the oldest sample in it, if that is late."""
        tickets, costs, sizes, patches = self._samples
        number, positions = len(self), self._positions[: len(self)]
        sizes = np.minimum(sizes, number - positions)
        if self._max_patches is not None:
            sizes = np.minimum(sizes, _most_patches(patches, self._max_patches))
        within = np.minimum(cost // costs, sizes)
        # A group that would have to be cut to less than it pays to have is left for a step that is meant for it.
        fits = 4 * within >= np.maximum(3 * sizes, 4)
        if self._has_late:
            oldest = int(np.argmin(tickets))
            if tickets[oldest] < self._late:
                fits &= (positions <= oldest) & (oldest < positions + within)
                if not fits.any():
                    return oldest, int(sizes[oldest])
        if not fits.any():
            return number - 1, 1
        sums = self._sums[: number + 1]
        np.cumsum(self._worth, out=sums[1:])
        start = int(np.argmax(np.where(fits, sums[positions + within] - sums[:-1], -1.0)))
        return start, int(within[start])


def _most_patches(patches: Ints, limit: int) -> Ints:
    """Samples at most, at least one, from each position on."""
    sums = _sums(patches)
    most: Ints = np.searchsorted(sums, sums[:-1] + limit, side="right") - 1 - np.arange(len(patches))
    return np.maximum(most, 1)
