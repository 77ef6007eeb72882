"""Samples from the data set, observed in worker processes and brought in messages of many."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from odb_lightning.plan.costs import LARGEST
from odb_lightning.runtime.codec import PackedSamples, pack_samples, unpack_samples
from odb_lightning.runtime.errors import Failure, RaisedFailure
from odb_lightning.runtime.guard import GuardedWorkerInit, TimeLimit
from odb_lightning.runtime.ring import SharedMemory
from odb_lightning.runtime.round_state import Readers, RoundState
from odb_lightning.runtime.seeding import derive_seed, seed_everything_local
from odb_lightning.runtime.settings import EpochRequest, LoaderSettings
from odb_lightning.runtime.slab import Slab, Slabs, make_slabs
from odb_lightning.sharding import (
    Shard,
    is_hugging_face,
    is_iterable,
    set_current_shard,
    shuffles_in_a_buffer,
    split_among_ranks,
)


class Observed(NamedTuple):
    """A sample as the data set returned it, with its length, and what it takes of the second budget."""

    sample_id: Hashable
    length: int
    patches: int
    sample: Any


class _Chunk(NamedTuple):
    sample_ids: list[Hashable]
    lengths: list[int]
    patches: list[int]
    samples: PackedSamples
    failure: Failure | None
    """What ended the chunk early: the sample after the last one."""
    reader: int = 0
    state: Any = None
    """Of an iterable data set: who read it, and how to go on after it; None if the data set has no `state_dict`."""


class _ChunkSource(Dataset[_Chunk]):
    """Fetches and observes the samples of one message. Runs in the workers."""

    def __init__(self, settings: LoaderSettings, slabs: Slabs | None) -> None:
        self.dataset = settings.dataset
        self._settings = settings
        self._pack = _Packing(settings, slabs)

    def __getitem__(self, request: Any) -> _Chunk:
        seed, sample_ids = request
        message, failure = _Message(self._settings), None
        try:
            for sample_id in sample_ids:
                seed_everything_local(derive_seed(seed, "sample", sample_id))
                message.add(sample_id, self._fetch(sample_id))
        except RaisedFailure as error:
            failure = error.failure
        return self._pack(message, failure)

    def _fetch(self, sample_id: Hashable) -> Any:
        try:
            return self.dataset[sample_id]
        except Exception as error:
            raise RaisedFailure(Failure.of(error, f"dataset[{sample_id!r}]", sample_id)) from error


class _Message:
    """Samples on their way into a chunk, observed."""

    def __init__(self, settings: LoaderSettings) -> None:
        self._settings = settings
        self.sample_ids: list[Hashable] = []
        self.lengths: list[int] = []
        self.patches: list[int] = []
        self.samples: list[Any] = []

    def add(self, sample_id: Hashable, sample: Any) -> None:
        """Raises RaisedFailure if it can't be observed."""
        length_fn, patches_fn = self._settings.length_fn, self._settings.patches_fn
        length = _count("length_fn", length_fn, "a length is a number of tokens", sample, sample_id)
        meaning = "it has to be a number of patches"
        patches = 0 if patches_fn is None else _count("patches_fn", patches_fn, meaning, sample, sample_id)
        self.sample_ids.append(sample_id)
        self.lengths.append(length)
        self.patches.append(patches)
        self.samples.append(sample)


def _count(option: str, function: Callable[[Any], int], meaning: str, sample: Any, sample_id: Hashable) -> int:
    try:
        count = operator.index(function(sample))
        if count < 0:
            raise ValueError(f"{option} returned {count}; {meaning}, 0 or more")
        if count > LARGEST:
            raise ValueError(f"{option} returned {count}, which is too large")
        return count
    except Exception as error:
        raise RaisedFailure(Failure.of(error, f"{option} for dataset[{sample_id!r}]", sample_id)) from error


class _Packing:
    """Makes messages. In a worker, the bytes of samples go into its slab."""

    def __init__(self, settings: LoaderSettings, slabs: Slabs | None) -> None:
        self._settings = settings
        self._slabs = slabs
        self._slab: Slab | None = None

    def __call__(self, message: _Message, failure: Failure | None) -> _Chunk:
        worker = get_worker_info()
        if worker is not None and self._slabs is not None and self._slab is None:
            self._slab = Slab(self._slabs, worker.id)
        samples = message.samples
        try:
            packed = pack_samples(samples) if self._slab is None else pack_samples(samples, self._slab.new_bytes)
        except Exception as error:
            where = f"sending samples {message.sample_ids!r} from the worker: they can't be pickled"
            message, packed, failure = _Message(self._settings), pack_samples([]), Failure.of(error, where)
        return _Chunk(message.sample_ids, message.lengths, message.patches, packed, failure)


