"""What a loader is given is checked before anything starts."""

from __future__ import annotations

import copy
import pickle
import threading
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
)

from odb_lightning import ODBDataLoader, Timeouts
from odb_lightning.loader_options import length_of_input_ids
from tests.loader_data import Lengths, collate

DATA = Lengths([3, 5, 2, 4])


def views(loader: ODBDataLoader, rank: int = 0, world_size: int = 1) -> list[Any]:
    return list(loader._views(rank, world_size))


@pytest.mark.parametrize("value", [0, -1, 2.5, "8", True, None])
@pytest.mark.parametrize("name", ["l_max", "buffer_size"])
def test_a_budget_or_window_below_one_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        ODBDataLoader(DATA, **({"l_max": 8} | {name: value}))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_rows": 0}, "max_rows must be a whole number of at least 1, got 0"),
        ({"accumulate": 0}, "accumulate must be"),
        ({"prefetch_factor": 0}, "prefetch_factor must be"),
        ({"num_workers": -1}, "num_workers must be 0 or more, got -1"),
        ({"num_workers": 1.5}, "num_workers must be"),
        ({"mode": "loop"}, "mode='loop' is unknown: choose 'join'"),
        ({"alignment": "none"}, "alignment='none' is unknown: choose 'matched' or 'paper'"),
        ({"oversize": "truncate"}, "oversize='truncate' is unknown: choose 'emit' or 'drop' or 'error'"),
        ({"empty": "emit"}, "empty='emit' is unknown: choose 'drop' or 'error'"),
        ({"num_supervised_fn": "masked"}, "num_supervised_fn='masked' is unknown"),
        ({"multiprocessing_context": "thread"}, "multiprocessing_context='thread' is unknown"),
        ({"rank": 0}, "both rank and world_size"),
        ({"world_size": 2}, "both rank and world_size"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to world_size - 1 = 1, got 2"),
        ({"deal_sampler": True}, "deal_sampler=True needs a sampler"),
    ],
)
def test_bad_options_are_refused_with_their_name_and_value(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ODBDataLoader(DATA, l_max=8, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"collate_fn": 3}, "collate_fn has to be a function, got 3"),
        ({"length_fn": "input_ids"}, "length_fn has to be a function, got 'input_ids'"),
        ({"worker_init_fn": [print]}, "worker_init_fn has to be a function, got "),
        ({"timeouts": 30}, r"timeouts has to be an odb_lightning\.Timeouts, got 30"),
        ({"seed": "1"}, "seed has to be a whole number, got '1'"),
        ({"seed": None}, "seed has to be a whole number, got None"),
        ({"seed": True}, "seed has to be a whole number, got True"),
        ({"seed": 1.0}, r"seed has to be a whole number, got 1\.0"),
        ({"sampler": 3}, "sampler has to be iterable, got 3"),
        ({"multiprocessing_context": 5}, "multiprocessing_context has to be a start method or a context .*, got 5"),
    ],
)
def test_options_of_another_kind_are_refused_with_their_name_and_value(options: dict[str, Any], match: str) -> None:
    with pytest.raises(TypeError, match=f"^{match}"):
        ODBDataLoader(DATA, l_max=8, **options)


def test_a_number_may_be_any_kind_of_whole_number() -> None:
    loader = ODBDataLoader(DATA, l_max=np.int64(8), buffer_size=np.int32(4), num_workers=np.int64(1))  # type: ignore[arg-type]
    assert [type(value) for value in (loader.l_max, loader._options["buffer_size"])] == [int, int]
    assert loader._options["num_workers"] == 1 and type(loader._options["num_workers"]) is int


