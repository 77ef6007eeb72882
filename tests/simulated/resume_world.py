"""Epochs of the real loader's code on ranks that are threads of one process, stopped and gone on with."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rank_cases import Case, patches_of

from odb_lightning.batch import StepInfo
from odb_lightning.epoch_rest import Start, start_from
from odb_lightning.resume import EpochPlace, Rounds, State, check_settings, check_states
from odb_lightning.runtime.counting import TargetCounter
from odb_lightning.runtime.epoch import EpochRun
from odb_lightning.runtime.exchange import SoloExchange
from odb_lightning.runtime.fetch import Fetcher
from odb_lightning.runtime.presence import Presence
from odb_lightning.runtime.settings import EpochRequest, LoaderSettings, LoaderStats, Timeouts
from odb_lightning.runtime.stand_in import StandIn

_MEETING_SECONDS = 30.0
SEED = 7


class _Meeting:
    """Where threads wait for each other."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=_MEETING_SECONDS)
        self.given: list[list[Any]] = [[] for _ in range(world_size)]

    def reduce(self, rank: int, values: Sequence[Any], how: Callable[[Any], Any]) -> list[Any]:
        self.given[rank] = list(values)
        self.barrier.wait()
        result = [how(column) for column in zip(*self.given, strict=True)]
        self.barrier.wait()
        return result


class _Exchange(SoloExchange):
    def __init__(self, meeting: _Meeting, rank: int, world_size: int) -> None:
        super().__init__(Presence())
        self.rank, self.world_size, self._meeting = rank, world_size, meeting

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        return self._meeting.reduce(self.rank, values, max)

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        return self._meeting.reduce(self.rank, values, sum)

    def broadcast(self, payload: bytes | None, source: int) -> bytes:
        (found,) = self._meeting.reduce(self.rank, [payload], lambda column: column[source])
        return bytes(found)


class _Fetcher(Fetcher):
    """Without a limit, which is for main threads."""

    def __init__(self, settings: LoaderSettings) -> None:
        super().__init__(settings)
        self._limit: Any = contextlib.nullcontext()

    def close(self) -> None:
        """Its file would be open until garbage is collected."""
        self._current.close()


