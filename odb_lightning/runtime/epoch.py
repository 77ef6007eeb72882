"""One epoch in the collate process: observed, windowed, grouped, aligned, collated, summed, emitted."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from odb_lightning.batch import StepInfo
from odb_lightning.plan import AccumulationWindows, Outcome, RoundPlanner, exchange_blocks
from odb_lightning.plan.accumulation import SummedStep
from odb_lightning.runtime.codec import pack_samples, unpack_samples
from odb_lightning.runtime.counting import TargetCounter
from odb_lightning.runtime.errors import Failure, PeerFailure, RaisedFailure
from odb_lightning.runtime.exchange import Exchange, SoloExchange
from odb_lightning.runtime.fetch import Fetcher, Observed
from odb_lightning.runtime.presence import Presence
from odb_lightning.runtime.ring import BatchSender
from odb_lightning.runtime.round_state import RoundState
from odb_lightning.runtime.seeding import derive_seed, seed_everything_local
from odb_lightning.runtime.settings import EpochRequest, LoaderSettings, LoaderStats
from odb_lightning.runtime.stand_in import StandIn

_WINDOWS_IN_MEMORY = 2
"""After so many windows, a sample that still waits leaves the message that it came in."""
_FAILED = 1
"""The stop code of a rank that failed."""


@dataclass
class _Collated:
    """A step of this rank, collated, waiting for its sums. Without samples it is idle."""

    data: Any
    sample_ids: tuple[Hashable, ...]
    num_tokens_real: int
    max_length: int
    targets: float
    num_active_ranks: int = 0
    """Known with the sums."""


class EpochRun:
    """The state of one epoch on one rank: the planner's window, the samples in it, and the steps held back."""

    def __init__(
        self,
        settings: LoaderSettings,
        request: EpochRequest,
        fetcher: Fetcher,
        sender: BatchSender,
        counter: TargetCounter,
        stand_in: StandIn,
    ) -> None:
        self._settings = settings
        self._request = request
        self._sender = sender
        self._counter = counter
        self._stand_in = stand_in
        self._limits = settings.limits()
        self._planner = RoundPlanner(
            limits=self._limits,
            max_patches=settings.max_patches,
            alignment=settings.alignment,
            buffer_size=settings.buffer_size,
            order_seed=f"{settings.seed}/{request.epoch}" if settings.shuffle else None,
            knobs=f"{request.epoch}/{settings.shared_knobs()}",
            joins=settings.mode == "join",
        )
        self._windows: AccumulationWindows[_Collated] = AccumulationWindows(
            request.accumulate, request.max_steps, num_steps=request.first_step, num_samples=request.first_samples
        )
        self._held: dict[int, Observed] = {}
        self._facts: dict[int, tuple[int, int, int]] = {}
        """Place (see `RoundState`), length and patches of the tickets held and wanted."""
        self._wanted: deque[int] = deque()
        """Tickets given before the epoch was resumed, whose samples come first."""
        self._num_taken = 0
        self._is_exhausted = False
        self._next: Observed | None = None
        """A kept sample that the window had no room for."""
        self._num_emitted = request.first_step
        self._num_samples_emitted = request.first_samples
        self._new_rounds: list[RoundState] = []
        """Planned since the last batch was emitted."""
        self._num_released = 0
        """Tickets before this one have no part in a message of many samples."""
        num_views = 0 if request.views is None else len(request.views)
        self._num_views_left: int | None = None if request.views is None else num_views
        """Of this pass; None for an iterable data set, which does not say."""
        if request.resume is not None:
            num_views = self._restore(request.resume, num_views)
        self._stats = LoaderStats(passes=1, views_expected=num_views, outstanding_depth=settings.outstanding_depth)
        self._lengths: list[int] = []
        """Observed since the stats were last taken."""
        self._exchange: Exchange = SoloExchange(Presence())
        stand_in.begin_epoch()
        self._fetcher = fetcher
        self._samples = fetcher.start(request)

    def _restore(self, state: RoundState, num_views: int) -> int:
        """Gives the number of views that this epoch still has, those at hand included."""
        self._planner.restore(
            state.window(), num_observed=state.num_observed, num_rounds=state.num_rounds, pass_start=state.pass_start
        )
        self._facts = dict(zip(state.tickets, zip(state.places, state.lengths, state.patches, strict=True), strict=True))
        # The samples of an iterable data set come in its own order.
        is_iterable = self._num_views_left is None
        self._wanted.extend(sorted(state.tickets, key=self._facts.__getitem__) if is_iterable else state.tickets)
        self._num_taken = state.num_taken
        self._is_exhausted = state.is_exhausted
        if is_iterable:
            return len(state.tickets)
        self._num_views_left = max(num_views - state.num_taken, 0)
        return self._num_views_left + len(state.tickets)

    def run(self, exchange: Exchange) -> None:
        """Emits all steps of the epoch. Raises RaisedFailure for a failure of this rank, PeerFailure for a peer's."""
        self._exchange = exchange
        presence = exchange.presence
        self._sender.while_waiting = lambda: presence.note("waiting for its training process")
        if not self._planner.joins:
            num_views = 0 if self._request.views is None else len(self._request.views)
            quota = self._settings.quota
            self._windows.quota = int(exchange.all_reduce_sum([num_views])[0]) if quota is None else quota
            if self._windows.quota == 0:
                self._check_quota()
        if self._request.resume is not None:
            self._emit_round(self._request.resume.groups())
        while not self._windows.is_full:
            presence.round = self._planner.num_rounds
            failure = self._catch(self._fill_window)
            report = self._planner.report(is_exhausted=self._is_exhausted, stop_code=0 if failure is None else _FAILED)
            reduced = self._exchanged(failure, self._exchange.all_reduce_max, report)
            plan = self._planner.settle(reduced)
            if plan.outcome is Outcome.STOP:
                raise self._exchange.peer_failure()
            if plan.outcome is Outcome.DIVERGED:
                raise RuntimeError(
                    f"the ranks have diverged in round {self._planner.num_rounds} of epoch {self._request.epoch}"
                )
            self._stats.rounds += 1
            if plan.outcome is Outcome.END:
                self._check_quota()
                break
            if plan.outcome is Outcome.PASS_END:
                self._stats.passes += self._is_exhausted
                self._is_exhausted = False
                continue
            self._emit_round(plan.groups)
            self._release_messages()
        self._exchange.finish()
        self._emit(self._windows.flush())
        self._sender.send("end", self._take_stats())

    def _catch(self, action: Any, *args: Any) -> Failure | None:
        """The failure of `action`, published for the peers, so that all ranks stop at the next exchange."""
        try:
            action(*args)
            return None
        except Exception as error:
            failure = Failure.of(error, "the collate process")
            self._exchange.publish(failure)
            return failure

    def _exchanged(self, failure: Failure | None, reduce: Any, values: list[Any]) -> list[Any]:
        """The reduction; after a failure of this rank its peers hear of it in this way, and it is raised."""
        try:
            reduced: list[Any] = reduce(values)
        except PeerFailure:
            if failure is None:
                raise
        if failure is not None:
            raise RaisedFailure(failure)
        return reduced

    def _check_quota(self) -> None:
        if not self._planner.joins:
            error = (
                f"no rank has a sample (left out by a policy: {self._stats.dropped or 'none'}), so the quota of "
                f"{self._windows.quota} samples can't be reached"
            )
            raise RaisedFailure(Failure("a pass of non-join", error))

    def _fill_window(self) -> None:
        self._exchange.presence.note("fetching samples")
        while self._wanted:
            self._fetch_wanted()
        while not self._is_exhausted:
            if self._next is None:
                if self._planner.room <= 0 and self._planner.joins:
                    # That there is no more is for all to know, but not worth waiting for one more sample, which may be slow.
                    self._is_exhausted = self._num_views_left == 0
                    return
                # In non-join, whether a rank has finished decides for all, and must not wait for room: one sample ahead.
                self._next = self._next_kept()
            if self._next is None:
                self._is_exhausted = True
            elif self._planner.room > 0:
                ticket = self._planner.observe(self._next.length, self._next.patches)
                self._held[ticket] = self._next
                self._facts[ticket] = self._num_taken - 1, self._next.length, self._next.patches
                self._next = None
            else:
                return

    def _fetch_wanted(self) -> None:
        """The next sample of those that were at hand where the epoch is resumed."""
        observed, ticket = next(self._samples, None), self._wanted.popleft()
        if observed is None:
            error = "it ended before the place where the epoch is to be resumed: it has to give the same samples again"
            raise RaisedFailure(Failure("the iteration of the data set", error))
        self._exchange.presence.tick()
        size, size_before = (observed.length, observed.patches), self._facts[ticket][1:]
        if size != size_before:
            where = f"dataset[{observed.sample_id!r}]"
            error = (
                f"it has length and patches {size} now, and had {size_before} when the state was saved, so "
                "the epoch can't be resumed as it was planned: a data set has to give the same sample for the same index and "
                "random state (Python's, numpy's and torch's generators are seeded for each sample)"
            )
            raise RaisedFailure(Failure(where, error, sample_id=observed.sample_id))
        self._held[ticket] = observed

    def _next_kept(self) -> Observed | None:
        """The next sample that no policy drops; None at the end of a pass."""
        while (observed := next(self._samples, None)) is not None:
            if self._num_taken % self._settings.chunk_size == 0:
                self._exchange.presence.tick()
            self._num_taken += 1
            if self._num_views_left is None:
                self._stats.views_expected += 1
            else:
                self._num_views_left -= 1
            if self._is_kept(observed):
                return observed
        return None

    def _is_kept(self, observed: Observed) -> bool:
        length, stats, settings = observed.length, self._stats, self._settings
        where = f"dataset[{observed.sample_id!r}]"
        if length > 0:
            try:
                self._limits(length)
            except ValueError as wrong:
                raise RaisedFailure(Failure.of(wrong, where, observed.sample_id)) from wrong
        self._lengths.append(length)
        if length == 0:
            reason, policy, fault = "empty", settings.empty, "has length 0"
        elif self._limits.is_oversize(length):
            reason, policy, fault = "oversize", settings.oversize, self._limits.describe(length)
        elif settings.max_patches is not None and observed.patches > settings.max_patches:
            reason, policy = "oversize", settings.oversize
            fault = f"has {observed.patches} patches, over max_patches={settings.max_patches}"
        else:
            return True
        if policy == "error":
            error = f"it {fault}, and the policy is {reason}='error'"
            raise RaisedFailure(Failure(where, error, sample_id=observed.sample_id))
        if policy == "drop":
            stats.dropped[reason] = stats.dropped.get(reason, 0) + 1
            stats.dropped_ids.append(observed.sample_id)
            self._counter.warn_once(reason, f"{where} {fault} and is dropped (policy {reason}='drop'); more are only counted")
            return False
        stats.over_budget += 1
        self._counter.warn_once(reason, f"{where} {fault}: it goes out alone (policy {reason}='emit'); more are only counted")
        return True

    def _release_messages(self) -> None:
        """Copies the samples that stay for long, so that they do not keep in memory all those that they came with."""
        late = self._planner.num_observed - _WINDOWS_IN_MEMORY * self._settings.buffer_size
        for ticket in list(itertools.takewhile(lambda ticket: ticket < late, self._held)):
            if ticket >= self._num_released:
                observed = self._held[ticket]
                with contextlib.suppress(Exception):  # what can't be packed a second time stays where it is
                    self._held[ticket] = observed._replace(sample=unpack_samples(pack_samples([observed.sample]))[0])
        self._num_released = max(late, self._num_released)

    def _emit_round(self, groups: list[list[int]]) -> None:
        self._new_rounds.append(self._state(groups))
        if self._request.max_steps is not None:
            groups = groups[: self._request.max_steps - self._windows.num_steps]
        start = 0
        for size in exchange_blocks(len(groups), self._request.accumulate):
            if self._windows.is_full:
                break
            self._emit_block(groups[start : start + size])
            start += size

    def _state(self, groups: list[list[int]]) -> RoundState:
        """With a round's groups planned, and none of them emitted."""
        tickets = [*itertools.chain.from_iterable(groups), *self._planner.window]
        places, lengths, patches = zip(*map(self._facts.__getitem__, tickets), strict=True) if tickets else ((), (), ())
        return RoundState(
            first_step=self._windows.num_steps,
            first_samples=self._windows.num_samples,
            num_rounds=self._planner.num_rounds,
            num_observed=self._planner.num_observed,
            pass_start=self._planner.pass_start,
            num_taken=self._num_taken - (self._next is not None),
            is_exhausted=self._is_exhausted,
            group_sizes=list(map(len, groups)),
            tickets=tickets,
            places=list(places),
            lengths=list(lengths),
            patches=list(patches),
            readers=None if self._fetcher.readers is None else self._fetcher.readers.at(self._oldest_place()),
        )

    def _oldest_place(self) -> int:
        """Of the samples at hand."""
        return min((place for place, _, _ in self._facts.values()), default=self._num_taken)

    def _emit_block(self, groups: list[list[int]]) -> None:
        self._exchange.presence.note("collating")
        first_step, block = self._windows.num_steps, list[_Collated]()
        failure = self._catch(lambda: block.extend(self._collate(group, first_step + i) for i, group in enumerate(groups)))
        size = len(groups)
        sums: list[float] = [0.0] * (3 * size)
        if failure is None:
            sums = (
                [step.targets for step in block]
                + [len(step.sample_ids) for step in block]
                + [bool(step.sample_ids) for step in block]
            )
        needs_stand_in = failure is None and self._stand_in.is_wanting and not all(groups)
        reduced = self._exchanged(failure, self._exchange.all_reduce_sum, [*sums, failure is not None, needs_stand_in])
        if reduced[-2]:
            raise self._exchange.peer_failure()
        if reduced[-1]:
            self._stand_in.share(self._exchange)
        for index, step in enumerate(block):
            if self._windows.is_full:
                break
            step.num_active_ranks = int(reduced[2 * size + index])
            self._emit(self._windows.add(step, reduced[index], int(reduced[size + index])))

    def _collate(self, group: list[int], step: int) -> _Collated:
        self._exchange.presence.tick()
        if not group:
            return _Collated(None, (), 0, 0, 0)
        while any(ticket not in self._held for ticket in group):
            self._fetch_wanted()
        observed = [self._held.pop(ticket) for ticket in group]
        for ticket in group:
            del self._facts[ticket]
        samples = [item.sample for item in observed]
        sample_ids = tuple(item.sample_id for item in observed)
        spare = self._stand_in.candidates(samples) if self._settings.world_size > 1 else []
        where = f"collate_fn for samples {list(sample_ids)!r}"
        try:
            seed_everything_local(derive_seed(self._settings.seed, self._request.epoch, "collate", step, self._settings.rank))
            data = self._settings.collate_fn(samples)
            if data is None:
                raise TypeError("collate_fn returned None; it has to return the batch")
            where = f"num_supervised_fn for samples {list(sample_ids)!r}"
            targets = self._counter.of_batch(data, len(samples))
            self._stats.batches_without_targets += not targets
            where = f"collate_fn for one of the samples {list(sample_ids)!r} alone"
            self._stand_in.consider(spare)
        except Exception as error:
            raise RaisedFailure(Failure.of(error, where, sample_ids)) from error
        return _Collated(data, sample_ids, sum(item.length for item in observed), observed[0].length, targets)

    def _emit(self, steps: list[SummedStep[_Collated]]) -> None:
        stats: LoaderStats | None = self._take_stats() if steps else None
        # Until the last step of a window was trained, its gradients are incomplete, and are not kept: it begins again.
        first, whole = self._num_emitted, sum(summed.global_samples for summed in steps)
        for index, summed in enumerate(steps):
            is_last = index == len(steps) - 1
            resume = (first + len(steps), self._num_samples_emitted + whole) if is_last else (first, self._num_samples_emitted)
            step = summed.item
            num_samples = len(step.sample_ids)
            info = StepInfo(
                epoch=self._request.epoch,
                step=self._num_emitted,
                is_idle=not num_samples,
                sample_ids=step.sample_ids,
                num_samples=num_samples,
                num_tokens_real=step.num_tokens_real,
                num_tokens_padded=num_samples * step.max_length,
                num_tokens_supervised=step.targets,
                max_length=step.max_length,
                global_num_samples=summed.global_samples,
                global_num_tokens_supervised=_as_count(summed.global_targets),
                window_num_tokens_supervised=_as_count(summed.window_targets),
                window_num_samples=summed.window_samples,
                num_active_ranks=step.num_active_ranks,
                world_size=self._settings.world_size,
                accumulate=self._request.accumulate,
            )
            if info.is_idle:
                self._stand_in.send_once(self._sender)
            for text in self._counter.take_warnings():
                self._sender.send("warning", text)
            try:
                self._sender.send("batch", (info, stats, self._new_rounds, resume), step.data)
            except (EOFError, ConnectionError, TimeoutError):
                raise
            except Exception as error:
                where = f"sending what collate_fn made of samples {list(step.sample_ids)!r}"
                raise RaisedFailure(Failure.of(error, where, step.sample_ids)) from error
            self._num_emitted, stats, self._new_rounds = self._num_emitted + 1, None, []
        self._num_samples_emitted += whole

    def _take_stats(self) -> LoaderStats:
        """What was counted since the last message."""
        stats, self._stats = self._stats, LoaderStats()
        lengths, self._lengths = self._lengths, []
        stats.length_count, stats.length_sum = len(lengths), sum(lengths)
        stats.length_sum_squares = sum(length * length for length in lengths)
        stats.length_short = sum(4 * length < self._settings.l_max for length in lengths)
        stats.exchange_seconds, self._exchange.seconds = self._exchange.seconds, 0.0
        return stats


def _as_count(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value
