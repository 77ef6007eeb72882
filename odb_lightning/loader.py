"""The loader: batches formed online from the observed lengths of samples, the same number of steps on every rank."""

from __future__ import annotations

import inspect
import math
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from odb_lightning.batch import IDLE_DATA, ODBBatch
from odb_lightning.conversion import options_of
from odb_lightning.loader_options import check_at_least_one, check_choice, length_of_input_ids, start_method_of
from odb_lightning.runtime.client import CollateProcess
from odb_lightning.runtime.counting import DEFAULT_RULE, NumSupervised, check_rule
from odb_lightning.runtime.errors import ODBLoaderError
from odb_lightning.runtime.rendezvous import data_parallel_position, store_address
from odb_lightning.runtime.seeding import derive_seed, preserved_random_state, seed_everything_local
from odb_lightning.runtime.settings import EpochRequest, LoaderSettings, LoaderStats, Timeouts
from odb_lightning.sampling import ShardedSampler

_MAX_CHUNK_SIZE = 64


class ODBDataLoader:
    """Iterates `ODBBatch`es of at most `l_max` padded tokens, grouped by the lengths that samples turn out to have.

    Samples are fetched by `num_workers` workers, and observed, grouped and collated in one process per rank; ranks agree on
    equal numbers of steps among themselves, so that no sample is lost or repeated and a rank without data in a step is idle in
    it (`batch.step.is_idle`). Works with map-style data sets, in Lightning (with an ODB strategy) and in a loop of your own.

    * `l_max`: token budget of a batch: samples times the longest. A single longer sample goes out alone.
    * `collate_fn(samples)`: makes a batch of a list of samples; runs in the collate process. Default: torch's.
    * `length_fn(sample)`: tokens of a sample; by default of its `input_ids`.
    * `num_supervised_fn`: targets that the mean loss of a batch is over: "causal" (labels[:, 1:] != -100), "unshifted", or a
      function of the batch.
    * `buffer_size`: samples in the window in which groups are formed. `max_rows`: samples of a batch at most.
    * `oversize`: what becomes of a sample longer than l_max: "emit", "drop" or "error". `empty`: of one of length 0: "drop" or
      "error". Dropped ones are counted in `stats`.
    * `sampler`: gives this rank's own sample ids. By default a seeded permutation is dealt to the ranks without padding. With
      `deal_sampler` it gives those of all ranks, and is dealt out, too; its random draws are seeded alike on all of them.
    * `accumulate`: micro-batches per update, for `StepInfo.window_num_*` (an ODB strategy sets it from the trainer).
    * `prefetch_factor`: messages of up to 64 samples that each worker prepares ahead; by default enough for one window.
    * `rank`, `world_size`: by default torch.distributed's at first use. Given explicitly they need MASTER_ADDR and MASTER_PORT,
      or a `store`.

    A rank holds at most `buffer_size + num_workers * prefetch_factor * chunk` samples (chunk: up to 64), the collated steps of
    one exchange (16, or `accumulate` if that is more, plus `accumulate - 1` that wait for their window), and 8 batches ready.

    `iter()` begins the next epoch once a batch of the one before was taken; `set_epoch` names it. There is no `len`: the number
    of steps is not known before the samples are.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        l_max: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        num_supervised_fn: NumSupervised = DEFAULT_RULE,
        mode: Literal["join"] = "join",
        buffer_size: int = 1024,
        max_rows: int | None = None,
        oversize: Literal["emit", "drop", "error"] = "emit",
        empty: Literal["drop", "error"] = "drop",
        alignment: Literal["paper"] = "paper",
        shuffle: bool = True,
        seed: int = 0,
        sampler: Iterable[Hashable] | None = None,
        deal_sampler: bool = False,
        accumulate: int | None = None,
        num_workers: int = 2,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = True,
        multiprocessing_context: Any = None,
        worker_init_fn: Callable[[int], None] | None = None,
        timeouts: Timeouts | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        store: Any = None,
    ) -> None:
        check_at_least_one(l_max=l_max, buffer_size=buffer_size)
        optional = {"max_rows": max_rows, "accumulate": accumulate, "prefetch_factor": prefetch_factor}
        check_at_least_one(**{name: value for name, value in optional.items() if value is not None})
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
            raise ValueError(f"num_workers must be 0 or more, got {num_workers!r}")
        check_choice("mode", mode, ("join",))
        check_choice("alignment", alignment, ("paper",))
        check_choice("oversize", oversize, ("emit", "drop", "error"))
        check_choice("empty", empty, ("drop", "error"))
        check_rule(num_supervised_fn)
        if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise TypeError(f"dataset has to be map-style (__getitem__ and __len__), got {type(dataset).__name__}")
        if rank is not None or world_size is not None:
            data_parallel_position(rank, world_size)
        if deal_sampler and sampler is None:
            raise ValueError("deal_sampler=True needs a sampler; the default one is dealt out anyway")
        if num_workers == 0 and prefetch_factor is not None:
            warnings.warn("prefetch_factor is ignored with num_workers=0", stacklevel=2)
        if pin_memory and not torch.cuda.is_available():
            warnings.warn("pin_memory=True is ignored: there is no GPU to pin memory for", stacklevel=2)
        chunk_size = max(min(_MAX_CHUNK_SIZE, buffer_size // (2 * max(num_workers, 1))), 1)
        if num_workers > 0 and prefetch_factor is None:
            prefetch_factor = max(math.ceil(buffer_size / (chunk_size * num_workers)), 2)
        self.dataset = dataset
        self.l_max = l_max
        self._sampler = sampler
        self._deal_sampler = deal_sampler
        self.accumulate = accumulate
        self.shuffle = shuffle
        self.seed = seed
        self.pin_memory = pin_memory
        self._past_stats, self._pass_stats = LoaderStats(), LoaderStats()
        self._unfinished_epoch: int | None = None
        self.rank, self.world_size = rank, world_size
        self._store = store
        self._attached: _Attachment | None = None
        self._options: dict[str, Any] = {
            "dataset": dataset,
            "collate_fn": default_collate if collate_fn is None else collate_fn,
            "length_fn": length_of_input_ids if length_fn is None else length_fn,
            "num_supervised_fn": num_supervised_fn,
            "worker_init_fn": worker_init_fn,
            "l_max": l_max,
            "buffer_size": buffer_size,
            "max_rows": max_rows,
            "oversize": oversize,
            "empty": empty,
            "shuffle": shuffle,
            "seed": seed,
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor if num_workers > 0 else None,
            "chunk_size": chunk_size,
            "persistent_workers": persistent_workers,
            "start_method": start_method_of(multiprocessing_context),
            "timeouts": timeouts or Timeouts(),
        }
        self._keeps_process = persistent_workers
        self._epoch = 0
        self._has_begun = False
        self._process: CollateProcess | None = None
        # Weakly: a pass ends, and its processes with it, when a broken-off `for` loop drops it.
        self._iteration: weakref.ref[_Iteration] | None = None

    @classmethod
    def from_dataloader(
        cls, existing: DataLoader[Any], l_max: int, *, deal_sampler: bool = False, **options: Any
    ) -> ODBDataLoader:
        """An ODB loader over the data set of a torch `DataLoader`, with its `collate_fn` and workers; `options` override.

        A sequential, random or distributed sampler is replaced by the default with the same meaning. Another one raises
        ValueError unless `deal_sampler` says that it may be dealt out to the ranks. What has no meaning here (batch_size,
        drop_last) warns.
        """
        inherited = options_of(existing, deal_sampler)
        return cls(existing.dataset, l_max=l_max, **(inherited | options))

    @property
    def stats(self) -> LoaderStats:
        """Counts so far. A pass that was begun again before its end counts once."""
        total = LoaderStats()
        total.add(self._past_stats)
        total.add(self._pass_stats)
        return total

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next `iter()` runs; its order depends on (seed, epoch)."""
        self._epoch, self._has_begun = epoch, False

    def attach(self, *, rank: int, world_size: int, accumulate: int, max_steps: int | None) -> None:
        """What a trainer knows and the loader can't: its data-parallel position, micro-batches per update, and the steps after
        which it ends an epoch. For strategies. Raises ValueError if the loader was given something else explicitly."""
        if self.accumulate is not None and self.accumulate != accumulate:
            raise ValueError(
                f"the loader was given accumulate={self.accumulate}, but the trainer has accumulate_grad_batches={accumulate}: "
                "leave accumulate out, the strategy sets it"
            )
        if self.rank is not None and (self.rank, self.world_size) != (rank, world_size):
            raise ValueError(
                f"the loader was given rank={self.rank}, world_size={self.world_size}, but the strategy's data-parallel "
                f"position is {rank} of {world_size}: leave rank and world_size out"
            )
        self.close()
        self._attached = _Attachment(rank, world_size, accumulate, max_steps)

    def __iter__(self) -> Iterator[ODBBatch]:
        self._end_iteration()
        if self._has_begun:
            self._epoch, self._has_begun = self._epoch + 1, False
        iteration = _Iteration(self)
        self._iteration = weakref.ref(iteration)
        return iteration

    def close(self) -> None:
        """Ends an iteration under way, and the loader's processes. The loader can be iterated again."""
        self._end_iteration()
        self._end_process()

    def __enter__(self) -> ODBDataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_process": None, "_iteration": None}

    def _end_iteration(self) -> None:
        iteration = None if self._iteration is None else self._iteration()
        if iteration is not None:
            iteration.close()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _begin_epoch(self) -> CollateProcess:
        """Starts the processes, unless they are kept from the epoch before, on the epoch at hand."""
        if self._unfinished_epoch != self._epoch:
            self._past_stats.add(self._pass_stats)
        self._pass_stats, self._unfinished_epoch = LoaderStats(), self._epoch
        known = self._attached or _Attachment(*data_parallel_position(self.rank, self.world_size), self.accumulate or 1, None)
        rank, world_size = known.rank, known.world_size
        request = EpochRequest(
            epoch=self._epoch,
            views=self._views(rank, world_size),
            accumulate=known.accumulate,
            max_steps=known.max_steps,
            store=store_address(self._store, rank, world_size),
        )
        if self._process is not None and not self._process.is_alive:
            warnings.warn("the loader's processes have ended since the last epoch; they are started again", stacklevel=3)
            self._end_process()
        if self._process is None:
            settings = LoaderSettings(rank=rank, world_size=world_size, **self._options)
            self._process = CollateProcess(settings, self.pin_memory)
        try:
            self._process.begin(request)
        except ODBLoaderError:
            self._end_process()
            raise
        return self._process

    def _views(self, rank: int, world_size: int) -> Any:
        if self._sampler is None:
            sampler = ShardedSampler(len(self.dataset), rank=rank, world_size=world_size, shuffle=self.shuffle, seed=self.seed)
            sampler.set_epoch(self._epoch)
            return sampler.views()
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self._epoch)
        if not self._deal_sampler:
            return list(self._sampler)
        with preserved_random_state():
            seed_everything_local(derive_seed(self.seed, self._epoch, "sampler"))
            return list(self._sampler)[rank::world_size]