class _ChunkStream(IterableDataset[_Chunk]):
    """Reads an iterable data set, or this process's part of it, and observes its samples. Runs in the workers.

    A sample's identity is its position in the stream; where each process reads a stream of its own, (shard, position).
    """

    def __init__(self, settings: LoaderSettings, current: SharedMemory, slabs: Slabs | None) -> None:
        self._settings = settings
        self._pack = _Packing(settings, slabs)
        self._dataset = split_among_ranks(settings.dataset, settings.sharding, settings.rank, settings.world_size)
        self._current = current
        """Epoch and pass, which a worker that is kept has no other way to know."""
        self._resumed_epoch = -1
        self._resumed_states: list[Any] = []

    def __iter__(self) -> Iterator[_Chunk]:
        """Chunks with the reader and its state after each."""
        settings, worker = self._settings, get_worker_info()
        readers, index = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        shard = Shard(settings.rank * readers + index, settings.world_size * readers)
        epoch, pass_number = self._current.array.view(np.int64).tolist()
        deals = settings.sharding == "loader"
        owns_stream = shard.total > 1 and not deals
        seed = _pass_seed(settings.seed, epoch, pass_number)
        set_current_shard(shard)
        message, failure = _Message(settings), None
        iterator = None
        first, state = self._resumed(index, epoch, pass_number)
        for position in itertools.count(first):
            sample_id: Hashable = (shard.number, position) if owns_stream else position
            try:
                # Dealt streams have to be the same in all processes, random ones included.
                seed_everything_local(derive_seed(seed, "stream", sample_id))
                if iterator is None:
                    iterator = self._begin(epoch, state)
                sample = next(iterator)
                if deals and position % shard.total != shard.number:
                    continue
                message.add(sample_id, sample)
            except StopIteration:
                break
            except RaisedFailure as error:
                failure = error.failure
                break
            except Exception as error:
                where = f"the iteration of the data set, at sample {position} (shard {shard.number} of {shard.total})"
                failure = Failure.of(error, where, sample_id)
                break
            if len(message.samples) == settings.chunk_size:
                yield self._pack(message, None)._replace(reader=index, state=self._state_after(position))
                message = _Message(settings)
        if message.samples or failure is not None:
            yield self._pack(message, failure)._replace(reader=index, state=self._state_after(position - 1))

    def resume(self, epoch: int, states: list[Any]) -> None:
        """Before the workers are started: how each of them goes on in that epoch."""
        self._resumed_epoch, self._resumed_states = epoch, states

    def _resumed(self, index: int, epoch: int, pass_number: int) -> tuple[int, Any]:
        """The first position, and the data set's state there (None: its beginning)."""
        state = self._resumed_states[index] if (epoch, pass_number) == (self._resumed_epoch, 0) else None
        return (0, None) if state is None else (state["position"], state["data_set"])

    def _state_after(self, position: int) -> dict[str, Any] | None:
        if not hasattr(self._dataset, "state_dict") or shuffles_in_a_buffer(self._dataset):
            return None
        return {"position": position + 1, "data_set": self._dataset.state_dict()}

    def set_epoch(self, epoch: int) -> None:
        """Before the workers begin it. A Hugging Face data set keeps its epoch where all of them see it, and counts up to the
        new one: if each did so, some would count twice, and read what is another's."""
        if is_hugging_face(self._dataset):
            self._dataset.set_epoch(epoch)

    def _begin(self, epoch: int, state: Any) -> Iterator[Any]:
        try:
            if hasattr(self._dataset, "set_epoch") and not is_hugging_face(self._dataset):
                self._dataset.set_epoch(epoch)
            if state is not None:
                self._dataset.load_state_dict(state)
            return iter(self._dataset)
        except StopIteration as error:
            raise RuntimeError("the data set's set_epoch or __iter__ raised StopIteration") from error


class _Views(NamedTuple):
    """Part of a pass: what the samples' own seeds are made of, and their ids, in order."""

    seed: str
    sample_ids: Any


