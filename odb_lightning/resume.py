"""The state of a loader: where each rank was in an epoch, and whether another run can go on from there."""

from __future__ import annotations

import bisect
import functools
import json
import warnings
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from odb_lightning.runtime.round_state import RoundState

_VERSION = 1
_KEYS = frozenset(
    ["version", "epoch", "step", "num_samples", "is_finished", "rank", "world_size", "settings", "views", "round", "origin"]
)
_SHARED = ("epoch", "step", "is_finished", "world_size", "num_samples", "settings")
"""The same on all ranks at one moment."""
_PLANNED_WITH = ("l_max", "buffer_size", "max_rows", "budget", "cost", "max_patches", "alignment", "oversize", "empty")
"""Options that may change: then the rest of the epoch is planned anew."""
_FIXED = {
    "seed": "it decides the order of samples and their random transforms",
    "shuffle": "it decides the order of samples",
    "len(dataset)": "the samples that are left can't be told any more",
    "sampler": "the samples that are left can't be told any more",
    "mode": "it decides which samples an epoch has",
    "quota": "it decides where the epoch ends",
    "num_workers": "it decides the order of the samples of an iterable data set",
    "chunk_size": "it decides the order of the samples of an iterable data set (it follows from buffer_size and num_workers)",
    "sharding": "it decides which process reads what",
}

State = dict[str, Any]
Views = Sequence[Hashable] | np.ndarray[Any, Any]


@dataclass(frozen=True)
class EpochPlace:
    """What is the same for all batches of an epoch on a rank."""

    epoch: int
    rank: int
    world_size: int
    settings: dict[str, Any]
    """The loader's options, as far as a state depends on them."""
    views: Views | None
    """This rank's sample ids in the order of the sampler; None for an iterable data set."""
    origin: State | None
    """What the views are the rest of, if they are one."""

    @functools.cached_property
    def _summary(self) -> dict[str, int] | None:
        return summary_of(self.views)

    def state(self, step: int, num_samples: int, round_state: RoundState | None, is_finished: bool = False) -> State:
        """Plain containers of numbers and text."""
        if self.views is None and self.settings["mode"] != "join":
            raise NotImplementedError("an iterable data set in non_join has no state: its passes overlap")
        state = {
            "version": _VERSION,
            "epoch": self.epoch,
            "step": step,
            "num_samples": num_samples,
            "is_finished": is_finished,
            "rank": self.rank,
            "world_size": self.world_size,
            "settings": self.settings,
            "views": self._summary,
            "round": None if round_state is None else round_state.to_dict(),
            "origin": self.origin,
        }
        return state | {"checksum": _checksum(state)}


class Position:
    """Where a rank is when a batch was trained. It is bound to its process: a copy of a batch that is sent away has none."""

    __slots__ = ("_num_samples", "_place", "_round", "_step")

    def __init__(self, place: EpochPlace, round_state: RoundState, step: int, num_samples: int) -> None:
        self._place, self._round, self._step, self._num_samples = place, round_state, step, num_samples

    def state_dict(self) -> State:
        """The loader's state: see `ODBDataLoader.state_dict`."""
        return self._place.state(self._step, self._num_samples, self._round.at(self._step, self._num_samples))

    def __deepcopy__(self, _: Any) -> Position:
        return self

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    return None


class Rounds:
    """The rounds that batches in training may have to be taken up in."""

    def __init__(self) -> None:
        self._rounds: list[RoundState] = []

    def position(self, place: EpochPlace, new: list[RoundState], step: int, num_samples: int) -> Position:
        """Of a batch that came with `new` rounds, if the run goes on at `step`."""
        self._rounds += new
        index = bisect.bisect_right([found.first_step for found in self._rounds], step) - 1
        del self._rounds[:index]
        return Position(place, self._rounds[0], step, num_samples)


def summary_of(views: Views | None) -> dict[str, int] | None:
    return None if views is None else {"number": len(views), "checksum": checksum_of(views)}


def checksum_of(views: Views) -> int:
    """The same for the same sample ids in the same order."""
    if isinstance(views, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(views, dtype=np.int64).tobytes())
    return zlib.crc32(repr([view.item() if isinstance(view, np.generic) else view for view in views]).encode())


