"""`odb-train`: fine-tunes a causal language model, with online dynamic batching or fixed batches, and sums the run up."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class, instantiate
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf, open_dict

from odb_lightning import config, launcher
from odb_lightning.callbacks import AuditLog, RunSummary
from odb_lightning.config_checks import newest_checkpoint, validate_config
from odb_lightning.run_report import RankWatch, RunReport, wait_for_ranks
from odb_lightning.run_stamp import global_rank
from odb_lightning.runtime.guard import end_with_launcher

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

_log = logging.getLogger(__name__)
_CPU_RANKS = 2
_CHOSEN = "ODB_LAST_CHECKPOINT"
"""The variable in which ranks that rank 0 starts find what `ckpt_path=last` is, as another run may write one meanwhile."""


def train(cfg: DictConfig) -> dict[str, Any]:
    """Run the job that `cfg` describes; the fields of its `summary.json`, on every rank.

    Raises `ConfigError` before anything is started if a value cannot be used. Whatever else ends the run early is written
    into the summary and raised again.
    """
    report = RunReport(Path(cfg.paths.output_dir).absolute(), _labels(cfg))
    try:
        validate_config(cfg)
        cfg = with_known_devices(cfg)
        report.begun(cfg, show=cfg.extras.print_config)
        summary = RunSummary(l_max=memory_budget(cfg))
        report.watch(summary)
        trainer, module, datamodule = _build(cfg, summary)
        report.trainer = trainer
        with _watched_ranks(trainer, report):
            trainer.fit(module, datamodule=datamodule, ckpt_path=_checkpoint(cfg))
            _release()
            wait_for_ranks(trainer)
    except BaseException as error:
        report.failed(error)
        raise
    return report.finished()


def _end_with_the_run() -> None:
    """SIGTERM ends this process in order from the beginning, not only once the Trainer runs; and one that a launcher started
    does not outlive it."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end)
    if "LOCAL_RANK" in os.environ:
        end_with_launcher()


