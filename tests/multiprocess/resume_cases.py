"""What the ranks of tests/multiprocess/test_loader_resume.py do. States travel from one run to the next in files of torch's."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from odb_lightning import ODBBatch, ODBDataLoader
from tests.loader_data import Augmented, collate_augmented, lognormal_lengths
from tests.multiprocess.loader_cases import TIMEOUTS, _error_of

NUMBER = 64
LENGTHS = lognormal_lengths(NUMBER, seed=5, longest=45)

UNEQUAL = (range(26), range(26, 30), range(0), range(30, 42))
"""Shards of four ranks."""

FORMS: dict[str, dict[str, Any]] = {
    "default": {"num_workers": 2},
    "unequal": {"own_shards": True, "accumulate": 3, "num_workers": 1},
    "paper": {"own_shards": True, "alignment": "paper"},
    "non_join": {"own_shards": True, "mode": "non_join", "quota": 120, "accumulate": 2},
    "no quota": {"mode": "non_join"},
    "ended": {"attached": 7, "accumulate": 3},
    "dealt": {"dealt": True, "alignment": "paper", "accumulate": 2},
    "drops": {"oversize": "drop", "l_max": 20},
}


class Fetched(Augmented):
    """Counts the calls of `__getitem__` for each sample, in all processes of this rank."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.counts = get_context("fork").Array("q", len(self.lengths))

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self.counts.get_lock():
            self.counts[index] += 1
        return super().__getitem__(index)

    def take(self) -> dict[int, int]:
        """The counts since the last call, of those that are not zero."""
        found = {index: count for index, count in enumerate(self.counts) if count}
        self.counts[:] = [0] * len(self.lengths)
        return found


class RandomOrder:
    """Draws an order of its own, which the loader seeds."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(NUMBER))
        random.shuffle(order)
        return iter(order)


def loader_of(
    form: str, rank: int, world_size: int, dataset: Any = None, *, is_explicit: bool = False, **changed: Any
) -> ODBDataLoader:
    options = {"l_max": 90, "buffer_size": 12, "num_workers": 0} | FORMS[form] | changed
    attached = options.pop("attached", None)
    if options.pop("own_shards", False):
        options["sampler"] = list(UNEQUAL[rank])
    if options.pop("dealt", False):
        options |= {"sampler": RandomOrder(), "deal_sampler": True}
    if is_explicit:
        options |= {"rank": rank, "world_size": world_size}
    loader = ODBDataLoader(
        Fetched(LENGTHS) if dataset is None else dataset,
        collate_fn=collate_augmented,
        multiprocessing_context="fork",
        timeouts=TIMEOUTS,
        **options,
    )
    if attached is not None:
        loader.attach(rank=rank, world_size=world_size, accumulate=options["accumulate"], max_steps=attached)
    return loader


def facts(batch: ODBBatch) -> dict[str, Any]:
    """All that there is to a batch; of a stand-in nothing, as it may be another one after a resume."""
    found = dataclasses.asdict(batch.step) | {"sample_ids": list(batch.step.sample_ids)}
    if not batch.step.is_idle:
        found["data"] = [value.tolist() if torch.is_tensor(value) else value for value in batch.data.values()]
    return found


def file_of(folder: str, form: str, world_size: int, rank: int) -> Path:
    return Path(folder) / f"{form}, rank {rank} of {world_size}.pt"


def states_of(folder: str, form: str, world_size: int, rank: int) -> list[dict[str, Any]]:
    """A rank's states after each step of the uninterrupted epoch."""
    states: list[dict[str, Any]] = torch.load(file_of(folder, form, world_size, rank), weights_only=True)
    return states


def _begin() -> tuple[int, int]:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def run_whole(states_in: str, forms: list[str]) -> dict[str, Any]:
    """Two epochs of each form; leaves the states of the first one in files."""
    rank, world_size = _begin()
    results = {}
    for form in forms:
        with loader_of(form, rank, world_size) as loader:
            first, states = [], []
            for batch in loader:
                first.append(facts(batch))
                states.append(batch.step.state_dict())
            results[form] = {"first": first, "second": [facts(batch) for batch in loader]}
        torch.save(states, file_of(states_in, form, world_size, rank))
    return results


