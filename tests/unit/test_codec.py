"""Samples and batches cross processes unchanged, whatever they hold, and by whichever way."""

from __future__ import annotations

import collections
import pickle
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from odb_lightning.runtime.codec import PackedSamples, decode, encode, is_plain_tensor, pack_samples, unpack_samples

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
]
SHAPES = [(), (1,), (7,), (0,), (0, 3), (3, 0), (2, 3), (2, 1, 3, 2)]


class Encoding(collections.UserDict[str, Any]):
    """Like transformers' BatchEncoding: a mapping that is no dict, with attributes besides."""

    def __init__(self, data: dict[str, Any] | None = None, encodings: Any = None) -> None:
        super().__init__(data)
        self.encodings = encodings


class DictWithMeta(dict[str, Any]):
    """A dict that carries more than its items."""

    meta: Any = None


class SizedTensor(Tensor):
    """A tensor of a user's own type."""


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    input_ids: Any
    note: str = ""


def bits(tensor: Tensor) -> Tensor:
    # Not .contiguous(): a single element with a stride is contiguous to torch, and can't be viewed as bytes.
    copy = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return copy.view(-1).view(torch.uint8)


def assert_same(left: Any, right: Any) -> None:
    """Equal in types, dtypes, shapes, order of keys and bits."""
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert (left.dtype, left.shape, left.requires_grad) == (right.dtype, right.shape, right.requires_grad)
        assert torch.equal(bits(left), bits(right))
    elif isinstance(left, np.ndarray):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.tolist() == right.tolist()
    elif isinstance(left, (dict, collections.UserDict)):
        assert list(left) == list(right), "the order of the keys"
        for key in left:
            assert_same(left[key], right[key])
        if hasattr(left, "__dict__"):
            assert_same(
                {k: v for k, v in vars(left).items() if k != "data"}, {k: v for k, v in vars(right).items() if k != "data"}
            )
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for ours, theirs in zip(left, right, strict=True):
            assert_same(ours, theirs)
    elif is_dataclass(left):
        for item in fields(left):
            assert_same(getattr(left, item.name), getattr(right, item.name))
    else:
        assert left == right


def across(packed: PackedSamples) -> PackedSamples:
    """As it arrives in another process: workers send messages with multiprocessing's pickler."""
    received: PackedSamples = pickle.loads(bytes(ForkingPickler.dumps(packed)))
    return received


def roundtrip(value: Any) -> Any:
    """As a batch arrives: buffers copied into memory of the receiver's own."""
    encoded = encode(value)
    return decode(encoded.header, [np.array(buffer) for buffer in encoded.buffers])


def make_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    count = int(np.prod(shape, dtype=int))
    generator = torch.Generator().manual_seed(seed)
    if kind is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (count * torch.empty(0, dtype=kind).element_size(),), generator=generator, dtype=torch.uint8)
    return raw.view(kind).view(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = make_tensor(dtype, shape)
    assert is_plain_tensor(tensor)
    assert_same(roundtrip([tensor]), [tensor])
    samples = [{"x": tensor, "y": make_tensor(dtype, (5,), 1)}, {"x": make_tensor(dtype, (4,), 2), "y": tensor}]
    packed = pack_samples(samples)
    assert packed.columns is not None
    assert packed.rest is None
    assert_same(unpack_samples(across(packed)), samples)
    assert_same(unpack_samples(packed), samples)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.arange(12).view(3, 4).t(), id="transposed"),
        pytest.param(lambda: torch.arange(20)[3:17:3], id="strided"),
        pytest.param(lambda: torch.arange(4).expand(3, 4), id="expanded"),
        pytest.param(lambda: torch.arange(5.0).view(1, 5)[:, 2], id="column-of-one-row"),
        pytest.param(lambda: torch.arange(5, dtype=torch.int16)[::5], id="one-element-with-a-stride"),
        pytest.param(lambda: torch.arange(6).view(2, 3).unsqueeze(1).permute(2, 0, 1), id="permuted"),
        pytest.param(lambda: torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last), id="channels-last"),
        pytest.param(lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(), id="conjugated"),
        pytest.param(lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag, id="negated"),
        pytest.param(lambda: torch.tensor([float("nan"), float("inf"), -0.0]), id="nan-and-signed-zero"),
    ],
)
def test_tensors_that_are_views(make: Callable[[], Tensor]) -> None:
    assert_same(roundtrip({"x": make()})["x"], make())
    samples = [{"x": make()}, {"x": make()[:1]}]
    assert_same(unpack_samples(across(pack_samples(samples))), samples)


