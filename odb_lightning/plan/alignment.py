"""From each rank's own groups to the same number of groups on all active ranks."""

from __future__ import annotations

from collections.abc import Sequence


def target_group_count(group_counts: Sequence[int], capacities: Sequence[int], sample_counts: Sequence[int]) -> int:
    """T_grp, the number of groups that every active rank emits in a round; 0 if no rank is active.

    One entry per rank: groups formed, output slots free, samples in those groups. A rank is active if it has a group;
    `T_grp = max(min(max groups, min positive capacity, min positive samples), 1)` over the active ranks
    (arXiv 2606.19989, group alignment).
    """
    active = [rank for rank, count in enumerate(group_counts) if count > 0]
    if not active:
        return 0
    bounds = [max(group_counts[rank] for rank in active)]
    bounds += [capacities[rank] for rank in active if capacities[rank] > 0]
    bounds += [sample_counts[rank] for rank in active if sample_counts[rank] > 0]
    return max(min(bounds), 1)


def align_groups(groups: Sequence[Sequence[int]], target: int) -> tuple[list[list[int]], list[int]]:
    """Exactly `target` groups, and the positions of the samples that have to wait for a later round.

    Too few groups: the longest sample of the first group with two or more (the one of the longest samples) goes into a
    group of its own, placed before the rest of its group, until there are enough. Too many: the `target` groups with
    most samples stay, in their order (ties: the earlier), and the samples of the others overflow.

    `groups` are as `group_window` gives them, longest first. Raises ValueError if they hold fewer than `target` samples.
    """
    if target < 0:
        raise ValueError(f"target must not be negative, got {target}")
    num_samples = sum(map(len, groups))
    if num_samples < target:
        raise ValueError(f"{num_samples} samples can't be split into {target} groups")
    if len(groups) > target:
        by_size = sorted(range(len(groups)), key=lambda index: (-len(groups[index]), index))
        kept = set(by_size[:target])
        aligned = [list(group) for index, group in enumerate(groups) if index in kept]
        return aligned, [position for index, group in enumerate(groups) if index not in kept for position in group]
    missing = target - len(groups)
    aligned = []
    for group in groups:
        splits = min(missing, len(group) - 1)
        missing -= splits
        aligned += [[position] for position in group[:splits]]
        aligned.append(list(group[splits:]))
    return aligned, []
