"""Fits on four ranks, run by every rank (see ranks.py)."""

from __future__ import annotations

from typing import Any

from tests.multiprocess.fitting import fit
from tests.multiprocess.precision_cases import clipped
from tests.multiprocess.training_cases import Model, Samples, _flat, make_network, pad, reference

# By epoch. Rank 1 has nothing in the first and most in the second; rank 3 has nothing in either, rank 2 is idle at the end.
SHARDS = [[[0, 1, 2, 3, 4], [0, 8]], [[], [1, 2, 10, 12, 3]], [[10, 7, 13], [4, 13]], [[], []]]
ACCUMULATE = {"k=1": 1, "k=3": 3}


def all_cases(strategy: str) -> dict[str, Any]:
    return {name: _exactness(strategy, accumulate) for name, accumulate in ACCUMULATE.items()} | {
        "clipped": clipped(strategy, 4)
    }


def _exactness(strategy: str, accumulate: int) -> dict[str, Any]:
    done = fit(Model(), strategy, SHARDS, Samples(), pad, accumulate=accumulate)
    steps = [[(0, accumulate * number, ids) for number, ids in enumerate(done.windows)]]
    return {
        "error": done.error(reference(steps, accumulate, None), _flat(make_network())),
        "spread": done.spread,
        "is_idle": done.is_idle,
        "trained": sorted(index for window in done.windows for index in window),
        "updates": done.trainer.global_step,
    }
