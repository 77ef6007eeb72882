"""Python objects with tensors inside as a small header and flat buffers, without a file descriptor per tensor."""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Encoded(NamedTuple):
    """`header` is a pickle whose array data lie in `buffers` (uint8, one-dimensional)."""

    header: bytes
    buffers: list[np.ndarray[Any, Any]]


def is_plain_tensor(value: object) -> bool:
    """Whether a tensor is its type, shape and bytes alone, so that a copy of the bytes is a copy of it."""
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.requires_grad
        and not value.is_quantized
    )


def _restore_tensor(buffer: np.ndarray[Any, Any] | bytes, dtype_name: str, shape: tuple[int, ...]) -> Tensor:
    dtype = getattr(torch, dtype_name)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    flat = torch.from_numpy(buffer) if isinstance(buffer, np.ndarray) else torch.frombuffer(buffer, dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def _bytes_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    with suppress(TypeError, RuntimeError):  # a type that numpy does not know, or a view that conjugates or negates
        return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    # One element may keep any stride and count as contiguous; a view as bytes wants stride 1.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not is_plain_tensor(obj):
            return NotImplemented
        shape = tuple(obj.shape)
        buffer = pickle.PickleBuffer(_bytes_of(obj).data) if obj.numel() else b""
        return _restore_tensor, (buffer, str(obj.dtype).removeprefix("torch."), shape)


def encode(value: Any) -> Encoded:
    """`value` with the bytes of its tensors and arrays beside it. Raises what pickle raises for what it can't take."""
    stream = io.BytesIO()
    pickled: list[pickle.PickleBuffer] = []
    _Pickler(stream, protocol=5, buffer_callback=pickled.append).dump(value)
    return Encoded(stream.getvalue(), [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in pickled])


def decode(header: bytes, buffers: Sequence[np.ndarray[Any, Any]]) -> Any:
    """What `encode` was given; tensors and arrays share the memory of `buffers`."""
    return pickle.loads(header, buffers=buffers)


class PackedSamples(NamedTuple):
    """Samples of one message: flat columns where they are dictionaries of tensors, else one encoded list."""

    num_samples: int
    columns: dict[Any, tuple[torch.dtype, list[int], list[tuple[int, ...]] | None, np.ndarray[Any, Any]]] | None
    """Per key: dtype, elements per sample, shapes (None: one-dimensional), the bytes of all samples end to end."""
    rest: Encoded | None
    """The list of samples, or, with columns, of what they hold besides."""


_KIND = operator.attrgetter("dtype", "layout", "requires_grad", "device")


def _columns(samples: Sequence[Any]) -> dict[Any, list[Tensor]]:
    """By key, where every sample holds a plain tensor of the same dtype under it."""
    if set(map(type, samples)) != {dict}:
        return {}
    first = list(samples[0])
    if any(list(sample) != first for sample in samples):
        return {}
    columns = {key: [sample[key] for sample in samples] for key in first}
    return {key: values for key, values in columns.items() if is_plain_tensor(values[0]) and _are_alike(values)}


def _are_alike(values: list[Any]) -> bool:
    return set(map(type, values)) == {Tensor} and len(set(map(_KIND, values))) == 1


NewBytes = Callable[[int], np.ndarray[Any, Any]]


def _new_bytes(size: int) -> np.ndarray[Any, Any]:
    return np.empty(size, dtype=np.uint8)


def pack_samples(samples: Sequence[Any], new_bytes: NewBytes = _new_bytes) -> PackedSamples:
    """The samples as one message of a few arrays: one array per key and message, not one per tensor. All are copies, made in
    `new_bytes`: where no process lies between, what is done to a sample must not reach the data set either."""
    tensors = _columns(samples)
    if not tensors:
        return PackedSamples(len(samples), None, _encode_copy(list(samples), new_bytes))
    columns = {}
    for key, values in tensors.items():
        is_flat = all(value.dim() == 1 for value in values)
        dtype, sizes = values[0].dtype, [value.numel() for value in values]
        shapes = None if is_flat else [tuple(value.shape) for value in values]
        data = new_bytes(sum(sizes) * dtype.itemsize)
        if data.size:
            flat = torch.from_numpy(data.view(np.ndarray)).view(dtype)
            torch.cat(values if is_flat else [value.reshape(-1) for value in values], out=flat)
        columns[key] = (dtype, sizes, shapes, data)
    order = list(samples[0])
    if len(tensors) == len(order):
        return PackedSamples(len(samples), columns, None)
    others = [{key: value for key, value in sample.items() if key not in columns} for sample in samples]
    return PackedSamples(len(samples), columns, _encode_copy((order, others), new_bytes))


def _encode_copy(value: Any, new_bytes: NewBytes) -> Encoded:
    header, buffers = encode(value)
    copies = [new_bytes(buffer.size) for buffer in buffers]
    for copy, buffer in zip(copies, buffers, strict=True):
        copy[:] = buffer
    return Encoded(header, copies)


def unpack_samples(packed: PackedSamples) -> list[Any]:
    """The samples again; tensors are views of their message's arrays."""
    if packed.columns is None:
        assert packed.rest is not None
        samples: list[Any] = decode(*packed.rest)
        return samples
    views = []
    for dtype, sizes, shapes, data in packed.columns.values():
        flat = torch.from_numpy(data).view(dtype) if data.size else torch.empty(0, dtype=dtype)
        parts: Sequence[Tensor] = flat.split_with_sizes(sizes)
        views.append(parts if shapes is None else [part.view(shape) for part, shape in zip(parts, shapes, strict=True)])
    keys = list(packed.columns)
    samples = [dict(zip(keys, values, strict=True)) for values in zip(*views, strict=True)]
    if packed.rest is not None:
        order, others = decode(*packed.rest)
        merged = [sample | other for sample, other in zip(samples, others, strict=True)]
        samples = [{key: sample[key] for key in order} for sample in merged]
    return samples