class _DataSet:
    """A sample is its id, its length and its patches."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        self.fetched.append(index)
        return index, self.lengths[index], patches_of(self.lengths[index])


def _length(sample: tuple[int, int, int]) -> int:
    return sample[1]


def _patches(sample: tuple[int, int, int]) -> int:
    return sample[2]


def _ids(samples: list[tuple[int, int, int]]) -> list[int]:
    return [sample[0] for sample in samples]


class _Messages:
    """Takes what a collate process would send."""

    def __init__(self) -> None:
        self.while_waiting: Callable[[], None] = lambda: None
        self.messages: list[tuple[str, Any, Any]] = []

    def send(self, kind: str, facts: Any, payload: Any = None) -> None:
        self.messages.append((kind, facts, payload))


@dataclass
class RankEpoch:
    """What one rank saw of an epoch, or of the rest of one."""

    infos: list[StepInfo]
    states: list[State]
    """After each step."""
    fetched: list[int]
    stats: LoaderStats
    start: Start


@dataclass
class Epoch:
    ranks: list[RankEpoch]

    @property
    def steps(self) -> list[list[tuple[Any, ...]]]:
        """Per step and rank the sample ids."""
        assert len({len(rank.infos) for rank in self.ranks}) == 1, "the same number of steps on all ranks"
        return [[info.sample_ids for info in step] for step in zip(*(rank.infos for rank in self.ranks), strict=True)]

    @property
    def numbers(self) -> list[list[Any]]:
        """Per step and rank all that is said of it."""
        return [list(step) for step in zip(*(rank.infos for rank in self.ranks), strict=True)]

    @property
    def trained(self) -> list[Any]:
        return [sample_id for step in self.steps for group in step for sample_id in group]

    def states(self, step: int) -> list[State]:
        """Of all ranks after a step, as another process would read them."""
        states: list[State] = json.loads(json.dumps([rank.states[step] for rank in self.ranks]))
        return states

    def numbers_of_states(self) -> list[list[State]]:
        return [self.states(step) for step in range(len(self.steps))]


@dataclass(frozen=True)
class World:
    """The loaders of all ranks, but for their processes."""

    case: Case
    accumulate: int = 1
    max_steps: int | None = None
    oversize: Any = "emit"
    dealt_to: int | None = None
    """The views of all shards are dealt to so many ranks; None: to each rank its own shard."""
    changed: dict[str, Any] = field(default_factory=dict)
    """Other settings."""

    def __hash__(self) -> int:
        return id(self)

    @property
    def world_size(self) -> int:
        return len(self.case.shards) if self.dealt_to is None else self.dealt_to

    @property
    def lengths(self) -> list[int]:
        return [length for shard in self.case.shards for length in shard]

    def base(self, rank: int, world_size: int) -> list[int]:
        """What the sampler gives."""
        if self.dealt_to is not None:
            return list(range(len(self.lengths)))[rank::world_size]
        start = sum(map(len, self.case.shards[:rank]))
        return list(range(start, start + len(self.case.shards[rank])))

    def settings(self, rank: int, dataset: Any) -> LoaderSettings:
        case, rules = self.case, self.case.rules
        settings = LoaderSettings(
            dataset=dataset,
            collate_fn=_ids,
            length_fn=_length,
            num_supervised_fn=len,
            worker_init_fn=None,
            l_max=case.l_max,
            buffer_size=case.buffer_size,
            max_rows=case.max_rows,
            alignment=rules.alignment,
            budget=rules.budget,
            cost=rules.cost,
            patches_fn=_patches if rules.max_patches is not None else None,
            max_patches=rules.max_patches,
            oversize=self.oversize,
            empty="drop",
            mode="join" if case.joins else "non_join",
            quota=case.quota,
            sharding="auto",
            shuffle=case.order_seed is not None,
            seed=SEED,
            num_workers=0,
            prefetch_factor=None,
            chunk_size=max(case.buffer_size // 2, 1),
            persistent_workers=False,
            start_method=None,
            timeouts=Timeouts(),
            rank=rank,
            world_size=self.world_size,
        )
        return replace(settings, **self.changed)

    def run(self, states: Sequence[State] | None = None) -> Epoch:
        """Epoch 0, or what follows on the states of all ranks of a moment."""
        meeting = _Meeting(self.world_size)
        found: dict[int, RankEpoch] = {}
        errors: list[BaseException] = []

        def run_rank(rank: int) -> None:
            try:
                found[rank] = self._run_rank(rank, meeting, states)
            except BaseException as error:
                errors.append(error)
                meeting.barrier.abort()

        threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * _MEETING_SECONDS)
            assert not thread.is_alive(), "hangs"
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return Epoch([found[rank] for rank in range(self.world_size)])

    def _run_rank(self, rank: int, meeting: _Meeting, states: Sequence[State] | None) -> RankEpoch:
        dataset = _DataSet(self.lengths)
        settings = self.settings(rank, dataset)
        knobs = {name: value for name, value in settings.shared_knobs().items() if name != "world_size"}
        kind = "each rank's own" if self.dealt_to is None else "the default"
        knobs |= {"accumulate": self.accumulate, "sampler": kind, "len(dataset)": len(dataset)}
        place = EpochPlace(0, rank, self.world_size, knobs, (), None)
        start = Start(self.base(rank, self.world_size))
        if states is not None:
            check_states(states)
            start = start_from(states, place, self.base, check_settings(states, knobs))
        place = replace(place, views=start.views, origin=start.origin)
        request = EpochRequest(
            epoch=0,
            views=start.views,
            reshuffles=settings.shuffle,
            accumulate=self.accumulate,
            max_steps=self.max_steps,
            store=None,
            before=None,
            data_knobs={},
            first_step=start.step,
            first_samples=start.num_samples,
            resume=start.round_state,
        )
        sender, counter = _Messages(), TargetCounter(len)
        stand_in = StandIn(_ids, counter)
        fetcher = _Fetcher(settings)
        run = EpochRun(settings, request, fetcher, sender, counter, stand_in)  # type: ignore[arg-type]
        run.run(_Exchange(meeting, rank, self.world_size))
        fetcher.close()
        return RankEpoch(*self._received(sender.messages, place), dataset.fetched, *self._stats(sender.messages), start)

    @staticmethod
    def _received(messages: list[tuple[str, Any, Any]], place: EpochPlace) -> tuple[list[StepInfo], list[State]]:
        """As the training process takes them."""
        rounds, infos, states = Rounds(), [], []
        for kind, facts, payload in messages:
            if kind == "batch":
                info, _, new_rounds, resume = facts
                assert info.is_idle or payload == list(info.sample_ids)
                infos.append(info)
                states.append(rounds.position(place, new_rounds, *resume).state_dict())
        return infos, states

    @staticmethod
    def _stats(messages: list[tuple[str, Any, Any]]) -> Iterator[LoaderStats]:
        total = LoaderStats()
        for kind, facts, _ in messages:
            if kind == "batch" and facts[1] is not None:
                total.add(facts[1])
            elif kind == "end":
                total.add(facts)
        yield total
