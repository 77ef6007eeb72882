"""A loader as the trainer sees it: plain batches, with what is known of each kept in order for the strategy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from odb_lightning.batch import ODBBatch, StepInfo
from odb_lightning.loader import ODBDataLoader


class UnwrappingLoader:
    """Takes `ODBBatch`es apart before any hook sees them. Batches that are none go through as they are.

    An idle step yields the stand-in. Infos are taken from `infos` in the order in which batches were yielded: trainers fetch
    ahead, but never reorder. With `marks_last` the last batch of an epoch is known as such, at the price of one held back.
    """

    def __init__(self, loader: Any, epoch: Callable[[], int], marks_last: bool = False) -> None:
        self.loader = loader
        self.infos: deque[StepInfo | None] = deque()
        self.last: StepInfo | None = None
        """That of the last batch of the epoch, once it was yielded."""
        self._epoch = epoch
        self._marks_last = marks_last

    def __iter__(self) -> Iterator[Any]:
        self.infos.clear()
        if isinstance(self.loader, ODBDataLoader):
            # Lightning tells nobody but samplers of the epoch, and those after the first batch was drawn.
            self.loader.set_epoch(self._epoch())
        return self._batches(iter(self.loader))

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.last = None
        for batch, is_last in _knowing_the_last(batches) if self._marks_last else ((batch, False) for batch in batches):
            info = batch.step if isinstance(batch, ODBBatch) else None
            self.infos.append(info)
            if is_last:
                self.last = info
            yield batch if info is None else batch.stand_in if info.is_idle else batch.data

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class SizedUnwrappingLoader(UnwrappingLoader):
    """For a loader that has a length."""

    def __len__(self) -> int:
        return len(self.loader)


def unwrapping(loader: Any, epoch: Callable[[], int], marks_last: bool = False) -> UnwrappingLoader:
    """The proxy for a loader; sized if the loader is."""
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return UnwrappingLoader(loader, epoch, marks_last)
    return SizedUnwrappingLoader(loader, epoch)


def _knowing_the_last(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last."""
    held: list[Any] = []
    for batch in batches:
        if held:
            yield held.pop(), False
        held.append(batch)
    for batch in held:
        yield batch, True
