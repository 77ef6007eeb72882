"""Data sets that are read from their beginning: each sample once, whoever reads it, or a refusal that says how to split."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from multiprocessing import get_context
from types import ModuleType
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from odb_lightning import ODBDataLoader, ODBLoaderError, current_shard
from odb_lightning.sharding import check_sharding, is_hugging_face, is_split, split_among_ranks
from tests.loader_data import make_loader, plain_list, raise_in_the_users_code
from tests.loader_processes import no_process_is_left  # noqa: F401  (a fixture)

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("no_process_is_left"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


class Stream(IterableDataset[Any]):
    """`{"input_ids", "id"}` with lengths 1 to 7, endless without a `count`; counts what was read in all processes (fork)."""

    def __init__(self, count: int | None = 40) -> None:
        self.count = count
        self.read = get_context("fork").Value("q", 0)

    def __iter__(self) -> Iterator[Any]:
        for number in itertools.count() if self.count is None else range(self.count):
            with self.read.get_lock():
                self.read.value += 1
            yield {"input_ids": [number] * (number % 7 + 1), "id": number}


class Plain:
    """Iterable, and no more than that."""

    def __iter__(self) -> Iterator[Any]:
        return iter([{"input_ids": [1], "id": number} for number in range(10)])


class Split(Stream):
    """Gives each process its own part."""

    def __iter__(self) -> Iterator[Any]:
        number, total = current_shard()
        return itertools.islice(super().__iter__(), number, None, total)


class Random(Stream):
    """Filters and lengthens its samples at random: dealt out, it has to be the same in all processes."""

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            if random.random() < 0.7:
                yield {**sample, "input_ids": sample["input_ids"] * random.randint(1, 3)}


class Epochs(Stream):
    """Its order depends on the epoch it is told, as that of Hugging Face's does."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield {**sample, "epoch": self.epoch}


def stream_loader(dataset: Any, **options: Any) -> ODBDataLoader:
    return make_loader(dataset, **({"collate_fn": plain_list, "num_supervised_fn": len, "buffer_size": 16} | options))


def epoch_ids(loader: ODBDataLoader) -> list[int]:
    return [sample["id"] for batch in loader for sample in batch.data]


@pytest.mark.parametrize("persistent_workers", [True, False])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Stream(), {}),
        (Stream(), {"num_workers": 0}),
        (Stream(), {"num_workers": 3, "sharding": "loader"}),
        (Split(), {"num_workers": 3, "sharding": "dataset"}),
        (Split(), {"num_workers": 0, "sharding": "dataset"}),
    ],
)
def test_each_sample_once_in_each_epoch(dataset: Any, options: dict[str, Any], persistent_workers: bool) -> None:
    with stream_loader(dataset, persistent_workers=persistent_workers, **options) as loader:
        for epoch in range(1, 3):
            batches = list(loader)
            assert sorted(sample["id"] for batch in batches for sample in batch.data) == list(range(40))
            assert len({sample_id for batch in batches for sample_id in batch.step.sample_ids}) == 40
            assert loader.stats.views_expected == 40 * epoch


def test_anything_that_can_be_iterated_anew_will_do() -> None:
    with stream_loader(Plain()) as loader:
        assert [sorted(epoch_ids(loader)) for _ in range(2)] == [list(range(10))] * 2


@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_random_stream_is_dealt_without_loss_or_repetition(num_workers: int) -> None:
    """And is the same one as in a single process, epoch by epoch."""
    with (
        stream_loader(Random(200), num_workers=num_workers, sharding="loader") as dealt,
        stream_loader(Random(200), num_workers=1) as whole,
    ):
        epochs = [(sorted(epoch_ids(dealt)), sorted(epoch_ids(whole))) for _ in range(2)]
    for ours, theirs in epochs:
        assert ours == theirs
        assert 100 < len(ours) == len(set(ours)) < 180
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_the_same_number_of_workers_gives_the_same_batches(num_workers: int) -> None:
    def batches() -> list[Any]:
        with stream_loader(Random(90), num_workers=num_workers, sharding="loader") as loader:
            return [(batch.step.sample_ids, batch.data) for _ in range(2) for batch in loader]

    assert batches() == batches()


def test_the_look_ahead_of_an_endless_stream_is_bounded() -> None:
    """C07"""
    dataset = Stream(None)
    loader = stream_loader(dataset, buffer_size=64, num_workers=2, sharding="loader", l_max=20)
    iteration = iter(loader)
    for _ in range(40):
        next(iteration)
        emitted = loader.stats.length_count
        # Each of the two workers reads all of the stream, and keeps half.
        assert dataset.read.value <= 2 * (emitted + loader.stats.outstanding_depth)
    assert loader.stats.outstanding_depth <= 64 + 64
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_data_set_is_told_the_epoch(num_workers: int) -> None:
    with stream_loader(Epochs(), num_workers=num_workers, sharding="loader") as loader:
        loader.set_epoch(3)
        for epoch in (3, 4):
            assert {sample["epoch"] for batch in loader for sample in batch.data} == {epoch}