class NotRead(np.memmap):
    """An array in a file that must not be read."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("its contents are pickled")


class UnreadTensor(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("its contents are pickled")


class TestWhatCanBeSent:
    """To processes that are spawned: found out at construction, at no cost."""

    def loader(self, held: Any) -> ODBDataLoader:
        dataset = Lengths([3, 5])
        dataset.held = {"deep": [held]}  # type: ignore[attr-defined]
        return ODBDataLoader(dataset, l_max=8, collate_fn=collate, multiprocessing_context="spawn")

    @pytest.mark.parametrize("make", ["Lock", "RLock", "Semaphore", "Event", "Condition", "Queue", "SimpleQueue"])
    def test_what_a_child_is_given_at_its_start(self, make: str) -> None:
        """It can't be pickled at any other time."""
        held = getattr(get_context("spawn"), make)()
        with pytest.raises(RuntimeError, match=r"should only be shared|through inheritance"):
            pickle.dumps(held)
        self.loader(held)

    def test_values_that_processes_share(self) -> None:
        for held in (get_context("spawn").Value("q", 0), get_context("spawn").Array("d", 3)):
            self.loader(held)

    def test_arrays_are_not_read(self, tmp_path: Path) -> None:
        self.loader(np.memmap(tmp_path / "large", dtype=np.uint8, mode="w+", shape=(100,)).view(NotRead))
        self.loader(torch.zeros(3).as_subclass(UnreadTensor))

    def test_objects_in_an_array_are(self) -> None:
        with pytest.raises(TypeError, match=r"^dataset=.*can't be sent .* 'spawn'.*lambda"):
            self.loader(np.array([lambda: None], dtype=object))

    def test_threads_locks_and_open_files_are_refused(self, tmp_path: Path) -> None:
        with (tmp_path / "data").open("w") as file:
            for held in (threading.Lock(), file, (n for n in ())):
                with pytest.raises(TypeError, match=r"^dataset=.*can't be sent to the loader's processes"):
                    self.loader(held)


@pytest.mark.parametrize("alignment", ["matched", "paper"])
def test_both_alignments_are_accepted_and_matched_is_the_default(alignment: Any) -> None:
    assert ODBDataLoader(DATA, l_max=8, alignment=alignment)._options["alignment"] == alignment
    assert ODBDataLoader(DATA, l_max=8)._options["alignment"] == "matched"


@pytest.mark.parametrize("field", ["setup", "exchange", "peer", "worker", "batch", "stop"])
def test_time_limits_are_positive(field: str) -> None:
    with pytest.raises(ValueError, match=rf"Timeouts\.{field} must be positive, got 0"):
        Timeouts(**{field: 0})


@pytest.mark.parametrize(
    ("dataset", "match"),
    [
        (iter([1]), "a list_iterator, an iterator, which can be read only once"),
        ((n for n in range(3)), "a generator, an iterator"),
        (3, r"map-style \(__getitem__ and __len__\) or iterable \(__iter__\), and a int is neither"),
    ],
)
def test_data_that_is_neither_map_style_nor_iterable_is_refused(dataset: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        ODBDataLoader(dataset, l_max=8)


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("batch_size", "l_max decides"),
        ("batch_sampler", "pass a sampler, or none"),
        ("drop_last", "no sample is dropped"),
        ("timeout", r"timeouts=Timeouts\(\.\.\.\)"),
        ("l_mx", "there are .*buffer_size.*quota"),
    ],
)
def test_an_unknown_option_is_refused_with_the_mend(name: str, mend: str) -> None:
    with pytest.raises(TypeError, match=f"no option '{name}': .*{mend}"):
        ODBDataLoader(DATA, l_max=8, **{name: 4})


def test_a_quota_is_for_non_join_alone() -> None:
    with pytest.warns(UserWarning, match="quota is ignored with mode='join'"):
        ODBDataLoader(DATA, l_max=8, quota=4)


def test_prefetch_without_workers_warns_that_it_is_ignored() -> None:
    with pytest.warns(UserWarning, match="prefetch_factor is ignored with num_workers=0"):
        ODBDataLoader(DATA, l_max=8, num_workers=0, prefetch_factor=2)


