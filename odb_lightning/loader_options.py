"""What the options of a loader may be, and what they are by default."""

from __future__ import annotations

import math
import multiprocessing
import pickle
import reprlib
import socket
import warnings
from collections.abc import Collection, Mapping
from multiprocessing.reduction import ForkingPickler
from numbers import Integral
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from odb_lightning.plan.costs import LARGEST, RowLimits, named_cost
from odb_lightning.plan.rounds import ALIGNMENTS
from odb_lightning.runtime.counting import check_rule
from odb_lightning.runtime.settings import Timeouts
from odb_lightning.sharding import is_iterable

CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("join", "non_join"),
    "sharding": ("auto", "loader", "dataset"),
    "alignment": ALIGNMENTS,
    "oversize": ("emit", "drop", "error"),
    "empty": ("drop", "error"),
}
"""Of the options that are one of a few words."""
_MAX_CHUNK_SIZE = 64

_OF_A_DATALOADER = {
    "batch_size": "l_max decides how many samples a batch has (max_rows is a limit on them)",
    "batch_sampler": "it decides itself what a batch is, while here batches are formed from lengths: pass a sampler, or none",
    "drop_last": "no sample is dropped",
    "generator": "the order depends on seed= and the epoch",
    "timeout": "pass timeouts=Timeouts(...)",
    "persistent": "pass persistent_workers=",
}


