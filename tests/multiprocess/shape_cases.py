"""What the ranks of tests/multiprocess/test_trainer_shapes.py do: small fits of every shape that a trainer has."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from odb_lightning import ODBDataLoader, ODBDataModule, ODBDDPStrategy, Timeouts
from tests.helpers import running_members
from tests.loader_data import IGNORED, Lengths, collate
from tests.loader_processes import all_end, runs
from tests.multiprocess.loader_cases import CASE_SECONDS, guarded
from tests.multiprocess.trainers import make_trainer

WAIT_SECONDS = 20
"""On every wait of a collective or of a loader: far above what a case takes, below the limit on it."""

L_MAX = 8
WINDOW = 16
VOCABULARY = 64

# A sample's index is its tokens. Rank 0 trains on six full and four half samples, rank 1 on few: it is idle in most of the nine
# steps. In validation rank 0 is, in three of five.
LENGTHS = [*[8] * 6, *[4] * 4, 8, 4, 4, 8, 3, 8, 8, 8, 4, 4, *[8] * 4]
TRAIN = [list(range(10)), [10, 11, 12]]
VAL = [[13, 14], [15, 16, 17, 18, 19]]
SIDE = [[20, 21, 22], [23]]
"""Of a second training loader."""
NUM_STEPS, NUM_VAL_STEPS = 9, 5

DEALT = [8, 2, 8, 3, 8, 8, 4, 8, 8, 2, 8]
"""Lengths of a data set that the default sampler deals out; eleven, so that the shards differ."""
DEALT_VAL = [8, 2, 8, 2, 8]

STREAM = [*[8, 2] * 9, 8]
"""Lengths of an iterable data set: the readers of rank 0 get the long ones."""

MINIMAL = [1, L_MAX, L_MAX + 1, 5, 30 * L_MAX, 6, 7, 3]
MINIMAL_SHARDS = [[0, 1, 2, 3, 4], [5, 6, 7]]
"""Rank 0 has all that is special: a sample too short to have a target, one just full, one over the budget, one that is all
padding to the loss, and one far over the budget."""
ALL_PADDING = 3


class Samples(Lengths):
    """`Lengths`, with one sample that has no label at all."""

    def __init__(self, lengths: Sequence[int], *, without_labels: int) -> None:
        super().__init__(lengths)
        self.without_labels = without_labels

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        if index == self.without_labels:
            sample["labels"][:] = IGNORED
        return sample


class Stream(IterableDataset[dict[str, Any]]):
    """The same samples in the same order in each process."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.samples = Lengths(lengths)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.samples[index] for index in range(len(self.samples)))


def rank() -> int:
    return int(os.environ["RANK"])


OPTIONS: dict[str, Any] = {
    "collate_fn": collate,
    "buffer_size": WINDOW,
    "alignment": "paper",  # all of a window in a round: what is asked here is how many steps the trainer makes of it
    "num_workers": 0,
    "multiprocessing_context": "fork",
    "timeouts": Timeouts(setup=WAIT_SECONDS, exchange=WAIT_SECONDS, worker=WAIT_SECONDS, batch=WAIT_SECONDS),
}


def loader(shards: list[list[int]], dataset: Any = None, **options: Any) -> ODBDataLoader:
    dataset = Lengths(LENGTHS) if dataset is None else dataset
    return ODBDataLoader(dataset, **(OPTIONS | {"l_max": L_MAX, "sampler": shards[rank()]} | options))


def val_loader() -> ODBDataLoader:
    return loader(VAL, shuffle=False)


def data_module(train: Any = None, val: Any = None, **options: Any) -> ODBDataModule:
    """By default with data sets that are dealt out."""
    train = Lengths(DEALT) if train is None else train
    val = Lengths(DEALT_VAL) if val is None else val
    return ODBDataModule(train, val, **(OPTIONS | {"l_max": L_MAX} | options))


def trainer(loss_scaling: Any = "token", **options: Any) -> lightning.Trainer:
    return make_trainer(ODBDDPStrategy(loss_scaling=loss_scaling, timeout=timedelta(seconds=WAIT_SECONDS)), **options)


def ids_of(batch: dict[str, Any]) -> list[int]:
    ids: list[int] = batch["input_ids"][:, 0].tolist()
    return ids