class TestRefusals:
    def test_several_readers_of_a_stream_that_nobody_splits(self) -> None:
        with pytest.raises(ValueError, match=r'3 processes .*num_workers=3.* would each read the whole Stream.*sharding="load'):
            stream_loader(Stream(), num_workers=3)
        with pytest.raises(ValueError, match=r"2 processes \(world_size=2, num_workers=1\)"):
            stream_loader(Stream(), rank=0, world_size=2)
        with pytest.raises(ValueError, match=r"2 processes \(world_size=2, num_workers=0\)"):
            check_sharding(Stream(), "auto", 0, 2)

    def test_what_has_no_meaning_for_a_stream(self) -> None:
        with pytest.raises(ValueError, match="sampler can't be used with an iterable"):
            stream_loader(Stream(), sampler=[1, 2])
        with pytest.raises(ValueError, match="needs quota=<samples"):
            stream_loader(Stream(), mode="non_join")
        with pytest.warns(UserWarning, match="sharding='loader' is ignored: the data set is not iterable"):
            stream_loader([{"input_ids": [1]}], sharding="loader")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_the_iteration_is_told_with_its_position(num_workers: int) -> None:
    class Fails(Stream):
        def __iter__(self) -> Iterator[Any]:
            yield from itertools.islice(super().__iter__(), 37)
            raise_in_the_users_code(37)

    with pytest.raises(
        ODBLoaderError, match=r"the iteration of the data set, at sample 37 \(shard 0 of 1\): .*bad sample 37"
    ) as told:
        epoch_ids(stream_loader(Fails(), num_workers=num_workers))
    assert "raise UserError(" in str(told.value)
    with pytest.raises(ODBLoaderError, match=r"length_fn for dataset\[0\]"):
        epoch_ids(stream_loader(Stream(), num_workers=num_workers, length_fn=lambda sample: None))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_that_cant_begin_has_failed_and_is_not_at_its_end(num_workers: int) -> None:
    class Stops(Stream):
        def __iter__(self) -> Iterator[Any]:
            return iter([next(iter(()))])  # a StopIteration: there is no first file, say

    with pytest.raises(
        ODBLoaderError,
        match=r"at sample 0 \(shard 0 of 1\): RuntimeError: the data set's set_epoch or __iter__ raised StopIteration",
    ):
        epoch_ids(stream_loader(Stops(), num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_non_join_begins_a_stream_anew_until_the_quota(num_workers: int) -> None:
    options = {"mode": "non_join", "quota": 100, "num_workers": num_workers, "sharding": "loader"}
    with stream_loader(Stream(), **options) as loader:
        ids = epoch_ids(loader)
        assert 100 <= len(ids) < 100 + 16
        assert set(ids[:40]) == set(range(40))
        assert loader.stats.passes == 3
    with stream_loader(Stream(None), **options) as loader:
        ids = epoch_ids(loader)
        assert len(ids) == len(set(ids)) >= 100


class TestHuggingFace:
    """Its iterable sets split themselves among workers, and are split among ranks by the loader."""

    def dataset(self, num_shards: int = 4) -> Any:
        datasets = pytest.importorskip("datasets")
        rows = [{"input_ids": [1] * (number % 5 + 1), "id": number} for number in range(40)]
        return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=num_shards)

    @pytest.mark.parametrize("num_workers", [0, 1, 3])
    def test_each_sample_once_over_workers(self, num_workers: int) -> None:
        with stream_loader(self.dataset(), num_workers=num_workers) as loader:
            for _ in range(6):
                assert sorted(epoch_ids(loader)) == list(range(40))

    @pytest.mark.parametrize("num_shards", [1, 2, 4])
    def test_ranks_have_parts_that_make_up_the_whole(self, num_shards: int) -> None:
        parts = [split_among_ranks(self.dataset(num_shards), "auto", rank, 2) for rank in range(2)]
        assert sorted(sample["id"] for part in parts for sample in part) == list(range(40))
        assert all(len(list(part)) == 20 for part in parts)

    def test_what_the_user_has_split_is_not_split_again(self) -> None:
        from datasets.distributed import split_dataset_by_node

        part = split_dataset_by_node(self.dataset(), rank=1, world_size=2)
        assert is_split(part), "the private attribute that tells is still there"
        assert not is_split(self.dataset())
        assert split_among_ranks(part, "auto", 1, 2) is part
        assert split_among_ranks(self.dataset(), "dataset", 1, 2).num_shards == 4

    def test_its_shuffling_follows_the_epoch(self) -> None:
        with stream_loader(self.dataset().shuffle(seed=3, buffer_size=40), shuffle=False, l_max=5, max_rows=1) as loader:
            first, second = epoch_ids(loader), epoch_ids(loader)
        assert first != second
        assert sorted(first) == sorted(second) == list(range(40))


class TestAPackageOfTheUsersOwnNamedDatasets:
    """Which a project may well have: nothing in it is taken for Hugging Face's."""

    @pytest.fixture(params=["nothing", "torch's", "its own", "a function"])
    def dataset(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
        package = ModuleType("datasets")
        kinds: dict[str, Any] = {"torch's": IterableDataset, "its own": Stream, "a function": lambda: Stream()}
        if request.param in kinds:
            package.IterableDataset = kinds[request.param]  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", package)
        return Epochs()

    def test_it_is_not_taken_to_split_itself(self, dataset: Any) -> None:
        assert not is_hugging_face(dataset)
        assert split_among_ranks(dataset, "auto", 1, 2) is dataset
        with pytest.raises(ValueError, match=r"2 processes .* would each read the whole Epochs"):
            stream_loader(dataset, num_workers=2)

    def test_its_samples_come_once_and_it_is_told_the_epoch(self, dataset: Any) -> None:
        with stream_loader(dataset) as loader:
            loader.set_epoch(3)
            samples = [sample for batch in loader for sample in batch.data]
        assert sorted(sample["id"] for sample in samples) == list(range(40))
        assert {sample["epoch"] for sample in samples} == {3}


def test_outside_of_a_loader_there_is_one_shard() -> None:
    assert tuple(current_shard()) == (0, 1)
    assert get_worker_info() is None