class _Attachment(NamedTuple):
    rank: int
    world_size: int
    accumulate: int
    max_steps: int | None


class _Iteration(Iterator[ODBBatch]):
    """One pass. Starts its processes with the first `next`, and takes them along when it is dropped before its end."""

    def __init__(self, loader: ODBDataLoader) -> None:
        self._loader: ODBDataLoader | None = loader
        self._process: CollateProcess | None = None

    def __next__(self) -> ODBBatch:
        loader = self._loader
        if loader is None:
            raise StopIteration
        begin = time.perf_counter()
        try:
            if self._process is None:
                self._process = loader._begin_epoch()
            batch = self._receive(loader, self._process)
        except BaseException:
            self.close()
            raise
        finally:
            loader._pass_stats.wait_seconds += time.perf_counter() - begin
        if batch is None:
            self._finish(loader)
            raise StopIteration
        loader._has_begun = True
        return batch

    def _receive(self, loader: ODBDataLoader, process: CollateProcess) -> ODBBatch | None:
        """The next batch, or None at the end of the epoch."""
        while True:
            kind, facts, payload = process.receive()
            if kind == "batch":
                info, stats = facts
                loader._pass_stats.add(stats)
                if info.is_idle:
                    return ODBBatch(IDLE_DATA, info, process.stand_in())
                return ODBBatch(payload, info)
            if kind == "warning":
                warnings.warn(facts, stacklevel=3)
            elif kind == "end":
                loader._pass_stats.add(facts)
                return None
            else:
                raise ODBLoaderError(facts)

    def _finish(self, loader: ODBDataLoader) -> None:
        loader._has_begun, loader._unfinished_epoch = True, None
        self._loader, loader._iteration = None, None
        if not loader._keeps_process:
            loader.close()

    def close(self) -> None:
        """Ends the pass; its processes go with it, since they are in the middle of an epoch."""
        loader, self._loader = self._loader, None
        if loader is not None:
            loader._iteration = None
            if self._process is not None:
                loader.close()

    def __del__(self) -> None:
        self.close()


LOADER_OPTIONS = frozenset(inspect.signature(ODBDataLoader).parameters) - {"dataset", "l_max"}
"""The names of the keyword arguments of `ODBDataLoader`."""
