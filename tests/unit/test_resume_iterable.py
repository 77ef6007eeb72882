"""An iterable data set is gone on with from where its readers were, or is read again if it can't say, and was told to be."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch

from odb_lightning import ODBDataLoader, current_shard

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:This DataLoader will create")]


class Stream(torch.utils.data.IterableDataset[Any]):
    """Split by the loader, or by itself into shards of very different lengths. Random, and different in each epoch."""

    def __init__(self, splits_itself: bool, size: int = 120) -> None:
        self.splits_itself = splits_itself
        self.size = size
        self.epoch = self.first = self.position = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        number = current_shard().number if self.splits_itself else 0
        first, self.first = self.first, 0
        for position in range(first, self.size // (1 + number)):
            self.position = position + 1
            length = 1 + (37 * position + 11 * number + self.epoch) % 50
            yield {"input_ids": torch.full((length,), position), "draw": random.random(), "first": first}


class StatefulStream(Stream):
    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = self.position = state["position"]


def collate(samples: list[Any]) -> Any:
    return {"draws": [sample["draw"] for sample in samples], "more": random.random(), "first": [s["first"] for s in samples]}


def loader_of(dataset: Stream, num_workers: int, **options: Any) -> ODBDataLoader:
    defaults = {"l_max": 100, "buffer_size": 16, "collate_fn": collate, "num_supervised_fn": _none, "accumulate": 2}
    sharding = "dataset" if dataset.splits_itself else "loader"
    return ODBDataLoader(dataset, num_workers=num_workers, sharding=sharding, **(defaults | options))


def _none(_: Any) -> int:
    return 1


def batches(loader: ODBDataLoader) -> list[Any]:
    return [(batch.step.epoch, batch.step.sample_ids, batch.data["draws"], batch.data["more"]) for batch in loader]


def states_of(loader: ODBDataLoader) -> tuple[list[Any], list[dict[str, Any]]]:
    found, states = [], []
    for batch in loader:
        found.append((batch.step.epoch, batch.step.sample_ids, batch.data["draws"], batch.data["more"]))
        states.append(json.loads(json.dumps(loader.state_dict())))
    return found, states


@pytest.mark.parametrize(("splits_itself", "num_workers"), [(False, 0), (False, 2), (True, 3)])
@pytest.mark.parametrize("kind", [Stream, StatefulStream])
@pytest.mark.filterwarnings("ignore:the iterable data set is read again")
def test_the_batches_that_follow_are_those_of_a_run_that_was_not_stopped(
    kind: type[Stream], splits_itself: bool, num_workers: int
) -> None:
    skips = kind is Stream
    with loader_of(kind(splits_itself), num_workers, skip_ahead=skips) as loader:
        whole, states = states_of(loader)
        following = batches(loader)
    for stop in range(3, len(states), len(states) // 4):
        with loader_of(kind(splits_itself), num_workers, skip_ahead=skips) as loader:
            loader.load_state_dict(states[stop])
            rest, again = states_of(loader)
            assert rest == whole[states[stop]["step"] :]
            assert batches(loader) == following
        with loader_of(kind(splits_itself), num_workers, skip_ahead=skips) as loader:  # a second stop in the same epoch
            loader.load_state_dict(again[len(again) // 2])
            assert batches(loader) == whole[again[len(again) // 2]["step"] :]


def test_one_with_a_state_is_not_read_from_its_beginning() -> None:
    with loader_of(StatefulStream(False, 1000), 1) as loader:
        _, states = states_of(loader)
    with loader_of(StatefulStream(False, 1000), 1) as loader:
        loader.load_state_dict(states[-20])
        firsts = [first for batch in loader for first in batch.data["first"]]
    assert firsts and min(firsts) > 800


def test_one_without_a_state_is_refused_with_advice() -> None:
    with loader_of(Stream(False), 0) as loader:
        _, states = states_of(loader)
        loader.load_state_dict(states[-1])  # the epoch's end
        with pytest.raises(
            ValueError, match=r"has no state of its own, or.*state_dict\(\) and load_state_dict\(\).*skip_ahead=True"
        ):
            loader.load_state_dict(states[4])


def test_to_read_it_again_warns_of_what_it_costs() -> None:
    with loader_of(Stream(False), 0, skip_ahead=True) as loader:
        _, states = states_of(loader)
        with pytest.warns(UserWarning, match=r"read again from its beginning: the first \d+ samples of rank 0"):
            loader.load_state_dict(states[4])


@pytest.mark.parametrize(
    ("change", "name"), [({"num_workers": 1}, "num_workers"), ({"buffer_size": 8}, "chunk_size"), ({"l_max": 90}, "l_max")]
)
def test_what_decides_its_order_must_not_change(change: dict[str, Any], name: str) -> None:
    with loader_of(StatefulStream(False), 2) as loader:
        _, states = states_of(loader)
    with (
        loader_of(StatefulStream(False), **({"num_workers": 2} | change)) as loader,
        pytest.raises(ValueError, match=rf"{name} was"),
    ):
        loader.load_state_dict(states[4])


def test_one_that_is_shorter_than_it_was_is_told() -> None:
    with loader_of(StatefulStream(False), 0) as loader:
        _, states = states_of(loader)
    with loader_of(StatefulStream(False, 20), 0) as loader:
        loader.load_state_dict(states[-9])
        with pytest.raises(RuntimeError, match="ended before the place where the epoch is to be resumed"):
            batches(loader)


def test_in_non_join_it_has_no_state() -> None:
    with loader_of(StatefulStream(False), 0, mode="non_join", quota=40) as loader:
        next(iter(loader))
        with pytest.raises(NotImplementedError, match="non_join has no state"):
            loader.state_dict()


def hugging_face(shuffles: bool) -> Any:
    def samples() -> Iterator[Any]:
        for index in range(120):
            yield {"input_ids": [index] * (1 + 37 * index % 50)}

    dataset = datasets.IterableDataset.from_generator(samples)
    return dataset.shuffle(seed=3, buffer_size=20) if shuffles else dataset


def ids_of(batch: Any) -> list[int]:
    return [sample["input_ids"][0] for sample in batch.data]


def loader_of_hugging_face(shuffles: bool, **options: Any) -> ODBDataLoader:
    return ODBDataLoader(
        hugging_face(shuffles), l_max=100, buffer_size=16, collate_fn=list, num_supervised_fn=len, num_workers=0, **options
    )


def test_a_hugging_face_data_set_goes_on_and_one_that_shuffles_in_a_buffer_is_refused() -> None:
    """The samples in that buffer are in no state: those would be lost, and others read twice."""
    for shuffles in (False, True):
        with loader_of_hugging_face(shuffles) as loader:
            whole, states = [], []
            for batch in loader:
                whole.append(ids_of(batch))
                states.append(json.loads(json.dumps(loader.state_dict())))
        assert sorted(index for ids in whole for index in ids) == list(range(120))
        if not shuffles:
            with loader_of_hugging_face(shuffles) as loader:
                loader.load_state_dict(states[9])
                assert [ids_of(batch) for batch in loader] == whole[10:]
            continue
        with loader_of_hugging_face(shuffles) as loader, pytest.raises(ValueError, match="shuffles in a buffer"):
            loader.load_state_dict(states[9])
        with loader_of_hugging_face(shuffles, skip_ahead=True) as loader:
            with pytest.warns(UserWarning, match="read again from its beginning"):
                loader.load_state_dict(states[9])
            assert [ids_of(batch) for batch in loader] == whole[10:]