def go_on(states_in: str, forms: dict[str, list[int]]) -> dict[str, Any]:
    """The rest of the epoch after each of these steps, the states in it, and, after the last of them, the next epoch."""
    rank, world_size = _begin()
    results: dict[str, Any] = {}
    for form, stops in forms.items():
        states, dataset = states_of(states_in, form, world_size, rank), Fetched(LENGTHS)
        rests = []
        with loader_of(form, rank, world_size, dataset) as loader:
            for stop in stops:
                expected, resumed = loader.stats.views_expected, len(loader.stats.resumed_ids)
                loader.load_state_dict(states[stop])
                rest, states_again = [], []
                for batch in loader:
                    rest.append(facts(batch))
                    states_again.append(loader.state_dict())
                stats = loader.stats
                rests.append(
                    {
                        "rest": rest,
                        "states": states_again == states[len(states) - len(rest) :],
                        "fetched": sorted(dataset.take().items()),
                        "expected": stats.views_expected - expected,
                        "resumed": stats.resumed_ids[resumed:],
                    }
                )
            following = [facts(batch) for batch in loader]
        results[form] = {"stops": rests, "second": following}
    return results


def go_on_elsewhere(states_in: str, before: int, cases: list[list[Any]]) -> list[Any]:
    """For each `[form, stop, count, changed options]` the rest of an epoch of `before` ranks, after `stop`; of one that is
    interrupted after `count` steps, what was to follow is left in files, too."""
    rank, world_size = _begin()
    results = []
    for form, stop, count, changed in cases:
        states = [states_of(states_in, form, before, other)[stop] for other in range(before)]
        dataset = Fetched(LENGTHS)
        with loader_of(form, rank, world_size, dataset, **changed) as loader:
            loader.load_state_dict(states)
            rest, states_again = [], []
            for batch in loader:
                rest.append(facts(batch))
                states_again.append(batch.step.state_dict())
            fetched = dataset.take()
            stats = loader.stats
            if count is not None:
                torch.save(states_again, file_of(states_in, form, world_size, rank))
                loader.load_state_dict(states_again[count - 1])
                assert [facts(batch) for batch in loader] == rest[count:], "interrupted in the rest"
        results.append(
            {
                "rest": rest,
                "fetched": sorted(fetched.items()),
                "expected": stats.views_expected,
                "resumed": sorted(set(stats.resumed_ids)),
            }
        )
    return results


def disagree(states_in: str, cases: list[str]) -> dict[str, Any]:
    """How an epoch ends whose ranks go on from different places."""
    rank, world_size = _begin()
    results = {}
    for case in cases:
        form, dataset = "unequal" if case == "beginning" else "default", Fetched(LENGTHS)
        states = [states_of(states_in, form, world_size, other) for other in range(world_size)]
        own, changed = states[rank][0 if case == "beginning" else 3], dict[str, Any]()
        if rank == 1:
            if case == "moment":
                own = states[1][6]
            elif case == "rank":
                own = states[0][3]
            elif case == "length":
                place = own["round"]["places"][0]
                with loader_of("default", rank, world_size) as other:
                    dataset.lengths[int(other._views(rank, world_size)[place])] += 20
            elif case == "options":
                changed = {"l_max": 80}
        loader = loader_of(form, rank, world_size, dataset, **changed)
        if case not in ("nothing", "beginning") or rank == 0:
            loader.load_state_dict(own)
        if case == "epoch" and rank == 1:
            loader.set_epoch(1)
        results[case] = _error_of(loader)
        loader.close()
        dist.barrier()
    with loader_of("default", rank, world_size) as loader:
        loader.load_state_dict(states_of(states_in, "default", world_size, rank)[3])
        results["after"] = [facts(batch) for batch in loader]
    return results