def _checksum(state: State) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True, default=repr).encode())  # an iterable data set's own may be of any kind


def _is_whole(state: State) -> bool:
    try:
        return bool(state["checksum"] == _checksum({key: value for key, value in state.items() if key != "checksum"}))
    except (TypeError, ValueError):  # what JSON does not know
        return False


def check_states(states: Sequence[State]) -> None:
    """Raises ValueError for what is no state of a loader, or was damaged, and for states that do not belong together."""
    for state in states:
        if not isinstance(state, dict) or state.keys() != _KEYS | {"checksum"}:
            raise ValueError(f"this is no state of an ODBDataLoader, or it is damaged: {_shortened(state)}")
        if state["version"] != _VERSION:
            raise ValueError(f"the loader's state has version {state['version']}, and this is known: {_VERSION}")
        if not _is_whole(state):
            raise ValueError("the loader's state is damaged: its checksum is not that of its content")
    for name in _SHARED:
        values = [state[name] for state in states]
        if any(value != values[0] for value in values):
            raise ValueError(f"the loader's states are not of one moment of one run: {name} is {values}")
    ranks = [state["rank"] for state in states]
    if len(states) > 1 and ranks != list(range(states[0]["world_size"])):
        raise ValueError(f"the loader's states are of ranks {ranks}; give one of each rank, in their order")


def _shortened(state: object) -> str:
    return f"{sorted(map(str, state))}" if isinstance(state, dict) else f"a {type(state).__name__}"


def check_can_be_read_again(states: Sequence[State], skips_ahead: bool) -> None:
    """Raises ValueError for an iterable data set that says nothing of where its readers were, unless it is to be read from its
    beginning."""
    for state in states:
        readers = None if state["round"] is None else state["round"]["readers"]
        if readers is None or readers["can_go_on"] or (state["round"]["is_exhausted"] and not state["round"]["places"]):
            continue
        if not skips_ahead:
            raise ValueError(
                "the iterable data set has no state of its own, or one that leaves out the samples that it shuffles in a "
                "buffer, so it can't be gone on with from the middle of an epoch: "
                "give it state_dict() and load_state_dict(), or have it read again from its beginning, without what was "
                "trained before (skip_ahead=True), which takes as long as reading that"
            )
        warnings.warn(
            f"the iterable data set is read again from its beginning: the first {state['round']['num_taken']} samples of "
            f"rank {state['rank']} are read, and those trained before are left out",
            stacklevel=4,
        )
        return


def check_settings(states: Sequence[State], settings: dict[str, Any]) -> list[str]:
    """What is said of the options that have changed since, and only mean that the rest of the epoch is planned anew. Raises
    ValueError for others."""
    before, step = states[0]["settings"], states[0]["step"]
    for name, reason in _FIXED.items():
        if before.get(name) != settings.get(name):
            raise ValueError(
                f"{name} was {before.get(name)!r} when the loader's state was saved and is {settings.get(name)!r} now: "
                f"{reason}. Set it back, or begin a new epoch without the state"
            )
    if before["accumulate"] != settings["accumulate"] and step % settings["accumulate"]:
        raise ValueError(
            f"the state is at step {step} of epoch {states[0]['epoch']} and was saved with accumulate={before['accumulate']}: "
            f"windows of accumulate={settings['accumulate']} steps do not begin there"
        )
    if is_between_epochs(states[0]):
        return []
    changes = [
        f"{name} was {before[name]!r} and is {settings[name]!r}" for name in _PLANNED_WITH if before[name] != settings[name]
    ]
    if changes and (settings["mode"] != "join" or "sharding" in settings):
        refuse_anew(changes)
    return changes


def is_between_epochs(state: State) -> bool:
    """Before the first batch of one, or after the last."""
    return state["round"] is None and state["origin"] is None


def refuse_anew(changes: Sequence[str]) -> NoReturn:
    raise ValueError(
        f"{'; '.join(changes)}: the rest of an epoch can't be planned anew in non_join, as its passes overlap, and of an "
        "iterable data set, which gives no sample by name. Set it back, or begin a new epoch without the state"
    )