def test_ranks_need_a_place_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    loader = ODBDataLoader(DATA, l_max=8, rank=1, world_size=2)
    with pytest.raises(ValueError, match=r"rank 1 of 2 .*MASTER_ADDR and MASTER_PORT.*store="):
        next(iter(loader))
    other = ODBDataLoader(DATA, l_max=8, rank=1, world_size=2, store=torch.distributed.HashStore())
    with pytest.raises(ValueError, match=r"store has to be a torch.distributed TCPStore or FileStore, got HashStore"):
        next(iter(other))


def test_there_is_no_length_to_be_wrong_about() -> None:
    with pytest.raises(TypeError):
        len(ODBDataLoader(DATA, l_max=8))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "state", [lambda loader: pickle.loads(pickle.dumps(loader)), copy.deepcopy], ids=["pickle", "deepcopy"]
)
def test_a_loader_can_be_copied_to_where_it_is_used(state: Any) -> None:
    loader = ODBDataLoader(DATA, l_max=8, seed=3, collate_fn=collate)
    loader.set_epoch(2)
    assert views(state(loader)) == views(loader)
    assert state(loader).l_max == 8


class TestLengthOfASample:
    @pytest.mark.parametrize(
        ("ids", "length"),
        [([1, 2, 3], 3), (torch.arange(4), 4), (torch.zeros(1, 6), 6), (torch.arange(2).numpy(), 2), ([], 0), ("ab", 2)],
    )
    def test_it_is_that_of_input_ids(self, ids: Any, length: int) -> None:
        class Sample:
            input_ids = ids

        assert length_of_input_ids({"input_ids": ids}) == length
        assert length_of_input_ids(Sample()) == length

    @pytest.mark.parametrize("sample", [{"text": "x", "n": 1}, (1, 2), 5, None])
    def test_without_input_ids_the_mend_is_named(self, sample: Any) -> None:
        with pytest.raises(TypeError, match=rf"sample of type {type(sample).__name__} .*pass length_fn="):
            length_of_input_ids(sample)


class TestSampler:
    def test_it_gives_this_ranks_own_views_in_its_order(self) -> None:
        assert views(ODBDataLoader(DATA, l_max=8, sampler=[3, 1, 1]), rank=1, world_size=2) == [3, 1, 1]

    def test_dealt_out_it_is_split_among_ranks(self) -> None:
        loader = ODBDataLoader(DATA, l_max=8, sampler=["a", "b", "c", "d", "e"], deal_sampler=True)
        assert [views(loader, rank, 2) for rank in range(2)] == [["a", "c", "e"], ["b", "d"]]

    def test_random_draws_of_a_dealt_sampler_are_alike_on_all_ranks_and_new_in_each_epoch(self) -> None:
        def loader() -> ODBDataLoader:
            return ODBDataLoader(
                Lengths([1] * 50), l_max=8, sampler=RandomSampler(range(50), replacement=True), deal_sampler=True, seed=1
            )

        loaders = [loader(), loader()]
        epochs = []
        for epoch in range(2):
            drawn = []
            for rank, ours in enumerate(loaders):
                torch.manual_seed(rank + 10 * epoch)
                ours.set_epoch(epoch)
                drawn.append(views(ours, rank, 2))
            whole = [view for pair in zip(*drawn, strict=True) for view in pair]
            ours = loader()
            ours.set_epoch(epoch)
            assert whole == views(ours)
            epochs.append(whole)
        assert epochs[0] != epochs[1]

    def test_dealing_leaves_the_random_state_of_training_alone(self) -> None:
        loader = ODBDataLoader(DATA, l_max=8, sampler=RandomSampler(DATA, replacement=True), deal_sampler=True)  # type: ignore[arg-type]
        torch.manual_seed(4)
        expected = torch.rand(3)
        torch.manual_seed(4)
        views(loader)
        assert torch.equal(torch.rand(3), expected)

    def test_it_is_told_the_epoch(self) -> None:
        sampler = DistributedSampler(range(40), num_replicas=2, rank=1)  # type: ignore[arg-type]
        loader = ODBDataLoader(Lengths([1] * 40), l_max=8, sampler=sampler)
        loader.set_epoch(3)
        views(loader)
        assert sampler.epoch == 3