class Recording(lightning.LightningModule):
    """Tells which samples came in which step, as the batches say themselves. Knows nothing of idle steps but for that.

    `events`: in the order of the run `["train", epoch, step, sample ids]`, and for the other loops
    `[loop, number of the loader, number of the batch, sample ids]`; no ids for an idle step.
    """

    def __init__(self, stop_at: int | None = None, skip_from: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, VOCABULARY))
        self.stop_at = stop_at
        self.skip_from = skip_from
        self.events: list[list[Any]] = []
        self.losses: list[float] = []
        self.num_processes: list[int] = []
        self.train_processes: list[set[int]] = []
        self.is_outlived: list[bool] = []

    def loss(self, batch: dict[str, Any]) -> Tensor:
        """The mean over the targets; NaN where there is none, as plain cross entropy is."""
        logits = self.network(batch["input_ids"])[:, :-1]
        return cross_entropy(logits.reshape(-1, VOCABULARY), batch["labels"][:, 1:].reshape(-1))

    def on_train_epoch_start(self) -> None:
        self.num_processes.append(len(running_members(os.getpgrp())))
        self.is_outlived.append(any(map(runs, set().union(*self.train_processes))))
        self.train_processes.append(set())

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> int | None:
        return -1 if batch_idx == self.skip_from else None  # leaves out the rest of the epoch

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch["input_ids"]))
        info = self.trainer.strategy.step_info
        assert info.step == batch_idx
        if not info.is_idle:
            self.train_processes[-1] |= {batch["collate_pid"], *batch["pids"]}
            if info.num_tokens_supervised:
                self.losses.append(float(loss))
        self.events.append(["train", info.epoch, info.step, self.trained_ids(batch, info)])
        return loss

    def trained_ids(self, batch: dict[str, Any], info: Any) -> list[int]:
        if info.is_idle:
            return []
        assert list(info.sample_ids) == ids_of(batch)
        return ids_of(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == self.stop_at:
            self.trainer.should_stop = True

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        loop = "sanity" if self.trainer.sanity_checking else "val"
        info = self.evaluated(loop, batch, batch_idx, dataloader_idx)
        if info is not None:
            num_rows = len(batch["input_ids"])
            self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=num_rows, add_dataloader_idx=False)

    def test_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated("test", batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> list[int]:
        self.evaluated("predict", batch, batch_idx, dataloader_idx)
        return ids_of(batch)

    def evaluated(self, loop: str, batch: dict[str, Any], batch_idx: int, dataloader_idx: int) -> Any:
        info = self.trainer.strategy.val_step_info
        ids = ids_of(batch) if info is None else self.trained_ids(batch, info)
        self.events.append([loop, dataloader_idx, batch_idx, ids])
        return info

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Counting(Recording):
    """A weight per sample, which tells after a fit without loss scaling how often the sample was trained, over all ranks: with
    two ranks, half a count is taken from it each time. Takes the batches of several loaders, too."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Module()
        self.network.weights = nn.Parameter(torch.zeros(VOCABULARY))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch if isinstance(batch, (list, tuple)) else [batch] if "input_ids" in batch else list(batch.values())
        self.events.append(["train", self.trainer.current_epoch, batch_idx, None])
        return sum(self.network.weights[ids_of(part)].sum() for part in parts)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def counts(self) -> dict[str, float]:
        """Samples that were trained at all, and how often."""
        return {str(index): -2 * value for index, value in enumerate(self.network.weights.tolist()) if value}


def report(model: Recording, used: lightning.Trainer, **more: Any) -> dict[str, Any]:
    """To be called while the loaders are referenced: what is left then is not what a collected loader would have ended."""
    left = [pid for pid in running_members(os.getpgrp()) if pid != os.getpid()]
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {
        "events": model.events,
        "losses": model.losses,
        "num_processes": model.num_processes,
        "is_outlived": model.is_outlived,
        "global_step": used.global_step,
        "metrics": {name: float(value) for name, value in used.callback_metrics.items()},
        "parameters": hashlib.sha256(flat.numpy().tobytes()).hexdigest(),
        "is_finite": bool(flat.isfinite().all()),
        "has_moved": bool((flat != _initial(type(model))).any()),
        "is_clean": all_end(left, 5.0),
        **more,
    }


def _initial(model: type[Recording]) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model().parameters()])


def fit(stop_at: int | None = None, skip_from: int | None = None, with_val: bool = True, **options: Any) -> dict[str, Any]:
    """On shards of unequal length."""
    model, used = Recording(stop_at, skip_from), trainer(**options)
    train, val = loader(TRAIN), val_loader()
    used.fit(model, train, val if with_val else None)
    return report(model, used)


def fit_dealt(loader_options: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """On data sets behind a data module, dealt out anew in each epoch."""
    model, used, data = Recording(), trainer(**options), data_module(**(loader_options or {}))
    used.fit(model, datamodule=data)
    return report(model, used)


def refused(attempt: Callable[[Recording, lightning.Trainer], object], **options: Any) -> dict[str, Any]:
    """The error that `attempt` ends with."""
    model, used = Recording(), trainer(**options)
    try:
        attempt(model, used)
    except Exception as error:
        return report(model, used, error=f"{type(error).__name__}: {error}")
    return report(model, used, error=None)


def fraction(**limit: float) -> dict[str, Any]:
    train, val = loader(TRAIN), val_loader()
    return refused(lambda model, used: used.fit(model, train, val), **limit)


def stops(count: int) -> dict[str, Any]:
    """Many passes that are left before their end, each in a run of its own: the results of the last, and the longest time."""
    runs, longest = [], 0.0
    for _ in range(count):
        begin = time.monotonic()
        runs.append(fit(stop_at=3, with_val=False))
        longest = max(longest, time.monotonic() - begin)
    assert all(run["is_clean"] and run["events"] == runs[0]["events"] for run in runs)
    return runs[-1] | {"longest": longest}


def early_stopping() -> dict[str, Any]:
    """Nothing is an improvement, so the second validation ends the run."""
    stopping = EarlyStopping("val_loss", min_delta=1e9, patience=1)
    return fit(callbacks=[stopping], max_epochs=5, val_check_interval=2)


def test_and_predict(limit: int) -> dict[str, Any]:
    model, used = Recording(), trainer(limit_test_batches=limit, limit_predict_batches=limit)
    data = val_loader()
    used.test(model, data, verbose=False)
    predictions = used.predict(model, data)
    return report(model, used, predictions=predictions)


def several(kind: str, loss_scaling: str = "token") -> dict[str, Any]:
    loaders = _several(kind)
    return refused(lambda model, used: used.fit(model, loaders, val_loader()), loss_scaling=loss_scaling)


def _several(kind: str) -> Any:
    parts = [loader(TRAIN), loader(SIDE)]
    if kind == "list":
        return parts
    if kind == "dict":
        return {"main": parts[0], "side": parts[1]}
    return CombinedLoader(parts, kind)  # type: ignore[arg-type]


def one_unscaled() -> dict[str, Any]:
    model, used, data = Counting(), trainer("none"), loader(TRAIN)
    used.fit(model, data)
    return report(model, used, counts=model.counts())


def several_validation_loaders() -> dict[str, Any]:
    model, used = Recording(), trainer(max_epochs=2)
    plain: Any = DataLoader(Lengths([3] * 5), batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    used.fit(model, loader(TRAIN), [val_loader(), plain])
    used.validate(model, [plain, val_loader()], verbose=False)
    return report(model, used)


def fit_again() -> dict[str, Any]:
    """Another trainer on the same data module, the same trainer for another epoch, and the other loops after that."""
    model, data = Recording(), data_module()
    trainer().fit(model, datamodule=data)
    used = trainer()
    used.fit(model, datamodule=data)
    used.fit_loop.max_epochs = 2
    used.fit(model, datamodule=data)
    used.validate(model, datamodule=data, verbose=False)
    used.test(model, val_loader(), verbose=False)
    predictions = used.predict(model, val_loader())
    return report(model, used, predictions=predictions)


def fit_after_a_stop() -> dict[str, Any]:
    """A run that was stopped in its first epoch goes on with the second."""
    model, used = Recording(stop_at=3), trainer(max_epochs=2)
    train, val = loader(TRAIN), val_loader()
    used.fit(model, train, val)
    model.stop_at = None
    used.fit(model, train, val)
    return report(model, used)


def minimal() -> dict[str, Any]:
    model, used = Recording(), trainer()
    data = loader(MINIMAL_SHARDS, Samples(MINIMAL, without_labels=ALL_PADDING))
    used.fit(model, data)
    return report(model, used, over_budget=data.stats.over_budget, dropped=data.stats.dropped)


def stream(num_workers: int) -> dict[str, Any]:
    model, used = Recording(), trainer(max_epochs=2)
    data = data_module(Stream(STREAM), Stream(STREAM[:5]), sharding="loader", num_workers=num_workers)
    used.fit(model, datamodule=data)
    return report(model, used)


def non_join(quota: int | None, accumulate: int = 1) -> dict[str, Any]:
    model, used = Recording(), trainer(max_epochs=2, accumulate_grad_batches=accumulate)
    used.fit(model, loader(TRAIN, mode="non_join", quota=quota), val_loader())
    return report(model, used)


ABOVE = 50
"""A limit that no epoch reaches."""

CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "fast_dev_run=True": lambda: fit(fast_dev_run=True),
    "fast_dev_run=3": lambda: fit(fast_dev_run=3),
    "fast_dev_run above": lambda: fit(fast_dev_run=ABOVE),
    "overfit": lambda: fit_dealt(overfit_batches=2, max_epochs=3),
    "overfit above": lambda: fit_dealt(overfit_batches=ABOVE, max_epochs=2),
    "train limit below": lambda: fit(limit_train_batches=3, max_epochs=2),
    "train limit equal": lambda: fit(limit_train_batches=NUM_STEPS, max_epochs=2),
    "train limit above": lambda: fit(limit_train_batches=ABOVE, max_epochs=2),
    "train limit below, k=2": lambda: fit(limit_train_batches=3, max_epochs=2, accumulate_grad_batches=2, with_val=False),
    "train limit above, k=4": lambda: fit(limit_train_batches=ABOVE, max_epochs=2, accumulate_grad_batches=4, with_val=False),
    "no limit, k=4": lambda: fit(max_epochs=2, accumulate_grad_batches=4, with_val=False),
    "train limit 0": lambda: fit(limit_train_batches=0),
    "train limit 0.5": lambda: fraction(limit_train_batches=0.5),
    "val limit 0.5": lambda: fraction(limit_val_batches=0.5),
    "val limit 2": lambda: fit(limit_val_batches=2, max_epochs=2),
    "val limit above": lambda: fit(limit_val_batches=ABOVE),
    "val limit 0": lambda: fit(limit_val_batches=0, num_sanity_val_steps=2),
    "test and predict limit 2": lambda: test_and_predict(2),
    "test and predict limit above": lambda: test_and_predict(ABOVE),
    "test and predict limit 0": lambda: test_and_predict(0),
    "reload": lambda: fit_dealt({"num_workers": 1}, reload_dataloaders_every_n_epochs=1, max_epochs=3),
    "no reload": lambda: fit_dealt({"num_workers": 1}, max_epochs=3),
    "sanity 2": lambda: fit(num_sanity_val_steps=2, max_epochs=2),
    "sanity all": lambda: fit(num_sanity_val_steps=-1, max_epochs=2),
    "val_check_interval": lambda: fit(num_sanity_val_steps=2, val_check_interval=3, check_val_every_n_epoch=2, max_epochs=4),
    "val_check_interval over epochs": lambda: fit(val_check_interval=5, check_val_every_n_epoch=None, max_epochs=2),
    "should_stop": lambda: fit(stop_at=3, max_epochs=2),
    "should_stop without validation": lambda: stops(8),
    "rest of an epoch left out": lambda: fit(skip_from=3, max_epochs=2, with_val=False),
    "max_steps": lambda: fit(max_steps=3, max_epochs=-1),
    "max_steps in the second epoch": lambda: fit(max_steps=11, max_epochs=-1),
    "early stopping": early_stopping,
    "several: list": lambda: several("list"),
    "several: dict": lambda: several("dict"),
    "several: max_size_cycle": lambda: several("max_size_cycle"),
    "several: sequential": lambda: several("sequential"),
    "one, unscaled": one_unscaled,
    "several: unscaled": lambda: several("list", "none"),
    "several validation loaders": several_validation_loaders,
    "fit again": fit_again,
    "fit after a stop": fit_after_a_stop,
    "minimal": minimal,
    "stream, 1 worker": lambda: stream(1),
    "stream, 2 workers": lambda: stream(2),
    "non-join": lambda: non_join(None),
    "non-join, k=2": lambda: non_join(20, accumulate=2),
}


def run_cases(names: list[str]) -> dict[str, Any]:
    """The results of the cases in turn, each with a process group of its own. One that fails does not spoil the others."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank() == 0, timedelta(seconds=2 * CASE_SECONDS))
    results = {}
    for name in names:
        os.environ["MASTER_PORT"] = _agreed_port(store, name)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}",
            rank=rank(),
            world_size=2,
            timeout=timedelta(seconds=WAIT_SECONDS),
        )
        results[name] = guarded(CASES[name])
        _meet(store, f"after {name}")
        dist.destroy_process_group()
    _meet(store, "end")
    return results


def _agreed_port(store: dist.TCPStore, name: str) -> str:
    if rank() == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            store.set(f"port/{name}", str(free.getsockname()[1]))
    return store.get(f"port/{name}").decode()


def _meet(store: dist.TCPStore, place: str) -> None:
    """Rank 0 is the last to go: it holds the store."""
    store.set(f"{place}/{rank()}", "")
    store.wait([f"{place}/{1 - rank()}"])
    if rank() == 0:
        store.wait([f"{place}/gone"])
    else:
        store.set(f"{place}/gone", "")