def settled_options(options: dict[str, Any], context: Any) -> dict[str, Any]:
    """The options of a loader that its processes are told (fields of `LoaderSettings`), checked, with defaults filled in; start
    method and chunk size besides. Warns of those that are ignored. Raises TypeError or ValueError, naming the option."""
    given = SimpleNamespace(**options)
    check_at_least_one(l_max=given.l_max, buffer_size=given.buffer_size)
    _check_kinds(given)
    optional = {name: options[name] for name in ("max_rows", "max_patches", "prefetch_factor", "quota")}
    check_at_least_one(**{name: value for name, value in optional.items() if value is not None})
    if isinstance(given.num_workers, bool) or not isinstance(given.num_workers, Integral) or given.num_workers < 0:
        raise ValueError(f"num_workers must be 0 or more, got {given.num_workers!r}")
    num_workers = int(given.num_workers)
    for name, choices in CHOICES.items():
        check_choice(name, options[name], choices)
    _check_patches(given.patches_fn, given.max_patches, given.alignment)
    if given.cost is not None and given.alignment == "paper":
        _warn("cost is ignored with alignment='paper', which does not match costs")
    whole = {name: None if value is None else int(value) for name, value in optional.items()}
    l_max, buffer_size = int(given.l_max), int(given.buffer_size)
    budget, cost = named_cost(given.budget, "budget"), None if given.cost is None else named_cost(given.cost, "cost")
    RowLimits(l_max, whole["max_rows"], budget, cost)
    check_rule(given.num_supervised_fn)
    if given.mode == "non_join" and given.quota is None and is_iterable(given.dataset):
        raise ValueError("mode='non_join' with an iterable data set needs quota=<samples of an epoch over all ranks>")
    if given.mode == "join" and given.quota is not None:
        _warn("quota is ignored with mode='join', which trains each sample once")
    if num_workers == 0 and given.prefetch_factor is not None:
        _warn("prefetch_factor is ignored with num_workers=0")
    chunk_size = max(min(_MAX_CHUNK_SIZE, buffer_size // (2 * max(num_workers, 1))), 1)
    if num_workers > 0 and given.prefetch_factor is None:
        whole["prefetch_factor"] = max(math.ceil(buffer_size / (chunk_size * num_workers)), 2)
    settled = (
        options
        | whole
        | {
            "collate_fn": default_collate if given.collate_fn is None else given.collate_fn,
            "length_fn": length_of_input_ids if given.length_fn is None else given.length_fn,
            "l_max": l_max,
            "buffer_size": buffer_size,
            "budget": budget,
            "cost": cost,
            "seed": int(given.seed),
            "num_workers": num_workers,
            "prefetch_factor": whole["prefetch_factor"] if num_workers > 0 else None,
            "chunk_size": chunk_size,
            "start_method": _start_method_of(context),
            "timeouts": given.timeouts or Timeouts(),
        }
    )
    _check_can_be_sent(settled)
    return settled


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)  # where the loader is made


def length_of_input_ids(sample: Any) -> int:
    """The number of tokens in `sample["input_ids"]` (or `sample.input_ids`): the default `length_fn`.

    Raises TypeError where there are none.
    """
    try:
        ids = sample["input_ids"] if isinstance(sample, Mapping) else sample.input_ids
    except (KeyError, AttributeError):
        held = f"keys {sorted(map(str, sample))}" if isinstance(sample, Mapping) else "no attribute 'input_ids'"
        raise TypeError(
            f"the length of a sample of type {type(sample).__name__} with {held} is not known: "
            "pass length_fn=<function of a sample>"
        ) from None
    shape = getattr(ids, "shape", None)
    return int(shape[-1]) if shape else len(ids)


def check_at_least_one(**values: int | None) -> None:
    """Raises ValueError for an option that is no whole number of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ValueError for an option that is none of its choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: choose {' or '.join(map(repr, choices))}")


def refuse_unknown(unknown: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises TypeError for an option that there is not, with the mend if it is one of torch's `DataLoader`."""
    for name in unknown:
        mend = _OF_A_DATALOADER.get(name, f"there are {', '.join(sorted(known))}")
        raise TypeError(f"an ODBDataLoader has no option {name!r}: {mend}")


def _check_kinds(given: SimpleNamespace) -> None:
    """Raises TypeError for an option that is none of what it has to be."""
    for name in ("collate_fn", "length_fn", "worker_init_fn", "patches_fn"):
        value = getattr(given, name)
        if value is not None and not callable(value):
            raise TypeError(f"{name} has to be a function, got {value!r}")
    if given.timeouts is not None and not isinstance(given.timeouts, Timeouts):
        raise TypeError(f"timeouts has to be an odb_lightning.Timeouts, got {given.timeouts!r}")
    if isinstance(given.seed, bool) or not isinstance(given.seed, Integral):
        raise TypeError(f"seed has to be a whole number, got {given.seed!r}")


def _check_patches(patches_fn: Any, max_patches: int | None, alignment: str) -> None:
    """Raises ValueError for half of a second budget, and for one that the alignment does not know."""
    if (patches_fn is None) != (max_patches is None):
        raise ValueError("patches_fn and max_patches go together: how many patches a sample has, and how many a batch may have")
    if max_patches is not None and max_patches > LARGEST:
        raise ValueError(f"max_patches={max_patches} is too large")
    if max_patches is not None and alignment == "paper":
        raise ValueError("alignment='paper' knows one budget only: use alignment='matched' with max_patches")


def _start_method_of(context: Any) -> str | None:
    """The name of a start method, given a name or a context; None is the interpreter's default. Raises ValueError."""
    if context is None:
        return None
    if isinstance(context, str):
        if context not in multiprocessing.get_all_start_methods():
            raise ValueError(
                f"multiprocessing_context={context!r} is unknown: choose one of {multiprocessing.get_all_start_methods()}"
            )
        return context
    if not hasattr(context, "get_start_method"):
        raise TypeError(f"multiprocessing_context has to be a start method or a context of multiprocessing, got {context!r}")
    method: str = context.get_start_method()
    return method


def _check_can_be_sent(options: Mapping[str, Any]) -> None:
    """Raises TypeError, naming the option, for one that the start method can't send to the loader's processes."""
    method = options["start_method"] or multiprocessing.get_start_method(allow_none=True) or default_start_method()
    if method == "fork":
        return
    for name, value in options.items():
        try:
            _DryRun(_Nowhere()).dump(value)
        except Exception as error:
            raise TypeError(
                f"{name}={reprlib.repr(value)} can't be sent to the loader's processes by the start method {method!r}: "
                f'{error}. Define it at the top level of a module, or pass multiprocessing_context="fork".'
            ) from error


def default_start_method() -> str:
    """The interpreter's, without deciding for it: `get_start_method()` would."""
    return multiprocessing.get_all_start_methods()[0]


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _DryRun(ForkingPickler):
    """Goes through what would be pickled, without the contents of arrays, and without what can only be sent to a child at its
    start (locks, shared values)."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)

    def reducer_override(self, value: Any) -> Any:
        is_array = isinstance(value, np.ndarray) and value.dtype != object
        if is_array or isinstance(value, (torch.Tensor, torch.UntypedStorage, socket.socket)):
            return (int, ())
        if any(cls.__module__.partition(".")[0] in ("multiprocessing", "_multiprocessing") for cls in type(value).__mro__):
            return (int, ())
        return NotImplemented