def test_a_small_view_does_not_carry_its_whole_storage() -> None:
    row = torch.zeros(1000, 1000)[5]
    assert sum(buffer.nbytes for buffer in encode([row]).buffers) == row.numel() * row.element_size()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.arange(3.0).requires_grad_(), id="requires-grad"),
        pytest.param(lambda: torch.nn.Parameter(torch.arange(3.0)), id="parameter"),
        pytest.param(lambda: torch.arange(3.0).as_subclass(SizedTensor), id="subclass"),
    ],
)
def test_tensors_that_are_more_than_bytes_keep_what_they_are(make: Callable[[], Tensor]) -> None:
    value = make()
    assert not is_plain_tensor(value)
    assert_same(roundtrip({"x": value}), {"x": value})
    assert_same(unpack_samples(across(pack_samples([{"x": value, "y": torch.ones(2)}]))), [{"x": value, "y": torch.ones(2)}])


def test_sparse_tensors_survive() -> None:
    sparse = torch.eye(3).to_sparse()
    (sample,) = unpack_samples(across(pack_samples([{"x": sparse, "input_ids": torch.arange(3)}])))
    assert sample["x"].layout is torch.sparse_coo
    assert torch.equal(sample["x"].to_dense(), torch.eye(3))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10)[::3],
        np.empty((0, 4), np.float32),
        np.array(3.5),
        np.array(["a", "bcd"]),
        np.array([1, None, "x"], dtype=object),
        np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.arange(4, dtype=">i4"),
    ],
    ids=["2d", "fortran", "strided", "empty", "0-dim", "strings", "objects", "records", "dates", "big-endian"],
)
def test_numpy_arrays(array: np.ndarray[Any, Any]) -> None:
    assert_same(roundtrip([array, {"again": array}]), [array, {"again": array}])
    assert_same(
        unpack_samples(across(pack_samples([array, array[..., :1] if array.ndim else array]))),
        [array, array[..., :1] if array.ndim else array],
    )


def test_nested_containers_and_types_of_the_users_own() -> None:
    ids = torch.arange(4)
    meta = DictWithMeta(a=ids, b=[np.arange(2), "text"])
    meta.meta = {"source": ids[:2], "step": 3}
    value = {
        "list": [ids, [ids[:1], ()], None],
        "tuple": (1, 2.5, "x", b"bytes", bytearray(b"more"), frozenset({1})),
        "pair": Pair(ids, {"deep": [torch.zeros(2, 2, dtype=torch.bfloat16)]}),
        "record": Record(ids, "note"),
        "encoding": Encoding({"input_ids": ids, "labels": [1, 2]}, encodings=[torch.ones(1)]),
        "dict with more": meta,
        "ordered": collections.OrderedDict(z=ids, a=ids),
        ("tuple", "key"): torch.tensor(True),
        7: slice(1, 2),
    }
    assert_same(roundtrip(value), value)
    assert_same(unpack_samples(across(pack_samples([value, value]))), [value, value])


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([torch.arange(3), torch.arange(2)], id="bare-tensors"),
        pytest.param([(torch.arange(3), 1), (torch.arange(2), 0)], id="tuples"),
        pytest.param([Record(torch.arange(3)), Record(torch.arange(1), "x")], id="dataclasses"),
        pytest.param(
            [Encoding({"input_ids": torch.arange(3)}, ["e"]), Encoding({"input_ids": torch.arange(1)})], id="user-dicts"
        ),
        pytest.param([{"a": torch.arange(3)}, DictWithMeta(a=torch.arange(2))], id="dict-and-subclass"),
        pytest.param([{"a": torch.arange(3)}, {"a": torch.arange(2), "b": 1}], id="other-keys"),
        pytest.param([{"a": torch.arange(3)}, {"a": torch.arange(2.0)}], id="other-dtype"),
        pytest.param([{"a": torch.arange(3)}, {"a": [1, 2]}], id="tensor-and-list"),
        pytest.param([{"a": torch.arange(3)}, {"a": torch.arange(2.0).requires_grad_()}], id="plain-and-not"),
        pytest.param(
            [{"text": "x", "a": torch.arange(3), "n": 1}, {"text": "y", "a": torch.arange(2), "n": None}],
            id="tensors-and-others",
        ),
        pytest.param([{"b": torch.arange(3), "a": 1}, {"a": 2, "b": torch.arange(2)}], id="keys-in-another-order-with-rest"),
        pytest.param(
            [{"b": torch.arange(3), "a": torch.ones(1)}, {"a": torch.ones(2), "b": torch.arange(2)}], id="keys-in-another-order"
        ),
        pytest.param([{"a": torch.zeros(0)}, {"a": torch.zeros(0, 2)}, {"a": torch.zeros(3, 1)}], id="empty-tensors"),
        pytest.param([{}, {}], id="empty-dicts"),
        pytest.param([], id="no-sample"),
        pytest.param([None, 3, "x"], id="no-container"),
    ],
)
def test_messages_of_samples(samples: list[Any]) -> None:
    packed = pack_samples(samples)
    assert packed.num_samples == len(samples)
    assert_same(unpack_samples(across(packed)), samples)
    assert_same(unpack_samples(packed), samples)


