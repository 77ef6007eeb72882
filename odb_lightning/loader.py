"""The loader: batches formed online from the observed lengths of samples, the same number of steps on every rank."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import DataLoader

from odb_lightning.batch import ODBBatch
from odb_lightning.conversion import options_of
from odb_lightning.epoch_rest import Start, start_from
from odb_lightning.iteration import Iteration
from odb_lightning.loader_options import check_at_least_one, refuse_unknown, settled_options
from odb_lightning.plan.costs import RowCost
from odb_lightning.plan.rounds import Alignment
from odb_lightning.resume import EpochPlace, Position, check_can_be_read_again, check_settings, check_states
from odb_lightning.runtime.client import CollateProcess
from odb_lightning.runtime.counting import DEFAULT_RULE, NumSupervised
from odb_lightning.runtime.errors import Failure, ODBLoaderError
from odb_lightning.runtime.meeting import Meeting
from odb_lightning.runtime.rendezvous import data_parallel_position, store_address
from odb_lightning.runtime.seeding import derive_seed, preserved_random_state, seed_everything_local
from odb_lightning.runtime.settings import EpochRequest, LoaderSettings, LoaderStats, StoreAddress, Timeouts
from odb_lightning.sampling import ShardedSampler
from odb_lightning.sharding import check_sharding, is_iterable

_LAST_WORDS_SECONDS = 3.0
"""For what the collate process has heard of a peer's failure to arrive."""


