"""Samples from the data set, observed in worker processes and brought in messages of many."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from odb_lightning.runtime.codec import PackedSamples, pack_samples, unpack_samples
from odb_lightning.runtime.errors import Failure, RaisedFailure
from odb_lightning.runtime.guard import GuardedWorkerInit, TimeLimit
from odb_lightning.runtime.seeding import derive_seed, seed_everything_local
from odb_lightning.runtime.settings import LoaderSettings


class Observed(NamedTuple):
    """A sample as the data set returned it, with its length."""

    sample_id: Hashable
    length: int
    sample: Any


class _ChunkRequest(NamedTuple):
    epoch: int
    sample_ids: Sequence[Hashable]


class _Chunk(NamedTuple):
    sample_ids: Sequence[Hashable]
    lengths: list[int]
    samples: PackedSamples
    failure: Failure | None
    """What ended the chunk early: the sample after the last one."""


class _ChunkSource(Dataset[_Chunk]):
    """Fetches and observes the samples of one message. Runs in the workers."""

    def __init__(self, settings: LoaderSettings) -> None:
        self.dataset = settings.dataset
        self.length_fn = settings.length_fn
        self.seed = settings.seed

    def __getitem__(self, request: Any) -> _Chunk:
        epoch, sample_ids = request
        samples: list[Any] = []
        lengths: list[int] = []
        failure = None
        for sample_id in sample_ids:
            try:
                seed_everything_local(derive_seed(self.seed, epoch, "sample", sample_id))
                sample = self._fetch(sample_id)
                lengths.append(self._observe(sample, sample_id))
                samples.append(sample)
            except RaisedFailure as error:
                failure = error.failure
                break
        try:
            packed = pack_samples(samples)
        except Exception as error:
            where = f"sending samples {list(sample_ids[: len(samples)])!r} from the worker: they can't be pickled"
            packed, lengths, failure = pack_samples([]), [], Failure.of(error, where)
        return _Chunk(sample_ids, lengths, packed, failure)

    def _fetch(self, sample_id: Hashable) -> Any:
        try:
            return self.dataset[sample_id]
        except Exception as error:
            raise RaisedFailure(Failure.of(error, f"dataset[{sample_id!r}]", sample_id)) from error

    def _observe(self, sample: Any, sample_id: Hashable) -> int:
        try:
            length = operator.index(self.length_fn(sample))
            if length < 0:
                raise ValueError(f"length_fn returned {length}; a length is a number of tokens, 0 or more")
            return length
        except Exception as error:
            raise RaisedFailure(Failure.of(error, f"length_fn for dataset[{sample_id!r}]", sample_id)) from error


class _Chunks(Sampler[_ChunkRequest]):
    """The requests of the epoch at hand; set anew for each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0
        self.views: Any = ()

    def __iter__(self) -> Iterator[_ChunkRequest]:
        for start in range(0, len(self.views), self.size):
            part = self.views[start : start + self.size]
            yield _ChunkRequest(self.epoch, part.tolist() if isinstance(part, np.ndarray) else list(part))


def _as_it_is(chunk: Any) -> Any:
    return chunk


class Fetcher:
    """All samples of an epoch, in the order of the views, whatever the number of workers."""

    def __init__(self, settings: LoaderSettings) -> None:
        self._chunks = _Chunks(settings.chunk_size)
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
        self._loader: DataLoader[_Chunk] = DataLoader(
            _ChunkSource(settings),
            batch_size=None,
            sampler=self._chunks,
            num_workers=settings.num_workers,
            collate_fn=_as_it_is,
            generator=torch.Generator().manual_seed(derive_seed(settings.seed, settings.rank, "workers")),
            **options,
        )

    def start(self, epoch: int, views: Any) -> Iterator[Observed]:
        """Starts the workers on the epoch at once; gives the samples as they are asked for.

        Raises RaisedFailure at the sample that failed, after all samples before it.
        """
        self._chunks.epoch, self._chunks.views = epoch, views
        chunks = iter(self._loader)
        return self._samples(chunks)

    def _samples(self, chunks: Iterator[_Chunk]) -> Iterator[Observed]:
        while True:
            with self._limit:
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield from map(Observed, chunk.sample_ids, chunk.lengths, unpack_samples(chunk.samples))
            if chunk.failure is not None:
                raise RaisedFailure(chunk.failure)
