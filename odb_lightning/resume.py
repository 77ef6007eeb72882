"""The state of a loader: where each rank was in an epoch, and how another run goes on from there."""

from __future__ import annotations

import bisect
import functools
import json
import warnings
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from odb_lightning.runtime.round_state import RoundState
from odb_lightning.runtime.seeding import derive_seed

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
        return _summary_of(self.views)

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


def _summary_of(views: Views | None) -> dict[str, int] | None:
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
    if _is_between_epochs(states[0]):
        return []
    changes = [
        f"{name} was {before[name]!r} and is {settings[name]!r}" for name in _PLANNED_WITH if before[name] != settings[name]
    ]
    if changes and (settings["mode"] != "join" or "sharding" in settings):
        _refuse_anew(changes)
    return changes


def _is_between_epochs(state: State) -> bool:
    """Before the first batch of one, or after the last."""
    return state["round"] is None and state["origin"] is None


@dataclass(frozen=True)
class Start:
    """Where a rank begins in an epoch."""

    views: Any
    step: int = 0
    num_samples: int = 0
    round_state: RoundState | None = None
    origin: State | None = None
    done_ids: tuple[Hashable, ...] = ()
    """Samples that need no further training in this epoch."""


BaseViews = Callable[[int, int], Any]
"""The sampler's ids of a rank, of so many."""


def start_from(states: Sequence[State], place: EpochPlace, base: BaseViews, changes: list[str]) -> Start:
    """How `place.rank` goes on from the states of one moment: its own, or those of all ranks. With the same world size and
    options, exactly as it would have; else (`changes`) with what is left of the epoch, planned anew.

    Raises ValueError for a state that is not this rank's, and for samples that are not those of the state.
    """
    first = states[0]
    own = [state for state in states if state["rank"] == place.rank]
    is_same = first["world_size"] == place.world_size
    if is_same and not own:
        raise ValueError(f"the loader's state is that of rank {first['rank']}, and this is rank {place.rank}")
    if _is_between_epochs(first):
        return Start(base(place.rank, place.world_size))
    if not is_same and len(states) != first["world_size"]:
        raise ValueError(
            f"the loader's state is of world_size={first['world_size']}, and this is {place.world_size}: what is left of the "
            "epoch can be dealt to the ranks anew, given the states of all ranks (a list, in their order)"
        )
    step, num_samples, samples = first["step"], first["num_samples"], _Samples(base)
    if is_same and not changes:
        (state,) = own
        round_state = None if state["round"] is None else RoundState.from_dict(state["round"])
        return Start(samples.views(state), step, num_samples, round_state, state["origin"], tuple(samples.done(state)))
    if place.settings["mode"] != "join" or "sharding" in place.settings:
        _refuse_anew([f"world_size was {first['world_size']} and is {place.world_size}"])
    if not is_same and place.settings["sampler"] == "each rank's own":
        raise ValueError(
            f"world_size was {first['world_size']} and is {place.world_size}: what is left of a sampler of each rank's own "
            "can't be dealt to others (the default sampler, or deal_sampler=True, can)"
        )
    origin = _origin_of(own if is_same else states, deals=not is_same)
    views = samples.rest(origin, place.rank, place.world_size)
    return Start(views, step, num_samples, None, origin, tuple(samples.done_before(origin)))


def _refuse_anew(changes: Sequence[str]) -> NoReturn:
    raise ValueError(
        f"{'; '.join(changes)}: the rest of an epoch can't be planned anew in non_join, as its passes overlap, and of an "
        "iterable data set, which gives no sample by name. Set it back, or begin a new epoch without the state"
    )


def _origin_of(states: Sequence[State], *, deals: bool) -> State:
    """What their rest is the rest of; what the states are themselves the rest of is in it once."""
    before = states[0]["origin"]
    if all(state["origin"] == before for state in states):
        return {"deals": deals, "before": before, "states": [state | {"origin": None} for state in states]}
    return {"deals": deals, "before": None, "states": list(states)}


class _Samples:
    """The samples that states count, worked out once each: what is left of an epoch that was dealt anew is needed for each of
    the ranks that went on with it."""

    def __init__(self, base: BaseViews) -> None:
        self._base = base
        self._rest_of: dict[Hashable, list[Hashable]] = {}
        self._is_told: set[Hashable] = set()

    def views(self, state: State, before: State | None = None) -> Any:
        """What the places of a state count; it is of an origin's states if `before` is what that was the rest of."""
        rank, world_size, origin = state["rank"], state["world_size"], state["origin"] or before
        views = self._base(rank, world_size) if origin is None else self.rest(origin, rank, world_size)
        if _summary_of(views) != state["views"]:
            raise ValueError(
                f"rank {rank} has {len(views)} samples in epoch {state['epoch']}, which are not the {state['views']['number']} "
                "of the loader's state: the data set or the sampler has changed, or the sampler's order is a different one "
                "each time (seed it by the epoch, in set_epoch)"
            )
        return views

    def done(self, state: State, before: State | None = None) -> list[Hashable]:
        """Trained or left out before the state's moment. In a further pass of non-join nothing is: it begins anew."""
        views, origin = self.views(state, before), state["origin"]
        done = [] if origin is None else self.done_before(origin)
        if state["round"] is None or views is None:
            return done
        found = RoundState.from_dict(state["round"])
        held, taken = set(found.places), views[: found.num_taken]
        if isinstance(taken, np.ndarray):
            return done + np.delete(taken, [place for place in held if place < len(taken)]).tolist()
        return done + _plain(sample_id for place, sample_id in enumerate(taken) if place not in held)

    def done_before(self, origin: State) -> list[Hashable]:
        """Trained or left out when the rest began; nothing the second time."""
        if (key := _key_of(origin)) in self._is_told:
            return []
        self._is_told.add(key)
        before = origin["before"]
        done = [] if before is None else self.done_before(before)
        return done + [sample_id for state in origin["states"] for sample_id in self.done(state, before)]

    def rest(self, origin: State, rank: int, world_size: int) -> list[Hashable]:
        """What is left of the views of one rank; of those of all ranks, this rank's part."""
        if (key := _key_of(origin)) not in self._rest_of:
            self._rest_of[key] = self._all_of(origin)
        return self._rest_of[key][rank::world_size] if origin["deals"] else self._rest_of[key]

    def _all_of(self, origin: State) -> list[Hashable]:
        states = origin["states"]
        everything = [sample_id for state in states for sample_id in _left(state, self.views(state, origin["before"]))]
        if origin["deals"] and states[0]["settings"]["shuffle"]:
            seed = derive_seed(states[0]["settings"]["seed"], states[0]["epoch"], "rest", states[0]["step"])
            order = np.random.default_rng(seed).permutation(len(everything))
            return [everything[index] for index in order]
        return everything


def _key_of(origin: State) -> Hashable:
    return origin["deals"], *(state["checksum"] for state in origin["states"])


def _left(state: State, views: Any) -> list[Hashable]:
    if state["round"] is None:
        return list(views)
    found = RoundState.from_dict(state["round"])
    return _plain([*(views[place] for place in sorted(found.places)), *views[found.num_taken :]])


def _plain(sample_ids: Iterable[Any]) -> list[Hashable]:
    return [sample_id.item() if isinstance(sample_id, np.generic) else sample_id for sample_id in sample_ids]