class _Chunks(Sampler[_Views]):
    """The requests of the pass at hand; set anew for each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[_Views] = []

    def __iter__(self) -> Iterator[_Views]:
        for seed, sample_ids in self.parts:
            for start in range(0, len(sample_ids), self.size):
                chunk = sample_ids[start : start + self.size]
                yield _Views(seed, chunk.tolist() if isinstance(chunk, np.ndarray) else list(chunk))


def _pass_seed(seed: int, epoch: int, pass_number: int) -> str:
    return f"{seed}/{epoch}/{pass_number}" if pass_number else f"{seed}/{epoch}"


def _as_it_is(chunk: Any) -> Any:
    return chunk


class Fetcher:
    """All samples of an epoch, in the order of the views, whatever the number of workers; of an iterable data set in an order
    that depends on that number."""

    def __init__(self, settings: LoaderSettings) -> None:
        self._settings = settings
        self._chunks = _Chunks(settings.chunk_size)
        self._current = SharedMemory(2 * 8)
        # Not the DataLoader's own timeout: with one, it looks for dead workers only after it, unless they are children of its.
        self._limit = TimeLimit(
            settings.timeouts.worker,
            f"the workers brought no samples within Timeouts(worker={settings.timeouts.worker:.0f}) seconds",
        )
        options: dict[str, Any] = {}
        if settings.num_workers > 0:
            options = {
                "prefetch_factor": settings.prefetch_factor,
                "persistent_workers": settings.persistent_workers,
                "worker_init_fn": GuardedWorkerInit(settings.worker_init_fn),
                "multiprocessing_context": settings.start_method,
            }
        self.readers: Readers | None = None
        """Of an iterable data set, in the epoch begun last."""
        slabs = make_slabs(settings.num_workers)
        self._stream = _ChunkStream(settings, self._current, slabs) if is_iterable(settings.dataset) else None
        source: Any = self._stream or _ChunkSource(settings, slabs)
        self._loader: DataLoader[_Chunk] = DataLoader(
            source,
            batch_size=None,
            sampler=None if self._stream is not None else self._chunks,
            num_workers=settings.num_workers,
            collate_fn=_as_it_is,
            generator=torch.Generator().manual_seed(derive_seed(settings.seed, settings.rank, "workers")),
            **options,
        )

    def start(self, request: EpochRequest) -> Iterator[Observed | None]:
        """Starts the workers on the epoch at once; gives the samples as they are asked for. In non-join, None stands between
        two passes, of which there is no end. A resumed epoch begins with the samples that were at hand, in the order of its
        state.

        Raises RaisedFailure at the sample that failed, after all samples before it.
        """
        resume = request.resume
        if self._stream is not None:
            states = [None] * max(self._settings.num_workers, 1)
            first_place = 0
            if resume is not None:
                assert resume.readers is not None
                first_place, states = resume.readers["first_place"], resume.readers["states"]
                self._stream.resume(request.epoch, states)
            self.readers = Readers(first_place, states)
            samples = self._passes(request, 0, self._begin(request, 0))
            return samples if resume is None else _wanted(samples, first_place, resume)
        if resume is None or len(request.views) == 0:
            return self._passes(request, 0, self._begin(request, 0))
        pass_number, offset = divmod(resume.num_taken, len(request.views))
        if self._settings.mode == "join" and resume.num_taken and offset == 0:
            # All were taken. (In non-join the end of a pass has been told by then, as one sample is read ahead.)
            pass_number, offset = 0, len(request.views)
        again = _places(request, resume.places, self._settings.seed)
        return self._passes(request, pass_number, self._begin(request, pass_number, offset, again))

    def _begin(
        self, request: EpochRequest, pass_number: int, offset: int = 0, before: Sequence[_Views] = ()
    ) -> Iterator[_Chunk]:
        seed = _pass_seed(self._settings.seed, request.epoch, pass_number)
        views = _views_of(request, pass_number, self._settings.seed)
        self._chunks.parts = [*before, _Views(seed, () if views is None else views[offset:])]
        self._current.array.view(np.int64)[:] = request.epoch, pass_number
        if self._stream is not None:
            self._stream.set_epoch(request.epoch)
        with self._limit:  # workers that are kept bring what they were asked for in the last pass, first
            return iter(self._loader)

    def _passes(self, request: EpochRequest, pass_number: int, chunks: Iterator[_Chunk]) -> Iterator[Observed | None]:
        while True:
            yield from self._samples(chunks)
            if self._settings.mode == "join":
                return
            yield None
            pass_number += 1
            chunks = self._begin(request, pass_number)

    def _samples(self, chunks: Iterator[_Chunk]) -> Iterator[Observed]:
        while True:
            with self._limit:
                chunk = next(chunks, None)
            if chunk is None:
                return
            if self.readers is not None:
                self.readers.arrived(chunk.reader, len(chunk.lengths), chunk.state)
            yield from map(Observed, chunk.sample_ids, chunk.lengths, chunk.patches, unpack_samples(chunk.samples))
            if chunk.failure is not None:
                raise RaisedFailure(chunk.failure)


def _wanted(samples: Iterator[Observed | None], first_place: int, resume: RoundState) -> Iterator[Observed | None]:
    """Without those that were trained or left out before."""
    held = set(resume.places)
    return (found for place, found in enumerate(samples, first_place) if place >= resume.num_taken or place in held)


def _views_of(request: EpochRequest, pass_number: int, seed: int) -> Any:
    """This rank's sample ids in the order of a pass."""
    if pass_number and request.reshuffles:
        return np.random.default_rng(derive_seed(seed, request.epoch, "pass", pass_number)).permutation(request.views)
    return request.views


def _places(request: EpochRequest, places: Sequence[int], seed: int) -> list[_Views]:
    """The samples at these places, which count views over all passes."""
    parts = []
    for pass_number, run in itertools.groupby(places, lambda place: place // len(request.views)):
        views = _views_of(request, pass_number, seed)
        ids = [views[place % len(request.views)] for place in run]
        parts.append(
            _Views(_pass_seed(seed, request.epoch, pass_number), np.array(ids) if isinstance(views, np.ndarray) else ids)
        )
    return parts
