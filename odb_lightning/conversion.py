"""What an existing torch `DataLoader` says, in the words of an `ODBDataLoader`."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_convert,
)


def options_of(existing: DataLoader[Any], deal_sampler: bool) -> dict[str, Any]:
    """The options of an `ODBDataLoader` with the same samples, order, `collate_fn` and workers.

    Warns of what has no meaning there. Raises TypeError or ValueError for what can't be said there.
    """
    if not isinstance(existing, DataLoader):
        raise TypeError(f"existing has to be a torch DataLoader, got {type(existing).__name__}")
    if type(existing.batch_sampler) not in (BatchSampler, type(None)):
        raise ValueError(
            f"the loader's batch_sampler is a {type(existing.batch_sampler).__name__}, which decides itself what a batch is; "
            "batches of an ODBDataLoader are formed from lengths: give the DataLoader a sampler instead, or none"
        )
    inherited: dict[str, Any] = {
        "num_workers": existing.num_workers,
        "pin_memory": existing.pin_memory,
        "worker_init_fn": existing.worker_init_fn,
        "multiprocessing_context": existing.multiprocessing_context,
    }
    if existing.batch_size is not None or existing.collate_fn is not default_convert:
        inherited["collate_fn"] = existing.collate_fn
    if not isinstance(existing.dataset, IterableDataset):
        # A loader that was given a batch_sampler reports another sampler than the one in use.
        sampler = existing.sampler if existing.batch_sampler is None else getattr(existing.batch_sampler, "sampler")  # noqa: B009
        inherited |= _sampler_options(sampler, len(existing.dataset), deal_sampler)  # type: ignore[arg-type]
    if existing.batch_size not in (None, 1):
        warnings.warn(
            f"batch_size={existing.batch_size} of the loader is dropped: l_max decides the size of batches", stacklevel=3
        )
    if existing.drop_last:
        warnings.warn("drop_last=True of the loader is dropped: no sample is", stacklevel=3)
    if existing.prefetch_factor not in (None, 2):
        warnings.warn(
            f"prefetch_factor={existing.prefetch_factor} of the loader is dropped: here it counts messages of many samples",
            stacklevel=3,
        )
    if existing.generator is not None:
        warnings.warn("the loader's generator is dropped: the order depends on seed= and the epoch", stacklevel=3)
    return inherited


def _sampler_options(sampler: Any, num_samples: int, deal_sampler: bool) -> dict[str, Any]:
    """The default sampler with the same meaning, where it is one over the whole data set; or the user's own, dealt out."""
    if type(sampler) is SequentialSampler and len(sampler) == num_samples:
        return {"shuffle": False}
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source) == num_samples:
        return {"shuffle": True}
    if type(sampler) is DistributedSampler and len(sampler.dataset) == num_samples:  # type: ignore[arg-type]
        return {"shuffle": sampler.shuffle, "seed": sampler.seed}
    if deal_sampler:
        return {"sampler": sampler, "deal_sampler": True}
    raise ValueError(
        f"the loader's sampler is a {type(sampler).__name__}, and whether each rank has its own part of it is not known: pass "
        "deal_sampler=True if it gives the same samples in the same order on all ranks, to have them dealt out; or build an "
        "ODBDataLoader with a sampler that gives this rank's own"
    )
