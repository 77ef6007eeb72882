"""Bytes from a worker to the collate process: none is overwritten before it was taken, and the memory is used again."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_lightning import ODBDataLoader
from odb_lightning.runtime import slab as slab_module
from odb_lightning.runtime.codec import pack_samples, unpack_samples
from odb_lightning.runtime.slab import Slab, Slabs, make_slabs
from tests.helpers import clean_environment

pytestmark = pytest.mark.timeout(60)

SMALL = 1000
ROOT = Path(__file__).resolve().parents[2]


def new_slabs(size: int = SMALL) -> Slabs:
    before, slab_module._SLAB_BYTES = slab_module._SLAB_BYTES, size
    try:
        slabs = make_slabs(1)
    finally:
        slab_module._SLAB_BYTES = before
    assert slabs is not None
    return slabs


@pytest.fixture
def slabs() -> Slabs:
    return new_slabs()


def is_inside(array: np.ndarray[Any, Any], slabs: Slabs) -> bool:
    return np.shares_memory(array, slabs.array(0))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 400), st.just("take")), max_size=60))
def test_what_arrives_is_what_was_sent_in_any_order_of_sending_and_taking(moves: list[Any]) -> None:
    slabs = new_slabs()
    slab, on_the_way, number = Slab(slabs, 0), [], 0
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
            assert not is_inside(taken, slabs)


def test_room_is_used_again_from_the_beginning_and_nothing_waits_for_room(slabs: Slabs) -> None:
    slab = Slab(slabs, 0)
    first, second = slab.new_bytes(400), slab.new_bytes(400)
    assert is_inside(first, slabs) and is_inside(second, slabs)
    assert not is_inside(slab.new_bytes(400), slabs), "full"
    pickle.loads(pickle.dumps(first))
    again = slab.new_bytes(300)
    assert np.shares_memory(again, first)
    assert not is_inside(slab.new_bytes(SMALL + 1), slabs)
    for data in (second, again):
        pickle.loads(pickle.dumps(data))
    assert is_inside(slab.new_bytes(SMALL), slabs)


def test_the_message_holds_the_place_and_not_the_bytes(slabs: Slabs) -> None:
    slab = Slab(slabs, 0)
    samples = [{"x": torch.arange(20), "y": np.arange(10.0)}]
    packed = pack_samples(samples, slab.new_bytes)
    message = pickle.dumps(packed)
    assert len(message) < 700
    (back,) = unpack_samples(pickle.loads(message))
    assert back["x"].tolist() == list(range(20)) and back["y"].tolist() == list(range(10))


def test_a_place_of_no_bytes_takes_no_room(slabs: Slabs) -> None:
    slab = Slab(slabs, 0)
    for _ in range(3):
        empty, data = slab.new_bytes(0), slab.new_bytes(400)
        assert empty.size == 0 and is_inside(data, slabs)
        pickle.loads(pickle.dumps(data))


@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE", "RLIMIT_AS"])
def test_where_there_is_no_room_the_queue_takes_everything(limit: str) -> None:
    """In a process of its own, as the limit can't be taken back."""
    code = f"""
import resource, torch
from odb_lightning.runtime import slab
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
room = 2**20 if "{limit}" == "RLIMIT_FSIZE" else used + 2**23
resource.setrlimit(resource.{limit}, (room, room))
assert slab.make_slabs(2) is None
print("ok")
"""
    environment = clean_environment({"ODB_HELPER_PROCESS": "1"})
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment, cwd=ROOT)
    assert result.stdout == "ok\n", result.stderr


def test_a_new_worker_does_not_wait_for_what_the_one_before_left_untaken(slabs: Slabs) -> None:
    before = Slab(slabs, 0)
    before.new_bytes(900)
    after = Slab(slabs, 0)
    data = after.new_bytes(900)
    assert is_inside(data, slabs)
    pickle.loads(pickle.dumps(data))
    assert is_inside(after.new_bytes(900), slabs)


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
