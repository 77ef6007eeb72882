"""The usual loader, as a control to compare with: batches of a fixed number of samples, each padded to its longest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from odb_lightning.batch import ODBBatch, StepInfo
from odb_lightning.loader_options import length_of_input_ids
from odb_lightning.runtime.counting import TargetCounter
from odb_lightning.runtime.settings import LoaderStats


class FixedBatchDataModule(LightningDataModule):
    """Train and validation loaders with `batch_size` samples a batch, dealt as `DistributedSampler` does (it repeats samples
    so that ranks have equal numbers). The counterpart of `ODBDataModule`; `loader_options` go to torch's `DataLoader`."""

    def __init__(
        self,
        *,
        train_dataset: Any,
        val_dataset: Any,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any],
        seed: int = 0,
        l_max: int | None = None,
        **loader_options: Any,
    ) -> None:
        super().__init__()
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.batch_size = batch_size
        self.l_max = l_max
        self.train_loader: FixedBatchLoader | None = None
        self.val_loader: FixedBatchLoader | None = None
        self._options: dict[str, Any] = {
            "batch_size": batch_size,
            "collate_fn": collate_fn,
            "seed": seed,
            "l_max": l_max,
            **loader_options,
        }

    def train_dataloader(self) -> FixedBatchLoader:
        accumulate = 1 if self.trainer is None else self.trainer.accumulate_grad_batches
        self.train_loader = FixedBatchLoader(self.train_dataset, shuffle=True, accumulate=accumulate, **self._options)
        if self.trainer is not None:
            self.train_loader.set_epoch(self.trainer.current_epoch)
        return self.train_loader

    def val_dataloader(self) -> FixedBatchLoader | list[Any]:
        if self.val_dataset is None:
            return []
        self.val_loader = FixedBatchLoader(self.val_dataset, shuffle=False, **self._options)
        return self.val_loader


class FixedBatchLoader:
    """Yields `ODBBatch`es whose step information holds this rank's own counts where an `ODBDataLoader` has those of all
    ranks, so that an ODB strategy with `loss_scaling="none"` and the callbacks treat both alike; `stats` likewise."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any],
        shuffle: bool,
        seed: int = 0,
        l_max: int | None = None,
        accumulate: int = 1,
        **loader_options: Any,
    ) -> None:
        ranked = dist.is_available() and dist.is_initialized()
        self.world_size, self.rank = (dist.get_world_size(), dist.get_rank()) if ranked else (1, 0)
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=self.world_size, rank=self.rank, shuffle=shuffle, seed=seed
        )
        self.stats = LoaderStats()
        self._accumulate = accumulate
        self._short = l_max / 4 if l_max else 0
        self._loader: DataLoader[Any] = DataLoader(
            _Numbered(dataset),
            batch_size=batch_size,
            sampler=self._sampler,
            collate_fn=_CollateAndCount(collate_fn),
            **loader_options,
        )
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next pass runs."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[ODBBatch]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        self._sampler.set_epoch(epoch)
        self.stats.views_expected += len(self._sampler)
        since = time.perf_counter()
        for step, (data, sample_ids, lengths, num_supervised) in enumerate(self._loader):
            self.stats.wait_seconds += time.perf_counter() - since
            self._count(lengths)
            yield ODBBatch(data, self._step_info(epoch, step, sample_ids, lengths, num_supervised))
            since = time.perf_counter()

    def _count(self, lengths: list[int]) -> None:
        self.stats.length_count += len(lengths)
        self.stats.length_sum += sum(lengths)
        self.stats.length_sum_squares += sum(length * length for length in lengths)
        self.stats.length_short += sum(length < self._short for length in lengths)

    def _step_info(
        self, epoch: int, step: int, sample_ids: tuple[int, ...], lengths: list[int], num_supervised: float
    ) -> StepInfo:
        return StepInfo(
            epoch=epoch,
            step=step,
            is_idle=False,
            sample_ids=sample_ids,
            num_samples=len(lengths),
            num_tokens_real=sum(lengths),
            num_tokens_padded=len(lengths) * max(lengths),
            num_tokens_supervised=num_supervised,
            max_length=max(lengths),
            global_num_samples=len(lengths) * self.world_size,
            global_num_tokens_supervised=num_supervised,
            window_num_tokens_supervised=num_supervised,
            window_num_samples=len(lengths),
            num_active_ranks=self.world_size,
            world_size=self.world_size,
            accumulate=self._accumulate,
        )


class _Numbered(Dataset[tuple[int, Any]]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.dataset[index]


class _CollateAndCount:
    """The user's batch with its sample ids, their lengths, and its number of targets."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.collate_fn = collate_fn
        self.count_targets = TargetCounter("causal")

    def __call__(self, numbered: list[tuple[int, Any]]) -> tuple[Any, tuple[int, ...], list[int], float]:
        sample_ids, samples = zip(*numbered, strict=True)
        data = self.collate_fn(list(samples))
        return data, sample_ids, [length_of_input_ids(sample) for sample in samples], self.count_targets(data, len(samples))
