"""Who reads which part of an iterable data set."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from odb_lightning.runtime.settings import Sharding


class Shard(NamedTuple):
    """One of `total` processes that together read a data set: the workers of all ranks."""

    number: int
    total: int


_current = Shard(0, 1)


def current_shard() -> Shard:
    """(number, total): which part of the data an iterable data set's `__iter__` is to give in this process, of how many.

    For data sets that split themselves (`sharding="dataset"`), e.g. `files[number::total]`. It counts the workers of all
    ranks, unlike `torch.utils.data.get_worker_info()`. (0, 1) outside of a loader's workers.
    """
    return _current


def set_current_shard(shard: Shard) -> None:
    """Called where a worker begins to read."""
    global _current
    _current = shard


def is_iterable(dataset: Any) -> bool:
    """Whether a data set is read from its beginning, not by index. Raises TypeError for what is neither."""
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    if not hasattr(dataset, "__iter__"):
        raise TypeError(
            "dataset has to be map-style (__getitem__ and __len__) or iterable (__iter__), "
            f"and a {type(dataset).__name__} is neither"
        )
    if hasattr(dataset, "__next__"):
        raise TypeError(
            f"dataset is a {type(dataset).__name__}, an iterator, which can be read only once and by one process: pass a class "
            "whose __iter__ makes a new one, such as a torch.utils.data.IterableDataset"
        )
    return True


def is_hugging_face(dataset: Any) -> bool:
    """Whether it is a `datasets.IterableDataset`, which splits itself among workers and can be split among ranks."""
    kind = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    return isinstance(kind, type) and hasattr(kind, "set_epoch") and isinstance(dataset, kind)


def shuffles_in_a_buffer(dataset: Any) -> bool:
    """Whether it is a Hugging Face data set that keeps samples back to shuffle them: its state does not hold those. Known by a
    chain of sources that is not public."""
    source = getattr(dataset, "_ex_iterable", None) if is_hugging_face(dataset) else None
    while source is not None:
        if "BufferShuffled" in type(source).__name__:
            return True
        source = getattr(source, "ex_iterable", None)
    return False


def check_sharding(dataset: Any, sharding: Sharding, num_workers: int, world_size: int) -> None:
    """Raises ValueError if more than one process would read an iterable data set and nobody splits it among them."""
    readers = max(num_workers, 1) * world_size
    if sharding == "auto" and readers > 1 and not is_hugging_face(dataset):
        raise ValueError(
            f"{readers} processes (world_size={world_size}, num_workers={num_workers}) would each read the whole "
            f"{type(dataset).__name__}, and every sample be trained {readers} times. Say how it is to be split: "
            'sharding="loader" if it gives the same samples in the same order in every process (each reads all of it and keeps '
            'its part), sharding="dataset" if its __iter__ gives each process its own part (see odb_lightning.current_shard; '
            "get_worker_info() alone does not know the rank); or num_workers=1 and one rank"
        )


def split_among_ranks(dataset: Any, sharding: Sharding, rank: int, world_size: int) -> Any:
    """This rank's part of a Hugging Face data set, unless it was split before; every other data set as it is."""
    if sharding != "auto" or world_size == 1 or not is_hugging_face(dataset) or is_split(dataset):
        return dataset
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(dataset, rank=rank, world_size=world_size)


def is_split(dataset: Any) -> bool:
    """Whether `split_dataset_by_node` was called on it: known by an attribute that is not public."""
    return getattr(dataset, "_distributed", None) is not None