def _end(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def with_known_devices(cfg: DictConfig) -> DictConfig:
    """`cfg` with `trainer.accelerator` and `trainer.devices` settled where they are `auto`: the GPUs there are, else two CPU
    processes; as many as torchrun started; one for a strategy of a single device."""
    cfg = cfg.copy()
    trainer = cfg.trainer
    with open_dict(trainer):
        if trainer.accelerator == "auto":
            trainer.accelerator = "cuda" if torch.cuda.is_available() else "cpu"
        if trainer.devices == "auto":
            trainer.devices = _device_count(trainer.accelerator, str(cfg.strategy._target_))
    return cfg


def _device_count(accelerator: str, strategy: str) -> int:
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    if "SingleDevice" in strategy:
        return 1
    return torch.cuda.device_count() if accelerator in ("cuda", "gpu") else _CPU_RANKS


def fixed_batch_size(cfg: DictConfig) -> int:
    """Samples a batch of `loader=fixed`: `batch_size`, or the most that keep within `odb.l_max` whatever their lengths."""
    if cfg.batch_size is not None:
        return int(cfg.batch_size)
    return max(cfg.odb.l_max // cfg.data.cutoff, 1) if cfg.data.get("cutoff") else 1


def memory_budget(cfg: DictConfig) -> int | None:
    """The padded tokens that a batch can reach: `odb.l_max`, or batch size times cutoff of fixed batches."""
    if cfg.loader == "odb":
        return int(cfg.odb.l_max)
    return fixed_batch_size(cfg) * cfg.data.cutoff if cfg.data.get("cutoff") else None


def _build(cfg: DictConfig, summary: RunSummary) -> tuple[Trainer, LightningModule, LightningDataModule]:
    _quiet_libraries(cfg.trainer.accelerator)
    seed_everything(cfg.seed, workers=True, verbose=False)
    train_dataset, val_dataset = instantiate(cfg.data)
    if not cfg.validate:
        val_dataset = None
    datamodule = _build_datamodule(cfg, train_dataset, val_dataset)
    module = _build_module(cfg, train_dataset)
    trainer = instantiate(
        cfg.trainer,
        strategy=instantiate(cfg.strategy),
        callbacks=[summary, *_callbacks(cfg)],
        logger=_loggers(cfg) or False,
        enable_checkpointing=cfg.checkpoint.at_end or cfg.checkpoint.every_n_steps is not None,
        # All of the validation data, before the first step: the loss of the untrained model.
        num_sanity_val_steps=-1 if val_dataset is not None else 0,
        limit_val_batches=1.0 if val_dataset is not None else 0,
    )
    return trainer, module, datamodule


def _build_module(cfg: DictConfig, train_dataset: Any) -> LightningModule:
    model = cfg.model.copy()
    if model.get("config") is not None and model.config.get("vocab_size") is None:
        model.config.vocab_size = train_dataset.vocab_size
    # How many steps an epoch has is not known; its samples are.
    samples = len(train_dataset) * max(cfg.trainer.max_epochs or 1, 1)
    module = instantiate(model, schedule_samples=samples, warmup_samples=int(samples * cfg.optim.warmup_share))
    assert isinstance(module, LightningModule)
    return module


def _build_datamodule(cfg: DictConfig, train_dataset: Any, val_dataset: Any) -> LightningDataModule:
    collate_fn = instantiate(cfg.collate, pad_id=train_dataset.pad_id)
    common = {"train_dataset": train_dataset, "val_dataset": val_dataset, "collate_fn": collate_fn}
    if cfg.loader == "odb":
        datamodule = get_class("odb_lightning.ODBDataModule")(**common, **config.loader_options(cfg.odb))
        assert isinstance(datamodule, LightningDataModule)
        return datamodule
    from odb_lightning.fixed_batches import FixedBatchDataModule

    return FixedBatchDataModule(
        **common,
        batch_size=fixed_batch_size(cfg),
        l_max=memory_budget(cfg),
        seed=cfg.odb.seed,
        num_workers=cfg.odb.num_workers,
        pin_memory=cfg.odb.pin_memory,
        persistent_workers=cfg.odb.persistent_workers and cfg.odb.num_workers > 0,
        multiprocessing_context=cfg.odb.multiprocessing_context if cfg.odb.num_workers > 0 else None,
    )


def _callbacks(cfg: DictConfig) -> list[Callback]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    folder = Path(cfg.paths.output_dir).absolute() / "checkpoints"
    found = [instantiate(node) for node in (cfg.callbacks or {}).values() if node is not None]
    if cfg.audit:
        found.append(AuditLog(Path(cfg.paths.output_dir).absolute() / "audit"))
    if cfg.checkpoint.at_end:
        # Nothing but last.ckpt, which each epoch replaces.
        found.append(
            ModelCheckpoint(dirpath=folder, save_top_k=0, save_last=True, every_n_epochs=1, save_on_train_epoch_end=True)
        )
    if cfg.checkpoint.every_n_steps is not None:
        found.append(
            ModelCheckpoint(
                dirpath=folder,
                filename="update={step}",
                auto_insert_metric_name=False,
                save_top_k=-1,
                every_n_train_steps=cfg.checkpoint.every_n_steps,
            )
        )
    return found


def _loggers(cfg: DictConfig) -> list[Logger]:
    return [instantiate(node) for node in (cfg.logger or {}).values() if node is not None]


def _checkpoint(cfg: DictConfig) -> str | None:
    path = cfg.ckpt_path
    if path == "last" and global_rank() > 0 and _CHOSEN in os.environ:
        path = os.environ[_CHOSEN]
    elif path == "last":
        path, passed = newest_checkpoint(cfg)
        if global_rank() == 0:
            os.environ[_CHOSEN] = str(path.absolute())
            for text in passed:
                _log.warning("ckpt_path=last passes over %s", text)
            _log.info("ckpt_path=last goes on from %s", path)
    return None if path is None else str(Path(path).absolute())


def _labels(cfg: DictConfig) -> dict[str, Any]:
    choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    return {
        "task_name": cfg.task_name,
        "tags": OmegaConf.to_container(cfg.tags),
        "recipe": choices.get("recipe"),
        "loader": cfg.loader,
        "strategy": choices.get("strategy", str(cfg.strategy._target_)),
        "loss_scaling": cfg.strategy.get("loss_scaling"),
        "seed": cfg.seed,
    }


def _quiet_libraries(accelerator: str) -> None:
    """Leave out what libraries say to each other's authors, so that what is said to the user can be seen."""
    if accelerator == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns where it has to find that out
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r".*LeafSpec\)` is deprecated")
    warnings.filterwarnings("ignore", message="The dirpath has changed")  # each run has a folder of its own
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    log.addFilter(lambda record: "Tip:" not in record.getMessage())
    logging.getLogger("compilers").setLevel(logging.WARNING)


@contextmanager
def _watched_ranks(trainer: Trainer, report: RunReport) -> Iterator[None]:
    watch = RankWatch(trainer, report)
    watch.start()
    try:
        yield
    finally:
        watch.stop()


def _release() -> None:
    """Leave the process group, so that a rank that ends does not look to its peers like one that died."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@hydra.main(version_base="1.3", config_path="pkg://odb_lightning.conf", config_name="train")
def main(cfg: DictConfig) -> Any:
    """The command: returns the optimised metric, which sweepers read."""
    _end_with_the_run()
    return train(cfg).get(cfg.optimized_metric) if cfg.optimized_metric else train(cfg)


launcher.register()

if __name__ == "__main__":
    main()
