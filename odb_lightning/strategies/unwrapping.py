"""A loader as the trainer sees it: plain batches, with what is known of each kept in order for the strategy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from odb_lightning.batch import ODBBatch, StepInfo
from odb_lightning.loader import ODBDataLoader


def _do_nothing() -> None:
    pass


class UnwrappingLoader:
    """Takes `ODBBatch`es apart before any hook sees them. Batches that are none go through as they are.

    An idle step yields the stand-in. Infos are taken from `infos` in the order in which batches were yielded: trainers fetch
    ahead, but never reorder. `batches` begins an epoch of `loader`. With `marks_last` the last batch of an epoch is known as
    such, at the price of one held back.
    """

    def __init__(self, loader: Any, batches: Callable[[], Iterator[Any]], marks_last: bool = False) -> None:
        self.loader = loader
        self.infos: deque[StepInfo | None] = deque()
        self.last: StepInfo | None = None
        """That of the last batch of the epoch, once it was yielded."""
        self.on_request: Callable[[], None] = _do_nothing
        """Called when a batch is asked for: where a trainer begins that one or, if it fetches one ahead, the one before."""
        self.position: int | None = None
        """Where the info that was taken last belongs."""
        self._info: StepInfo | None = None
        self._begin = batches
        self._marks_last = marks_last

    def __iter__(self) -> Iterator[Any]:
        self.infos.clear()
        self._info = self.position = None
        return self._unwrapped(self._begin())

    def info_at(self, position: int) -> StepInfo | None:
        """That of the batch at `position`: the next one's, unless it was asked for before or there is none left."""
        if position != self.position and self.infos:
            self.position, self._info = position, self.infos.popleft()
        return self._info

    def _unwrapped(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.last = None
        self.on_request()
        for batch, is_last in _knowing_the_last(batches) if self._marks_last else ((batch, False) for batch in batches):
            info = batch.step if isinstance(batch, ODBBatch) else None
            self.infos.append(info)
            if is_last:
                self.last = info
            yield batch if info is None else batch.stand_in if info.is_idle else batch.data
            self.on_request()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class UnwrappingODBLoader(UnwrappingLoader):
    """Where an ODBDataLoader is goes into checkpoints otherwise (see `resume`): Lightning would ask it for its state one batch
    too late, and on rank 0 alone."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing."""


class SizedUnwrappingLoader(UnwrappingLoader):
    """For a loader that has a length."""

    def __len__(self) -> int:
        return len(self.loader)


class StatefulUnwrappingLoader(UnwrappingLoader):
    """For a loader with a state of its own. As methods: Lightning asks for a protocol, which from Python 3.12 on does not see
    what `__getattr__` gives."""

    def state_dict(self) -> Any:
        """The loader's."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Into the loader."""
        self.loader.load_state_dict(state)


class SizedStatefulUnwrappingLoader(SizedUnwrappingLoader, StatefulUnwrappingLoader):
    """For a loader with both."""


def unwrapping(loader: Any, batches: Callable[[], Iterator[Any]], marks_last: bool = False) -> UnwrappingLoader:
    """The proxy for a loader: sized, or with a state, if the loader is."""
    if isinstance(loader, ODBDataLoader):
        return UnwrappingODBLoader(loader, batches, marks_last)
    is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    if length_of(loader) is None:
        return (StatefulUnwrappingLoader if is_stateful else UnwrappingLoader)(loader, batches, marks_last)
    return (SizedStatefulUnwrappingLoader if is_stateful else SizedUnwrappingLoader)(loader, batches)


def length_of(loader: Any) -> int | None:
    """The number of batches, if the loader knows it."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _knowing_the_last(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last."""
    held: list[Any] = []
    for batch in batches:
        if held:
            yield held.pop(), False
        held.append(batch)
    for batch in held:
        yield batch, True
