"""List states of torchmetrics on ranks with unequal numbers of batches.

torchmetrics gathers a list that it does not concatenate by its elements, as often as this rank has some, and stands in for an
empty one with a vector of the metric's dtype: with unequal lists ranks hang, lose values or abort. Takes the place of
`Metric._sync_dist`, which has no public counterpart; `tests/traps` holds what this relies on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

_original = Metric._sync_dist
_owners: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those that `even_lists` was called for."""


def even_lists(owner: Any) -> None:
    """Has metrics sync lists of any length, until `leave_lists`: all of the class, as they come and go, and as subclasses add
    to what it does."""
    global _original
    if Metric._sync_dist is not _sync_dist:
        _original, Metric._sync_dist = Metric._sync_dist, _sync_dist  # type: ignore[method-assign]
    _owners.add(owner)


def leave_lists(owner: Any) -> None:
    """Takes back what `even_lists` did, when no other owner is left: a hook of a fit may run a trainer of its own."""
    _owners.discard(owner)
    if not _owners and Metric._sync_dist is _sync_dist:
        Metric._sync_dist = _original  # type: ignore[method-assign]


def _sync_dist(self: Metric, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None) -> None:
    """Each list filled up to the longest rank's with tensors of no rows, which are left out again."""
    names = [name for name in self._reductions if _is_list(self, name)]
    if not names or not dist.is_initialized():
        _original(self, dist_sync_fn, process_group)
        return
    group = process_group or self.process_group
    everyone: list[dict[str, list[_Kind] | None]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, {name: _kinds(getattr(self, name)) for name in names}, group=group)
    uncatenated: dict[str, list[list[_Kind]]] = {}
    for name in names:
        of_ranks = [kinds for rank in everyone if (kinds := rank[name]) is not None]
        if len(of_ranks) < len(everyone):
            continue  # lists of something else than tensors
        held, longest = [_as_rows(value) for value in getattr(self, name)], max(of_ranks, key=len)
        if self._reductions[name] is None:
            uncatenated[name] = of_ranks
        else:  # one tensor of what there is, or of no rows
            longest = longest[: max(len(held), 1)]
        held += [torch.empty((0, *kind.row), dtype=kind.dtype, device=self.device) for kind in longest[len(held) :]]
        setattr(self, name, held)
    _original(self, dist_sync_fn, process_group)
    for name, of_ranks in uncatenated.items():
        values = iter(getattr(self, name))  # by element, and by rank within it
        setattr(self, name, [value for element in range(max(map(len, of_ranks))) for value in _real(values, of_ranks, element)])


class _Kind(NamedTuple):
    """Of a tensor in a list."""

    dtype: torch.dtype
    row: tuple[int, ...]
    """The shape of one of its rows."""
    is_scalar: bool


def _is_list(metric: Metric, name: str) -> bool:
    return isinstance(metric._defaults[name], list) and metric._reductions[name] in (None, dim_zero_cat)


def _kinds(values: Any) -> list[_Kind] | None:
    if not isinstance(values, list) or not all(isinstance(value, Tensor) for value in values):
        return None
    return [_Kind(value.dtype, tuple(value.shape[1:]), value.dim() == 0) for value in values]


def _as_rows(value: Tensor) -> Tensor:
    return value.reshape(1) if value.dim() == 0 else value


def _real(values: Iterator[Tensor], of_ranks: list[list[_Kind]], element: int) -> Iterator[Tensor]:
    """Those of the next values that are an element of a rank's."""
    for kinds, value in zip(of_ranks, values, strict=False):
        if element < len(kinds):
            yield value.reshape(()) if kinds[element].is_scalar else value
