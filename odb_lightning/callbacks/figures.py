"""The figures of a run as pure functions of what its ranks counted (definitions: docs of `summary.json` in the README)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

METRICS = (
    "val_loss",
    "val_loss_before",
    "train_loss",
    "padding",
    "budget_fill",
    "lockstep_efficiency",
    "schedule_efficiency",
    "samples_per_second",
    "tokens_per_second",
    "loader_wait_share",
    "distinct_shapes",
    "peak_memory_bytes",
    "steps",
    "updates",
    "idle_steps",
    "identities_missing",
    "identities_repeated",
)
"""Fields of a summary that a sweep can optimise."""


@dataclass
class RankRecord:
    """What one rank counted in a run. Steps count idle ones; tokens and samples are those of emitted batches."""

    steps: int = 0
    idle_steps: int = 0
    samples: int = 0
    samples_expected: int = 0
    """Views that the sampler gave this rank in the epochs begun."""
    tokens_real: int = 0
    tokens_padded: int = 0
    tokens_supervised: float = 0
    shapes: set[tuple[int, int]] = field(default_factory=set)
    """(samples, longest) of each batch."""
    train_seconds: float = 0.0
    """From the first request for a batch to the last step, validation left out."""
    wait_seconds: float = 0.0
    rounds: int = 0
    exchange_seconds: float = 0.0
    outstanding_depth: int = 0
    over_budget: int = 0
    batches_without_targets: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    lengths: int = 0
    """How many samples the three sums below are over."""
    length_sum: float = 0
    length_sum_squares: float = 0
    length_short: int = 0
    """Samples shorter than a quarter of l_max."""
    loss_sum: float = 0.0
    """Of the last epoch: the mean loss of each batch times its supervised tokens."""
    loss_weight: float = 0.0
    peak_memory_bytes: int = 0
    optimizer_state_elements: int = 0


def run_figures(
    records: Sequence[RankRecord], largest_padded: Sequence[int], step_seconds: Sequence[float], l_max: int | None
) -> dict[str, Any]:
    """The figures of a run over all ranks. `largest_padded` and `step_seconds` hold, for each step, the largest of any rank."""
    ranks, steps = len(records), max((record.steps for record in records), default=0)
    real, padded = _sum(records, "tokens_real"), _sum(records, "tokens_padded")
    lockstep_room = ranks * sum(largest_padded)
    seconds = max((record.train_seconds for record in records), default=0.0)
    samples = _sum(records, "samples")
    dropped: Counter[str] = Counter()
    for record in records:
        dropped.update(record.dropped)
    return {
        "steps": steps,
        "idle_steps": _sum(records, "idle_steps"),
        "rounds": _max(records, "rounds"),
        "exchange_seconds": _max(records, "exchange_seconds"),
        "outstanding_depth": _max(records, "outstanding_depth"),
        "samples_emitted": samples,
        "samples_expected": _sum(records, "samples_expected"),
        "dropped": dict(dropped),
        "over_budget": _sum(records, "over_budget"),
        "batches_without_targets": _sum(records, "batches_without_targets"),
        "tokens_real": real,
        "tokens_padded": padded,
        "tokens_supervised": _sum(records, "tokens_supervised"),
        "padding": _share(padded - real, padded),
        "budget_fill": _share(real, steps * ranks * l_max) if l_max else None,
        "lockstep_efficiency": _share(padded, lockstep_room),
        "schedule_efficiency": _share(real, lockstep_room),
        "samples_per_second": _share(samples, seconds),
        "tokens_per_second": _share(real, seconds),
        "loader_wait_share": _share(_sum(records, "wait_seconds"), _sum(records, "train_seconds")),
        "step_seconds": {f"p{percent}": percentile(step_seconds, percent) for percent in (50, 90, 99)},
        "distinct_shapes": len(set().union(*(record.shapes for record in records))),
        "peak_memory_bytes": _max(records, "peak_memory_bytes"),
        "optimizer_state_elements": _max(records, "optimizer_state_elements"),
        "length_cv": _coefficient_of_variation(records),
        "length_short_share": _share(_sum(records, "length_short"), _sum(records, "lengths")),
        "train_loss": _share(_sum(records, "loss_sum"), _sum(records, "loss_weight")),
        "train_seconds": seconds,
    }


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest of `values` that at least `percent` per cent of them do not exceed; None of nothing."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(percent / 100 * len(values)), 1) - 1]


def _coefficient_of_variation(records: Sequence[RankRecord]) -> float | None:
    count, total = _sum(records, "lengths"), _sum(records, "length_sum")
    if not count or not total:
        return None
    mean = total / count
    return float(math.sqrt(max(_sum(records, "length_sum_squares") / count - mean * mean, 0.0)) / mean)


def _sum(records: Sequence[RankRecord], name: str) -> Any:
    return sum(getattr(record, name) for record in records)


def _max(records: Sequence[RankRecord], name: str) -> Any:
    return max((getattr(record, name) for record in records), default=0)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
