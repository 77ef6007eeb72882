"""What is left of an epoch where another run goes on from the states of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from odb_lightning.resume import EpochPlace, State, is_between_epochs, refuse_anew, summary_of
from odb_lightning.runtime.round_state import RoundState
from odb_lightning.runtime.seeding import derive_seed


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
    if is_between_epochs(first):
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
        refuse_anew([f"world_size was {first['world_size']} and is {place.world_size}"])
    if not is_same and place.settings["sampler"] == "each rank's own":
        raise ValueError(
            f"world_size was {first['world_size']} and is {place.world_size}: what is left of a sampler of each rank's own "
            "can't be dealt to others (the default sampler, or deal_sampler=True, can)"
        )
    origin = _origin_of(own if is_same else states, deals=not is_same)
    views = samples.rest(origin, place.rank, place.world_size)
    return Start(views, step, num_samples, None, origin, tuple(samples.done_before(origin)))


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
        if summary_of(views) != state["views"]:
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
