"""The figures of a schedule of lengths: how full its batches are, how even its steps, how random its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from odb_lightning.callbacks.figures import RankRecord, percentile, run_figures
from odb_lightning.lengths import Lengths

Schedule = list[list[list[int]]]
"""For each step, for each rank, the lengths in its batch; none where it is idle."""

_OF_A_RUN = ("steps", "idle_steps", "padding", "budget_fill", "lockstep_efficiency", "schedule_efficiency")
_PERCENTS = (5, 25, 50, 75, 95, 99)


def length_figures(lengths: Lengths, l_max: int) -> dict[str, Any]:
    """Their number, mean, variation and percentiles, and the share of them below a quarter of `l_max` (`f_s`)."""
    mean, ascending = float(lengths.mean()), sorted(lengths.tolist())
    return {
        "n": len(lengths),
        "tokens": int(lengths.sum()),
        "mean": mean,
        "cv": float(lengths.std()) / mean if mean else None,
        "f_s": short_share(lengths, l_max),
        "min": ascending[0],
        **{f"p{percent}": percentile(ascending, percent) for percent in _PERCENTS},
        "max": ascending[-1],
    }


def short_share(lengths: Lengths, l_max: int) -> float:
    """f_s, the share of lengths below a quarter of `l_max`."""
    return float((4 * lengths < l_max).mean())


def schedule_figures(schedule: Schedule, world_size: int, l_max: int) -> dict[str, Any]:
    """Those of `summary.json` that lengths determine, on the code that writes it; and how far the order of samples is from a
    shuffle: the correlation of a sample's length with its step, and of the mean lengths of neighbouring steps."""
    records, largest_padded = [RankRecord(steps=len(schedule)) for _ in range(world_size)], []
    for step in schedule:
        padded = [len(batch) * max(batch, default=0) for batch in step]
        largest_padded.append(max(padded))
        for record, batch, tokens_padded in zip(records, step, padded, strict=True):
            record.idle_steps += not batch
            record.samples += len(batch)
            record.tokens_real += sum(batch)
            record.tokens_padded += tokens_padded
    figures = run_figures(records, largest_padded, [], l_max)
    samples = figures["samples_emitted"]
    rank_steps = len(schedule) * world_size
    return {
        **{name: figures[name] for name in _OF_A_RUN},
        "samples": samples,
        "samples_per_step": samples / rank_steps if rank_steps else None,
        **_order_figures(schedule),
    }


def schedule_bound(shards: Sequence[Sequence[int]]) -> float | None:
    """The schedule efficiency that no schedule of these shards passes: the rank with most tokens has to work off its own."""
    tokens = [sum(shard) for shard in shards]
    return sum(tokens) / (len(shards) * max(tokens)) if any(tokens) else None


def _order_figures(schedule: Schedule) -> dict[str, float | None]:
    lengths, at_step, means = list[int](), list[int](), list[float]()
    for number, step in enumerate(schedule):
        of_step = [length for batch in step for length in batch]
        lengths += of_step
        at_step += [number] * len(of_step)
        means.append(sum(of_step) / max(len(of_step), 1))
    return {
        "length_step_correlation": _correlation(lengths, at_step),
        "neighbour_correlation": _correlation(means[:-1], means[1:]),
    }


def _correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """None of fewer than three pairs, and where one of the two does not vary."""
    if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])
