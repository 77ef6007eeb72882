"""Running a module without a trace: an idle rank takes part in collectives, and everything else is as if it had not."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from odb_lightning.batch import ODBBatch
from odb_lightning.strategies.metrics import OF_ANY_MODULE

_BATCH_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.LazyBatchNorm1d,
    nn.LazyBatchNorm2d,
    nn.LazyBatchNorm3d,
)


class BorrowedBuffers:
    """Copies in the place of a module's buffers, from `take` until `give_back`.

    The originals are not touched, so a graph that holds a copy stays valid and no value has to be written back. A part below
    the module that puts a new buffer in the place of a copy gets its other attributes back, too: they may say what it is of.
    """

    def __init__(self) -> None:
        self._originals: list[tuple[nn.Module, dict[str, Tensor | None], dict[str, Tensor | None], dict[str, Any]]] = []
        """Of each part its buffers, the copies in their place, and its other attributes."""

    def take(self, module: nn.Module) -> None:
        """Puts the copies in place; one of a tensor with several names."""
        self.give_back()
        copies: dict[int, Tensor] = {}
        for part in module.modules():
            originals = dict(part._buffers)
            for name, buffer in originals.items():
                if buffer is not None:
                    part._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
            has_more = bool(originals) and part is not module
            own = {name: value for name, value in vars(part).items() if name not in OF_ANY_MODULE} if has_more else {}
            self._originals.append((part, originals, dict(part._buffers), own))

    def give_back(self) -> None:
        """Puts the originals back, and none where there was none; without effect if nothing was taken."""
        for part, originals, lent, own in self._originals:
            if any(part._buffers.get(name) is not buffer for name, buffer in lent.items()):
                vars(part).update(own)
            for name in part._buffers.keys() - originals.keys():
                del part._buffers[name]
            part._buffers.update(originals)
        self._originals = []


def gradient_leaves(loss: Tensor) -> Iterator[Tensor]:
    """The tensors that a backward of `loss` accumulates gradients in. Of sharded parameters these are the gathered ones."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]
        nodes.extend(following for following, _ in node.next_functions)


@contextmanager
def zeroed_gradients(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Every gradient that reaches one of `leaves` inside is replaced by zeros, NaN and infinity included (times zero is not
    enough for those), while hooks and collectives run as ever."""
    distinct = {id(leaf): leaf for leaf in leaves if leaf.requires_grad}
    hooks: list[RemovableHandle] = [leaf.register_hook(torch.zeros_like) for leaf in distinct.values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _FrozenDataclass(ABC):  # noqa: B024
    """What `apply_to_collection` can't write the results to."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return is_dataclass(other) and bool(other.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def enough_for_batch_norm(batches: Iterator[Any], module: nn.Module) -> Iterator[Any]:
    """The same batches, with stand-ins of two rows if the module has a BatchNorm, which in training mode refuses one."""
    if not any(isinstance(part, _BATCH_NORMS) for part in module.modules()):
        return batches
    return (
        ODBBatch(batch.data, batch.step, _with_two_rows(batch.stand_in))
        if isinstance(batch, ODBBatch) and batch.step.is_idle
        else batch
        for batch in batches
    )


def _with_two_rows(data: Any) -> Any:
    return apply_to_collection(data, (Tensor, _FrozenDataclass), _doubled)


def _doubled(part: Any) -> Any:
    if not isinstance(part, Tensor):
        return replace(part, **{field.name: _with_two_rows(getattr(part, field.name)) for field in fields(part) if field.init})
    return torch.cat([part, part]) if part.dim() > 0 and len(part) == 1 else part
