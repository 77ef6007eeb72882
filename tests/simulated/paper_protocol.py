"""The whole protocol a second time, straight from the paper: plain lists of lengths, nothing of the package in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def padded_tokens(length: int) -> float:
    return length


def naive_groups(
    window: list[int], l_max: int, max_rows: int | None, budget: Callable[[int], float] = padded_tokens
) -> list[list[int]]:
    left, groups, threshold = sorted(window), [], 1
    while left:
        group = [left.pop() for _ in range(min(threshold, len(left)))]
        groups.append(group)
        threshold = max(int(l_max // budget(group[-1])), 1)
        threshold = threshold if max_rows is None else min(threshold, max_rows)
    return groups


def naive_alignment(groups: list[list[int]], target: int) -> list[list[int]]:
    groups = [list(group) for group in groups]
    while len(groups) < target:
        index = min(i for i, group in enumerate(groups) if len(group) >= 2)
        groups.insert(index, [groups[index].pop(0)])
    while len(groups) > target:
        least = min(map(len, groups))
        del groups[max(i for i, group in enumerate(groups) if len(group) == least)]
    return groups


def naive_epoch(
    shards: Sequence[Sequence[int]],
    l_max: int,
    buffer_size: int,
    max_rows: int | None,
    capacities: Sequence[Sequence[int]],
    quota: int | None = None,
    budget: Callable[[int], float] = padded_tokens,
) -> tuple[list[list[list[int]]], list[str]]:
    """`steps[s][r]`, the lengths in rank r's group of step s (empty: idle), and what each round came to. Rank r has
    `capacities[r][n % len]` output slots in round n. With a `quota` non-join: the first rank without views ends the pass on
    all, those that have observed all of theirs begin again, and the step that reaches the quota is the last."""
    views = [list(shard) for shard in shards]
    windows: list[list[int]] = [[] for _ in shards]
    steps: list[list[list[int]]] = []
    rounds: list[str] = []
    while quota is None or sum(len(group) for step in steps for group in step) < quota:
        for rank, window in enumerate(windows):
            while len(window) < buffer_size and views[rank]:
                window.append(views[rank].pop(0))
        slots = [row[len(rounds) % len(row)] for row in capacities]
        unfinished = [rank for rank in range(len(shards)) if views[rank] or windows[rank]]
        if quota is not None and any(shards[rank] and rank not in unfinished for rank in range(len(shards))):
            rounds.append("pass end")
            views = [left or list(shard) for left, shard in zip(views, shards, strict=True)]
            continue
        if not unfinished:
            return steps, [*rounds, "end"]
        if min(slots[rank] for rank in unfinished) == 0:
            rounds.append("skip")
            continue
        formed = {rank: naive_groups(windows[rank], l_max, max_rows, budget) for rank in unfinished}
        target = min(
            max(len(groups) for groups in formed.values()),
            min(slots[rank] for rank in unfinished),
            min(len(windows[rank]) for rank in unfinished),
        )
        aligned = {rank: naive_alignment(groups, target) for rank, groups in formed.items()}
        for groups in aligned.values():
            assert len(groups) == target
        for rank, groups in aligned.items():
            for group in groups:
                for length in group:
                    windows[rank].remove(length)
        for index in range(target):
            if quota is None or sum(len(group) for step in steps for group in step) < quota:
                steps.append([aligned[rank][index] if rank in aligned else [] for rank in range(len(shards))])
        rounds.append("emit")
    return steps, rounds
