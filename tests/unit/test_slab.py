"""Bytes from a worker to the collate process: none is overwritten before it was taken, and the memory is used again."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_lightning import ODBDataLoader
from odb_lightning.runtime import slab as slab_module
from odb_lightning.runtime.codec import pack_samples, unpack_samples
from odb_lightning.runtime.ring import SharedMemory
from odb_lightning.runtime.slab import Slab, make_slabs

pytestmark = pytest.mark.timeout(60)

SMALL = 1000


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    monkeypatch.setattr(slab_module, "_SLAB_BYTES", SMALL)
    (memory,) = make_slabs(1)
    return memory


def is_inside(array: np.ndarray[Any, Any], memory: SharedMemory) -> bool:
    return np.shares_memory(array, memory.array)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 400), st.just("take")), max_size=60))
def test_what_arrives_is_what_was_sent_in_any_order_of_sending_and_taking(moves: list[Any]) -> None:
    slab_module._SLAB_BYTES, before = SMALL, slab_module._SLAB_BYTES
    try:
        (memory,) = make_slabs(1)
    finally:
        slab_module._SLAB_BYTES = before
    slab, on_the_way, number = Slab(memory, 0), [], 0
    for move in [*moves, *["take"] * len(moves)]:
        if move != "take":
            number += 1
            data = slab.new_bytes(move)
            assert data.size == move
            data[:] = number % 251
            on_the_way.append((pickle.dumps(data), number, move))
        elif on_the_way:
            message, sent, size = on_the_way.pop(0)
            taken = pickle.loads(message)
            assert taken.tolist() == [sent % 251] * size
            assert not is_inside(taken, memory)


def test_room_is_used_again_from_the_beginning_and_nothing_waits_for_room(memory: SharedMemory) -> None:
    slab = Slab(memory, 0)
    first, second = slab.new_bytes(400), slab.new_bytes(400)
    assert is_inside(first, memory) and is_inside(second, memory)
    assert not is_inside(slab.new_bytes(400), memory), "full"
    pickle.loads(pickle.dumps(first))
    again = slab.new_bytes(300)
    assert np.shares_memory(again, first)
    assert not is_inside(slab.new_bytes(SMALL + 1), memory)
    for data in (second, again):
        pickle.loads(pickle.dumps(data))
    assert is_inside(slab.new_bytes(SMALL), memory)


def test_the_message_holds_the_place_and_not_the_bytes(memory: SharedMemory) -> None:
    slab = Slab(memory, 0)
    samples = [{"x": torch.arange(20), "y": np.arange(10.0)}]
    packed = pack_samples(samples, slab.new_bytes)
    message = pickle.dumps(packed)
    assert len(message) < 700
    (back,) = unpack_samples(pickle.loads(message))
    assert back["x"].tolist() == list(range(20)) and back["y"].tolist() == list(range(10))


def test_a_new_worker_does_not_wait_for_what_the_one_before_left_untaken(memory: SharedMemory) -> None:
    before = Slab(memory, 0)
    before.new_bytes(900)
    after = Slab(memory, 0)
    data = after.new_bytes(900)
    assert is_inside(data, memory)
    pickle.loads(pickle.dumps(data))
    assert is_inside(after.new_bytes(900), memory)


class _Large(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(1 + index % 7), "image": torch.full((3, 40, 50), index)}


def _as_list(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.parametrize("size", [64, 2**20])
def test_a_loader_gives_the_same_with_and_without_room(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "_SLAB_BYTES", size)
    options: dict[str, Any] = {"l_max": 30, "buffer_size": 16, "collate_fn": _as_list, "num_workers": 2}
    options["num_supervised_fn"] = "causal"
    with ODBDataLoader(_Large(), multiprocessing_context="fork", **options) as loader:
        for _ in range(2):
            seen = {index: sample for batch in loader for index, sample in zip(batch.step.sample_ids, batch.data, strict=True)}
            assert sorted(seen) == list(range(60))
            assert all(bool((sample["image"] == index).all()) for index, sample in seen.items())
