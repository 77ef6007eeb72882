"""From the lengths in a window to groups within the token budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from odb_lightning.plan.costs import RowLimits


def group_window(lengths: Sequence[int], l_max: int, max_rows: int | None = None) -> list[list[int]]:
    """Groups of positions in `lengths`, in the order sealed: the first holds the longest, and so does each group's head.

    The carry-over rule of arXiv 2606.19989: walk from the longest to the shortest; a group is sealed when it has as many
    samples as the threshold, which is 1 at first and then `max(l_max // shortest, 1)` of the group sealed before. The
    threshold lags by one group, so `len(group) * longest <= l_max` holds for every group of two or more; a lone sample
    may be longer than `l_max`. What is left at the end forms the last group. `max_rows` caps the samples of a group.

    Raises ValueError for a budget, a length or `max_rows` below 1.
    """
    limits = RowLimits(l_max, max_rows)
    return carry_over(lengths, lambda length: limits(length)[0])


def carry_over(lengths: Sequence[int], most_rows: Callable[[int], int]) -> list[list[int]]:
    """The carry-over rule for any budget: `most_rows(length)` samples at most, at least 1, in a batch whose longest has this
    length; it must not rise with the length. Raises ValueError for a length below 1."""
    ascending = sorted(range(len(lengths)), key=lengths.__getitem__)
    if ascending and lengths[ascending[0]] < 1:
        position = ascending[0]
        raise ValueError(f"lengths must be at least 1, got {lengths[position]} at position {position}")
    groups: list[list[int]] = []
    open_group: list[int] = []
    threshold = 1
    for position in reversed(ascending):
        open_group.append(position)
        if len(open_group) == threshold:
            groups.append(open_group)
            open_group = []
            threshold = most_rows(lengths[position])
    if open_group:
        groups.append(open_group)
    return groups