def test_columns_carry_the_tensors_and_the_rest_what_else_there_is() -> None:
    packed = pack_samples([{"text": "x", "ids": torch.arange(3)}, {"text": "y", "ids": torch.arange(2)}])
    assert packed.columns is not None
    assert list(packed.columns) == ["ids"]
    assert packed.rest is not None
    assert pack_samples([{"ids": [1, 2]}]).columns is None


def test_many_samples_are_few_arrays() -> None:
    """One array per key, not per sample: what the cost of a message hangs on, and nothing with a file descriptor."""
    packed = pack_samples([{"a": torch.arange(n), "b": torch.ones(n, 2)} for n in range(1, 65)])
    assert packed.columns is not None
    assert len(packed.columns) == 2
    assert all(isinstance(column[3], np.ndarray) for column in packed.columns.values())
    assert len(ForkingPickler.dumps(packed)) < 64 * 65 * (8 + 8) / 2 + 4096


@st.composite
def ragged_samples(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Dictionaries with the same keys; under each, tensors of one dtype and ragged shapes, or sometimes something else."""
    keys = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
    dtypes = {key: draw(st.sampled_from(DTYPES)) for key in keys}
    is_mixed = {key: draw(st.booleans()) and draw(st.booleans()) for key in keys}
    samples = []
    for seed in range(draw(st.integers(1, 6))):
        sample: dict[str, Any] = {}
        for key in keys:
            shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
            tensor = make_tensor(dtypes[key], shape, seed)
            sample[key] = draw(st.sampled_from([tensor, [tensor, "x"], tensor.tolist(), None])) if is_mixed[key] else tensor
        samples.append(sample)
    return samples


@given(ragged_samples())
def test_columns_give_what_the_generic_way_gives(samples: list[dict[str, Any]]) -> None:
    if any(isinstance(value, list) and value != value for sample in samples for value in sample.values()):
        return
    generic = PackedSamples(len(samples), None, encode(samples))
    one_way, other_way = unpack_samples(across(pack_samples(samples))), unpack_samples(across(generic))
    assert list(map(list, one_way)) == list(map(list, samples))
    assert repr(one_way) == repr(other_way)
    for ours, theirs in zip(one_way, samples, strict=True):
        for key, value in theirs.items():
            if isinstance(value, Tensor):
                assert_same(ours[key], value)


def test_unpacked_tensors_can_be_written_to_without_reaching_the_data_set() -> None:
    """With num_workers=0 nothing crosses a process; a collate_fn that works in place must not alter the user's data then."""
    stored = {"input_ids": torch.arange(3), "nested": {"pixels": torch.zeros(2)}, "array": np.zeros(2)}
    (sample,) = unpack_samples(pack_samples([stored]))
    sample["input_ids"].fill_(-1)
    sample["nested"]["pixels"].fill_(-1)
    sample["array"].fill(-1)
    assert stored["input_ids"].tolist() == [0, 1, 2]
    assert stored["nested"]["pixels"].tolist() == [0.0, 0.0]
    assert stored["array"].tolist() == [0.0, 0.0]


def test_samples_of_a_message_can_be_changed_one_by_one() -> None:
    samples = unpack_samples(across(pack_samples([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}])))
    samples[0]["a"].fill_(7)
    samples[0].pop("a")
    assert samples[1]["a"].tolist() == [0.0, 0.0, 0.0]


def test_a_tensor_shared_within_a_batch_stays_shared() -> None:
    """Tied labels and inputs are one tensor; twice the bytes would be a waste."""
    ids = torch.arange(1000)
    encoded = encode({"input_ids": ids, "labels": ids})
    assert len(encoded.buffers) == 1
    assert_same(decode(*encoded), {"input_ids": ids, "labels": ids})


def test_what_cant_be_pickled_raises_what_pickle_raises() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError), match=r"lambda|pickle"):
        encode({"x": lambda: None})