class ODBDataLoader:
    """Iterates `ODBBatch`es of at most `l_max` padded tokens, grouped by the lengths that samples turn out to have.

    Samples are fetched by `num_workers` workers, and observed, grouped and collated in one process per rank; ranks agree on
    equal numbers of steps among themselves, so that no sample is lost or repeated and a rank without data in a step is idle in
    it (`batch.step.is_idle`). Works with map-style and iterable data sets, in Lightning (with an ODB strategy) and in a loop of
    your own.

    * `l_max`: token budget of a batch: samples times the longest. A single longer sample goes out alone.
    * `collate_fn(samples)`: makes a batch of a list of samples; runs in the collate process. Default: torch's.
    * `length_fn(sample)`: tokens of a sample; by default of its `input_ids`.
    * `num_supervised_fn`: targets that the mean loss of a batch is over: "causal" (labels[:, 1:] != -100), "unshifted", or a
      function of the batch.
    * `mode`: "join" ends an epoch when each sample was trained once, with idle steps for a rank that is done before the others.
      "non_join" has none: a rank that is done begins its samples anew, until `quota` samples were trained over all ranks (by
      default as many as there are), give or take the last step; some are then repeated, and some left out.
    * `sharding`: how an iterable data set is split among the workers of all ranks. "loader": every process reads all of it and
      keeps its part. "dataset": it splits itself (see `current_shard`). "auto": it need not be, or it is one of Hugging Face.
    * `skip_ahead`: whether an iterable data set without `state_dict` and `load_state_dict` is read again from its beginning
      where an epoch is resumed, which takes as long as it did.
    * `buffer_size`: samples in the window in which groups are formed. `max_rows`: samples of a batch at most.
    * `alignment`: how the groups of all ranks get into the same steps. "matched": groups of like cost; what fits badly waits
      for better company, for about eight windows at most. "paper": the rule of arXiv 2606.19989, which makes fewer steps where
      the window holds few batches.
    * `budget`: what a row takes of `l_max`: its padded length ("tokens"), `length + length ** 2 / 24576` ("quadratic"), or a
      function of the padded length (`odb_lightning.plan.QuadraticCost`, or your own), which must not fall with it. `cost`: what
      it takes of a step's time, for the matching; by default the same.
    * `patches_fn`: what a sample takes of a second budget (vision patches, say); `max_patches`: what a batch may take of it.
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
    In bytes: what the workers prepare lies in shared memory (a memfd: /dev/shm may be small); samples come out of it by
    messages of a chunk, which stay whole while a sample of theirs is in the window, for two windows at most. Freed memory is
    kept for what comes next. With samples of a megabyte, a `buffer_size` of 1024 means gigabytes: choose it accordingly.

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
        mode: Literal["join", "non_join"] = "join",
        quota: int | None = None,
        buffer_size: int = 1024,
        max_rows: int | None = None,
        oversize: Literal["emit", "drop", "error"] = "emit",
        empty: Literal["drop", "error"] = "drop",
        alignment: Alignment = "matched",
        budget: Literal["tokens", "quadratic"] | RowCost = "tokens",
        cost: Literal["tokens", "quadratic"] | RowCost | None = None,
        patches_fn: Callable[[Any], int] | None = None,
        max_patches: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        sampler: Iterable[Hashable] | None = None,
        deal_sampler: bool = False,
        sharding: Literal["auto", "loader", "dataset"] = "auto",
        skip_ahead: bool = False,
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
        **unknown: Any,
    ) -> None:
        refuse_unknown(unknown, LOADER_OPTIONS)
        self._is_iterable = is_iterable(dataset)
        self._options = settled_options(
            {
                "dataset": dataset,
                "collate_fn": collate_fn,
                "length_fn": length_fn,
                "num_supervised_fn": num_supervised_fn,
                "worker_init_fn": worker_init_fn,
                "l_max": l_max,
                "buffer_size": buffer_size,
                "max_rows": max_rows,
                "alignment": alignment,
                "budget": budget,
                "cost": cost,
                "patches_fn": patches_fn,
                "max_patches": max_patches,
                "oversize": oversize,
                "empty": empty,
                "mode": mode,
                "quota": quota,
                "sharding": sharding,
                "shuffle": shuffle,
                "seed": seed,
                "num_workers": num_workers,
                "prefetch_factor": prefetch_factor,
                "persistent_workers": persistent_workers,
                "timeouts": timeouts,
            },
            multiprocessing_context,
        )
        if accumulate is not None:
            check_at_least_one(accumulate=accumulate)
        if rank is not None or world_size is not None:
            data_parallel_position(rank, world_size)
        if self._is_iterable:
            check_sharding(dataset, sharding, num_workers, world_size or 1)
            if sampler is not None:
                raise ValueError("sampler can't be used with an iterable data set, which has an order of its own")
        elif sharding != "auto" or skip_ahead:
            option = f"sharding={sharding!r}" if sharding != "auto" else "skip_ahead=True"
            warnings.warn(f"{option} is ignored: the data set is not iterable", stacklevel=2)
        if sampler is not None and not hasattr(sampler, "__iter__"):
            raise TypeError(f"sampler has to be iterable, got {sampler!r}")
        if deal_sampler and sampler is None:
            raise ValueError("deal_sampler=True needs a sampler; the default one is dealt out anyway")
        if pin_memory and not torch.cuda.is_available():
            warnings.warn("pin_memory=True is ignored: there is no GPU to pin memory for", stacklevel=2)
        self.dataset = dataset
        self.l_max: int = self._options["l_max"]
        self._sampler = sampler
        self._deal_sampler = deal_sampler
        self._skip_ahead = skip_ahead
        self.accumulate = None if accumulate is None else int(accumulate)
        self.shuffle = shuffle
        self.seed: int = self._options["seed"]
        self.pin_memory = pin_memory
        self._past_stats, self._pass_stats = LoaderStats(), LoaderStats()
        self._unfinished_epoch: int | None = None
        self.rank, self.world_size = rank, world_size
        self._store = store
        self._attached: _Attachment | None = None
        self._keeps_process = persistent_workers
        self._epoch = 0
        self._has_begun = False
        self._finished_at: StoreAddress | None = None
        """Where the ranks met for the epoch before, if it came to its end here."""
        self._meeting: Meeting | None = None
        """Of the iteration under way, or left before its end."""
        self._process: CollateProcess | None = None
        self._place: EpochPlace | None = None
        """The epoch begun last."""
        self._position: Position | None = None
        """After the last batch that was taken; None before the first one of an epoch, and after the last one."""
        self._loaded: list[dict[str, Any]] | None = None
        """States to go on from."""
        # Weakly: a pass ends, and its processes with it, when a broken-off `for` loop drops it.
        self._iteration: weakref.ref[Iteration] | None = None

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
        """The epoch that the next `iter()` runs; its order depends on (seed, epoch). A state that was loaded is gone on from if
        it is of this epoch."""
        if self._loaded is not None and self._loaded[0]["epoch"] != epoch:
            self._loaded = None
        self._epoch, self._has_begun, self._position = epoch, False, None

    def state_dict(self) -> dict[str, Any]:
        """Where this rank is after the last batch that `next` gave, for `load_state_dict` in another run: plain containers of
        numbers and text, a few per sample of the window, whatever the size of the data set.

        Inside an accumulation window it is that window's beginning, since gradients are not kept. Each rank has its own. A
        loop that fetches ahead of what it trains takes `batch.step.state_dict()` of the batch trained last. Of an iterable
        data set it holds what the data set's own `state_dict()` gives in each worker. Raises NotImplementedError for one in
        non_join.
        """
        if self._position is not None:
            return self._position.state_dict()
        known = self._position_of_rank()
        with preserved_random_state():  # which a sampler may draw from
            start = self._start(known)
        place = self._place_at(known, self._epoch, start)
        return place.state(start.step, start.num_samples, start.round_state, is_finished=self._has_begun)

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """The next `iter()` goes on where this rank's `state` was, with the batches that would have followed; the samples
        trained before are not fetched again. Given the states of all ranks (a list, in their order), each takes its own; with
        another `world_size` what is left of the epoch is dealt anew. With another budget, window or policy (`l_max`,
        `buffer_size`, ...) what is left is planned anew, and a warning says so.

        Raises ValueError for a damaged state, and for one that these options and this data set can't go on from, by name.
        """
        states = [state] if isinstance(state, dict) else list(state)
        if not states:
            raise ValueError("there is no state to load")
        check_states(states)
        known = self._position_of_rank()
        changes = check_settings(states, self._place_at(known, states[0]["epoch"]).settings)
        if changes:
            text = f"the rest of epoch {states[0]['epoch']} is planned anew: {'; '.join(changes)}"
            warnings.warn(text, stacklevel=2)
        check_can_be_read_again(states, self._skip_ahead)
        self._end_iteration()
        if self._is_iterable:
            self._end_process()  # its workers are told at their start where to go on
        self._loaded, self._position = states, None
        self._epoch, self._has_begun = states[0]["epoch"], states[0]["is_finished"]
        if self._has_begun:
            self._loaded = None

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
            self._epoch, self._has_begun, self._position = self._epoch + 1, False, None
        iteration = Iteration(self)
        self._iteration = weakref.ref(iteration)
        return iteration

    def close(self, reason: BaseException | None = None) -> str | None:
        """Ends an iteration under way, and the loader's processes. The loader can be iterated again.

        `reason` is the exception of the training loop that is the cause, if one is: it is told to the peers, whose iteration
        can't go on. Gives what had ended the iteration on another rank before, if that is known: `reason` may be its effect.
        """
        earlier = self._end_iteration(reason)
        self._end_process()
        return earlier

    def __enter__(self) -> ODBDataLoader:
        return self

    def __exit__(self, _type: object, reason: BaseException | None, _traceback: object) -> None:
        # A generator that is closed at such a place is left like a loop by a break.
        self.close(None if isinstance(reason, GeneratorExit) else reason)

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_process": None, "_iteration": None, "_meeting": None, "_position": None}

    def _end_iteration(self, reason: BaseException | None = None) -> str | None:
        iteration = None if self._iteration is None else self._iteration()
        if iteration is not None:
            return iteration.close(reason)
        # An error in the body of a `for` loop drops the iteration first, before anyone can be told of it.
        return None if reason is None else self._tell_peers(Failure.of(reason, "its training loop"))

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _begin_epoch(self) -> CollateProcess:
        """Starts the processes, unless they are kept from the epoch before, on the epoch at hand."""
        if self._unfinished_epoch != self._epoch:
            self._past_stats.add(self._pass_stats)
        self._pass_stats, self._unfinished_epoch = LoaderStats(), self._epoch
        known = self._position_of_rank()
        rank, world_size = known.rank, known.world_size
        before, self._finished_at = self._finished_at, None
        self._meeting = Meeting(store_address(self._store, rank, world_size), rank, world_size)
        self._meeting.connect(self._options["timeouts"].setup)
        if self._is_iterable:
            check_sharding(self.dataset, self._options["sharding"], self._options["num_workers"], world_size)
        start = self._start(known)
        self._place, resumed = self._place_at(known, self._epoch, start), start.round_state
        self._pass_stats.resumed_ids = list(start.done_ids)
        request = EpochRequest(
            epoch=self._epoch,
            views=start.views,
            reshuffles=self._sampler is None and self.shuffle and not self._is_iterable,
            accumulate=known.accumulate,
            max_steps=known.max_steps,
            store=self._meeting.address,
            before=before,
            data_knobs=self._data_knobs()
            | {"step to begin at": start.step, "steps of the round to resume": resumed and len(resumed.group_sizes)},
            first_step=start.step,
            first_samples=start.num_samples,
            resume=resumed,
        )
        if self._process is not None and self._process.is_inherited:
            self._process = None
        if self._process is not None and self._process.is_stopping:
            self._end_process()
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

    def _position_of_rank(self) -> _Attachment:
        return self._attached or _Attachment(*data_parallel_position(self.rank, self.world_size), self.accumulate or 1, None)

    def _place_at(self, known: _Attachment, epoch: int, start: Start | None = None) -> EpochPlace:
        settings = LoaderSettings(rank=known.rank, world_size=known.world_size, **self._options)
        knobs = {name: value for name, value in settings.shared_knobs().items() if name != "world_size"}
        kind = "the default" if self._sampler is None else "dealt out" if self._deal_sampler else "each rank's own"
        knobs |= {
            "accumulate": known.accumulate,
            "sampler": kind,
            "len(dataset)": None if self._is_iterable else len(self.dataset),
        }
        if self._is_iterable:
            knobs |= {name: self._options[name] for name in ("chunk_size", "sharding")}
            knobs["num_workers"] = max(self._options["num_workers"], 1)
        if start is not None:
            return EpochPlace(epoch, known.rank, known.world_size, knobs, start.views, start.origin)
        views = () if not self._is_iterable else None
        return EpochPlace(epoch, known.rank, known.world_size, knobs, views, None)

    def _start(self, known: _Attachment) -> Start:
        """Where this rank begins, and of which samples."""
        if self._loaded is None:
            return Start(self._views(known.rank, known.world_size))
        place = self._place_at(known, self._epoch)
        return start_from(self._loaded, place, self._views, check_settings(self._loaded, place.settings))

    def _tell_peers(self, failure: Failure) -> str | None:
        """How the iteration under way ended here. Gives what had ended it on a peer before."""
        meeting, self._meeting = self._meeting, None
        try:
            return None if meeting is None else meeting.tell(failure)
        except RuntimeError:  # the store went with the rank that held it; the collate process may have heard in time
            return None if self._process is None else self._process.failure_within(_LAST_WORDS_SECONDS)

    def _data_knobs(self) -> dict[str, Any]:
        """What decides which samples a rank sees: if it differs between ranks, some are lost and some repeated."""
        if self._is_iterable:
            return {"sharding": self._options["sharding"], "num_workers": max(self._options["num_workers"], 1)}
        if self._sampler is None:
            return {"len(dataset)": len(self.dataset)}
        return {"deal_sampler": self._deal_sampler}

    def _views(self, rank: int, world_size: int) -> Any:
        if self._is_iterable:
            return None
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


LOADER_OPTIONS = frozenset(inspect.signature(ODBDataLoader).parameters) - {"dataset", "l_max", "unknown"}
"""The names of the keyword arguments of `ODBDataLoader`."""
