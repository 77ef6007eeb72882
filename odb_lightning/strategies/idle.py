"""Running a module without a trace: an idle rank takes part in collectives, and everything else is as if it had not.

Reads private attributes of torchmetrics (`_defaults`, `_update_count`, `_computed`, `_forward_cache`) and of Lightning's result
collection (`trainer._results`), which have no public counterpart; `tests/traps` holds what this relies on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from odb_lightning.batch import ODBBatch
from odb_lightning.runtime.seeding import preserved_random_state

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_METRIC_ATTRIBUTES = ("_update_count", "_computed", "_forward_cache")


class BorrowedBuffers:
    """Copies in the place of a module's buffers, from `take` until `give_back`.

    The originals are not touched, so a graph that holds a copy stays valid and no value has to be written back.
    """

    def __init__(self) -> None:
        self._originals: list[tuple[nn.Module, str, Tensor]] = []

    def take(self, module: nn.Module) -> None:
        """Puts the copies in place."""
        self.give_back()
        for part in module.modules():
            for name, buffer in list(part.named_buffers(recurse=False)):
                self._originals.append((part, name, buffer))
                setattr(part, name, buffer.clone())

    def give_back(self) -> None:
        """Puts the originals back; without effect if nothing was taken."""
        for part, name, buffer in self._originals:
            setattr(part, name, buffer)
        self._originals = []


@contextmanager
def without_a_trace(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Puts back at the end: random state, the metrics in `module`, and what it logged.

    A value logged with `sync_dist` for the step stays: it is that of the active ranks. One logged for the epoch keeps its
    entry, with weight zero, as its reduction at the epoch's end is a collective.
    """
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    results: dict[str, Any] | None = trainer._results
    logged = dict(results or {})
    saved = [(metric, _metric_state(metric)) for metric in [*metrics, *logged.values()]]
    with preserved_random_state():
        yield
    for metric, state in saved:
        _restore_metric(metric, state)
    for key, entry in (results or {}).items():
        if key not in logged:
            step_value = entry._forward_cache
            if entry.is_tensor:
                entry.reset()
            entry.has_reset = False
            entry._forward_cache = step_value if _is_synced(entry) else None


def _is_synced(metric: Any) -> bool:
    meta = getattr(metric, "meta", None)
    return meta is not None and meta.sync.should


def _metric_state(metric: Metric) -> dict[str, Any]:
    state = {name: getattr(metric, name) for name in _METRIC_ATTRIBUTES}
    for name in metric._defaults:
        value = getattr(metric, name)
        state[name] = list(value) if isinstance(value, list) else value.clone() if isinstance(value, Tensor) else value
    return state


def _restore_metric(metric: Metric, state: dict[str, Any]) -> None:
    for name, value in state.items():
        if name != "_forward_cache" or not _is_synced(metric):
            setattr(metric, name, value)


@contextmanager
def zeroed_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Every gradient that reaches a parameter inside is replaced by zeros, NaN and infinity included (times zero is not
    enough for those), while hooks and collectives run as ever."""
    hooks: list[RemovableHandle] = [
        parameter.register_hook(torch.zeros_like) for parameter in parameters if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def enough_for_batch_norm(batches: Iterator[Any], module: nn.Module) -> Iterator[Any]:
    """The same batches, with stand-ins of two rows if the module has a BatchNorm, which in training mode refuses one."""
    if not any(isinstance(part, _BATCH_NORMS) for part in module.modules()):
        return batches
    return (
        ODBBatch(batch.data, batch.step, apply_to_collection(batch.stand_in, Tensor, _with_two_rows))
        if isinstance(batch, ODBBatch) and batch.step.is_idle
        else batch
        for batch in batches
    )


def _with_two_rows(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor]) if tensor.dim() > 0 and len(tensor) == 1 else tensor
