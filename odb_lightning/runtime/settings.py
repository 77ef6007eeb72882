"""What the processes of a loader are told: once when they start, and at the beginning of each epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

from odb_lightning.plan.costs import RowCost, RowLimits, describe_cost
from odb_lightning.plan.rounds import Alignment
from odb_lightning.runtime.round_state import RoundState

HELPER_PROCESS_NAME = "odb-collate"
HELPER_VARIABLE = "ODB_HELPER_PROCESS"
"""Set in the environment of a collate process and of its workers."""

Policy = Literal["emit", "drop", "error"]
Mode = Literal["join", "non_join"]
Sharding = Literal["auto", "loader", "dataset"]


@dataclass(frozen=True)
class Timeouts:
    """Limits in seconds on every wait of a loader. What is slow but gets on is waited for: `exchange` and `batch` begin anew
    with each sign of progress. A rank that is dead closes its connections and is noticed at once, whatever these say."""

    setup: float = 300.0
    """For the ranks' collate processes to meet."""
    exchange: float = 1800.0
    """For the slowest rank to get on (samples brought, steps collated, its own training process waited for) on its way to the
    next exchange."""
    peer: float = 120.0
    """For a rank to give a sign of life, in case that its machine or connection is gone without a word."""
    worker: float = 1800.0
    """For a worker to bring its next samples."""
    batch: float = 3600.0
    """For the collate process, or a peer it waits for, to get on while the training process waits for a batch."""
    stop: float = 15.0
    """For the processes to end by themselves before they are killed."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            if getattr(self, item.name) <= 0:
                raise ValueError(f"Timeouts.{item.name} must be positive, got {getattr(self, item.name)}")


@dataclass(frozen=True)
class LoaderSettings:
    """Fixed for the life of the processes. Has to be picklable under spawn and forkserver."""

    dataset: Any
    collate_fn: Callable[[list[Any]], Any]
    length_fn: Callable[[Any], int]
    num_supervised_fn: Any
    worker_init_fn: Callable[[int], None] | None
    l_max: int
    buffer_size: int
    max_rows: int | None
    alignment: Alignment
    budget: RowCost
    cost: RowCost | None
    patches_fn: Callable[[Any], int] | None
    max_patches: int | None
    oversize: Policy
    empty: Policy
    mode: Mode
    quota: int | None
    """Samples of an epoch over all ranks, in non-join; None: as many as there are views."""
    sharding: Sharding
    shuffle: bool
    seed: int
    num_workers: int
    prefetch_factor: int | None
    chunk_size: int
    persistent_workers: bool
    start_method: str | None
    timeouts: Timeouts
    rank: int
    world_size: int

    @property
    def outstanding_depth(self) -> int:
        """Samples between the sampler and the groups at most: in the window, and in the workers and their messages."""
        return self.buffer_size + self.chunk_size * max(self.num_workers * (self.prefetch_factor or 0), 1)

    def limits(self) -> RowLimits:
        """How many rows a batch may have, and what they cost."""
        return RowLimits(self.l_max, self.max_rows, self.budget, self.cost)

    def shared_knobs(self) -> dict[str, Any]:
        """What has to be the same on all ranks."""
        names = (
            "l_max",
            "buffer_size",
            "max_rows",
            "alignment",
            "max_patches",
            "oversize",
            "empty",
            "mode",
            "quota",
            "shuffle",
        )
        knobs = {name: getattr(self, name) for name in (*names, "seed", "world_size")}
        costs = {"budget": self.budget, "cost": self.cost or self.budget}
        return knobs | {name: describe_cost(cost, self.l_max) for name, cost in costs.items()}


@dataclass(frozen=True)
class StoreAddress:
    """Where ranks meet: host and port of a torch TCPStore, or the path of a FileStore, and a prefix of this iteration's own."""

    prefix: str
    host: str | None = None
    port: int | None = None
    path: str | None = None


@dataclass(frozen=True)
class EpochRequest:
    """One iteration over this rank's views."""

    epoch: int
    views: Any
    """Sample ids in the order of the sampler: an array of integers, or a list; None for an iterable data set."""
    reshuffles: bool
    """Whether a further pass of non-join has another order."""
    accumulate: int
    max_steps: int | None
    store: StoreAddress | None
    """None for a single rank."""
    before: StoreAddress | None
    """The meeting point of the epoch before."""
    data_knobs: dict[str, Any]
    """What has to be the same on all ranks, beside the loader's options."""
    first_step: int = 0
    """Steps of the epoch that were trained before, in another run; a whole number of windows."""
    first_samples: int = 0
    """Samples trained in them, over all ranks."""
    resume: RoundState | None = None
    """Where this rank goes on; None at the beginning of `views`."""


@dataclass
class LoaderStats:
    """Counts over a loader's life, this rank's own."""

    rounds: int = 0
    exchange_seconds: float = 0.0
    """Time in exchanges with other ranks, most of it waiting for the slowest."""
    wait_seconds: float = 0.0
    """Time the training process waited for a batch."""
    passes: int = 0
    """How often the shards were begun: in non-join, more than once in an epoch."""
    views_expected: int = 0
    """Views that the sampler gave for the epochs begun; of an iterable data set, those that it brought."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Samples left out by a policy, by reason: "empty", "oversize"."""
    dropped_ids: list[Hashable] = field(default_factory=list)
    resumed_ids: list[Hashable] = field(default_factory=list)
    """Samples that were done with (trained or left out) before an epoch was resumed; not expected any more."""
    over_budget: int = 0
    """Samples longer than l_max, emitted alone."""
    batches_without_targets: int = 0
    """They add nothing to the loss."""
    outstanding_depth: int = 0
    """Samples that this rank may hold between the sampler and the training step (see `ODBDataLoader`)."""
    length_count: int = 0
    length_sum: int = 0
    length_sum_squares: int = 0
    length_short: int = 0
    """Observed lengths: how many, their sum, the sum of their squares, and how many are below l_max / 4."""

    def add(self, other: LoaderStats) -> None:
        """Adds the counts of `other`; depth is the larger."""
        for item in dataclasses.fields(self):
            mine, more = getattr(self, item.name), getattr(other, item.name)
            if item.name == "dropped":
                for reason, count in more.items():
                    mine[reason] = mine.get(reason, 0) + count
            elif item.name == "outstanding_depth":
                self.outstanding_depth = max(mine, more)
            else:
                setattr(self, item.name, mine + more)
