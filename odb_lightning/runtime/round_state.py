"""Where a rank is in an epoch, in whole numbers: what a run that is resumed there has to know."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RoundState:
    """A rank's part of an epoch as one round was planned: what is emitted in it, and what stays in the window.

    A place is the number of a view in the order in which the sampler gave them, over all passes of the epoch.
    """

    first_step: int
    """Steps of the epoch before those of this round."""
    first_samples: int
    """Samples emitted in them, over all ranks."""
    num_rounds: int
    """Rounds up to and with this one."""
    num_observed: int
    """Tickets given out."""
    pass_start: int
    """Of them, those used up before this pass."""
    num_taken: int
    """Views taken from the sampler."""
    is_exhausted: bool
    """Whether this pass has no more of them."""
    group_sizes: list[int]
    """Samples in this rank's group of each step of the round; 0 where it is idle."""
    tickets: list[int]
    """Of the samples at hand: those of the groups, one group after the other, and then those left in the window."""
    places: list[int]
    lengths: list[int]
    patches: list[int]
    readers: dict[str, Any] | None = None
    """Of an iterable data set: see `Readers.at`."""

    def at(self, step: int, num_samples: int) -> RoundState:
        """The same without the steps before `step`; `num_samples` were emitted in all of those."""
        num_done = step - self.first_step
        if not 0 <= num_done <= len(self.group_sizes):
            raise ValueError(f"step {step} is not in the round of steps {self.first_step} to {self.last_step}")
        start = sum(self.group_sizes[:num_done])
        return dataclasses.replace(
            self,
            first_step=step,
            first_samples=num_samples,
            group_sizes=self.group_sizes[num_done:],
            tickets=self.tickets[start:],
            places=self.places[start:],
            lengths=self.lengths[start:],
            patches=self.patches[start:],
        )

    @property
    def last_step(self) -> int:
        """The first step after the round."""
        return self.first_step + len(self.group_sizes)

    def groups(self) -> list[list[int]]:
        """Tickets of this rank's group in each step of the round."""
        tickets = iter(self.tickets)
        return [list(itertools.islice(tickets, size)) for size in self.group_sizes]

    def window(self) -> dict[int, tuple[int, int]]:
        """Lengths and patches, by ticket, of what stays in the window."""
        start = sum(self.group_sizes)
        sizes = zip(self.lengths[start:], self.patches[start:], strict=True)
        return dict(zip(self.tickets[start:], sizes, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Plain containers of whole numbers."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> RoundState:
        """As `to_dict` gave it. Raises ValueError if it can't have been."""
        if state.keys() != {item.name for item in dataclasses.fields(cls)}:
            raise ValueError("its entries are not those of a round")
        found = cls(**state)
        columns = (found.tickets, found.places, found.lengths, found.patches)
        if len(set(map(len, columns))) != 1 or sum(found.group_sizes) > len(found.tickets):
            raise ValueError("its columns are not equally long")
        return found


class Readers:
    """Of an iterable data set, whose samples are at places in the order in which its readers' messages arrive: where each
    reader was before the oldest sample at hand, so that it can be read again.

    Readers take turns; a cycle begins with the first of them that has something left.
    """

    def __init__(self, first_place: int, states: list[Any]) -> None:
        self._place = first_place
        self._states = list(states)
        self._last = -1
        self._can_go_on = any(state is not None for state in states)
        self._cycles: deque[tuple[int, list[Any]]] = deque([(first_place, list(states))])

    def arrived(self, reader: int, num_samples: int, state: Any) -> None:
        """A message; `state` is the reader's after it, None if it has none."""
        if reader <= self._last and state is not None:
            self._cycles.append((self._place, list(self._states)))
        self._last = reader
        self._can_go_on |= state is not None
        self._place += num_samples
        self._states[reader] = state

    def at(self, place: int) -> dict[str, Any]:
        """The place of the last cycle that begins before `place`, the state of each reader then (None: at its beginning), and
        whether they have states at all. Places asked for do not fall."""
        while len(self._cycles) > 1 and self._cycles[1][0] <= place:
            self._cycles.popleft()
        first_place, states = self._cycles[0]
        return {"first_place": first_place, "states": states, "can_go_on": self._can_go_on}
