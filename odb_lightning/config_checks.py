"""Refuses a configuration that cannot run, with one line that names the override, before any process is started."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hydra.errors import CompactHydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from odb_lightning.callbacks.figures import METRICS
from odb_lightning.checkpoints import newest_whole
from odb_lightning.loader_options import CHOICES

_MISSING = object()
_START_METHODS = ("fork", "forkserver", "spawn")
_ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true", 32, 64, 16, "32", "64", "16", "bf16")


class ConfigError(CompactHydraException, ValueError):
    """A value that cannot be used; Hydra prints its text without a traceback."""


def validate_config(cfg: DictConfig) -> None:
    """Nothing, or `ConfigError` for the first value of `cfg` that no run could use."""
    at_least = _at_least(cfg)
    one_of = _one_of(cfg)
    for key, lowest, nullable in (
        ("odb.l_max", 1, False),
        ("odb.val_l_max", 1, True),
        ("odb.buffer_size", 1, False),
        ("odb.max_rows", 1, True),
        ("odb.max_patches", 1, True),
        ("odb.quota", 1, True),
        ("odb.num_workers", 0, False),
        ("odb.prefetch_factor", 1, True),
        ("odb.seed", 0, False),
        ("data.limit", 1, True),
        ("data.val_limit", 1, True),
        ("data.cutoff", 8, True),
        ("batch_size", 1, True),
        ("seed", 0, False),
        ("checkpoint.every_n_steps", 1, True),
        ("trainer.accumulate_grad_batches", 1, False),
        ("trainer.num_nodes", 1, False),
        ("trainer.max_epochs", -1, True),
        ("trainer.max_steps", -1, False),
    ):
        at_least(key, lowest, nullable)
    for key, low, high in (
        ("optim.lr", 0.0, None),
        ("optim.weight_decay", 0.0, None),
        ("optim.warmup_share", 0.0, 1.0),
        ("optim.min_lr_ratio", 0.0, 1.0),
        ("data.val_fraction", 0.0, 1.0),
        ("trainer.gradient_clip_val", 0.0, None),
    ):
        _check_number(cfg, key, low, high)
    for name, choices in CHOICES.items():
        one_of(f"odb.{name}", choices)
    for key in ("odb.budget", "odb.cost"):
        if not OmegaConf.is_dict(_value(cfg, key)):  # else it is a function, which the loader checks
            one_of(key, ("tokens", "quadratic") if key == "odb.budget" else (None, "tokens", "quadratic"))
    one_of("odb.multiprocessing_context", (None, *_START_METHODS))
    one_of("loader", ("odb", "fixed"))
    one_of("trainer.accelerator", _ACCELERATORS)
    one_of("trainer.precision", _PRECISIONS)
    for key in ("validate", "audit"):
        one_of(key, (True, False))
    one_of("optimized_metric", (None, *METRICS))
    _check_devices(cfg)
    _check_precision(cfg)
    _check_limit(cfg)
    _check_loss_scaling(cfg)
    _check_files(cfg)


def _value(cfg: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.select(cfg, key, default=_MISSING, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from error


def _at_least(cfg: DictConfig) -> Callable[[str, int, bool], None]:
    def check(key: str, lowest: int, nullable: bool) -> None:
        value = _value(cfg, key)
        if value is _MISSING or (value is None and nullable):
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            wanted = f"an integer of at least {lowest}" + (", or null" if nullable else "")
            raise ConfigError(f"{key}={value} cannot be used: give {wanted}")

    return check


def _one_of(cfg: DictConfig) -> Callable[[str, tuple[Any, ...]], None]:
    def check(key: str, choices: tuple[Any, ...]) -> None:
        value = _value(cfg, key)
        if value is not _MISSING and value not in choices:
            named = ", ".join("null" if choice is None else str(choice).lower() for choice in choices)
            raise ConfigError(f"{key}={value} cannot be used: choose from {named}")

    return check


def _check_devices(cfg: DictConfig) -> None:
    devices = _value(cfg, "trainer.devices")
    counted = isinstance(devices, int) and not isinstance(devices, bool) and (devices >= 1 or devices == -1)
    if not (counted or devices == "auto" or OmegaConf.is_list(devices) or (isinstance(devices, str) and devices[:1].isdigit())):
        raise ConfigError(f"trainer.devices={devices} cannot be used: give a number of devices, a list of them, or auto")

    if (
        str(cfg.strategy._target_).endswith("SingleDeviceStrategy")
        and devices not in ("auto", 1, "1")
        and not (OmegaConf.is_list(devices) and len(devices) == 1)
    ):
        raise ConfigError(
            f"trainer.devices={devices} cannot be used with strategy=odb, which is for one device: strategy=odb_ddp"
        )


def _check_number(cfg: DictConfig, key: str, lowest: float, highest: float | None) -> None:
    value = _value(cfg, key)
    if value is _MISSING or value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not lowest <= value <= (math.inf if highest is None else highest):
        wanted = f"a number of at least {lowest:g}" + ("" if highest is None else f" and at most {highest:g}")
        raise ConfigError(f"{key}={value} cannot be used: give {wanted}")


def _check_precision(cfg: DictConfig) -> None:
    precision, accelerator = str(cfg.trainer.precision), cfg.trainer.accelerator
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())
    if precision.startswith("16") and on_cpu:
        raise ConfigError(f"trainer.precision={precision} cannot be used on a CPU: choose bf16-mixed, bf16-true or 32-true")


def _check_limit(cfg: DictConfig) -> None:
    limit = _value(cfg, "trainer.limit_train_batches")
    is_count = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0
    if not (limit in (_MISSING, None) or is_count or limit == 1.0):
        raise ConfigError(
            f"trainer.limit_train_batches={limit} cannot be used: give a number of steps; a share is of a number of steps that "
            "is not known (data.limit takes a number of samples)"
        )


def _check_loss_scaling(cfg: DictConfig) -> None:
    if cfg.loader == "fixed" and OmegaConf.select(cfg, "strategy.loss_scaling", default="none") != "none":
        raise ConfigError(
            f"strategy.loss_scaling={cfg.strategy.loss_scaling} needs loader=odb: a fixed-batch loader does not know the "
            "targets of the other ranks; set strategy.loss_scaling=none"
        )


def _check_files(cfg: DictConfig) -> None:
    for key in ("data.path", "data.val_path"):
        path = _value(cfg, key)
        if path is not _MISSING and path is not None and not Path(str(path)).exists():
            raise ConfigError(f"{key}={path} cannot be used: there is no such file")
    tokenizer = _value(cfg, "data.tokenizer")
    is_path = isinstance(tokenizer, str) and (tokenizer.endswith(".json") or tokenizer.startswith((".", "/")))
    if is_path and not Path(tokenizer).exists():
        raise ConfigError(f"data.tokenizer={tokenizer} cannot be used: there is no such file or folder")
    ckpt_path = _value(cfg, "ckpt_path")
    if ckpt_path == "last":
        newest_checkpoint(cfg)
    elif ckpt_path not in (None, _MISSING) and not Path(str(ckpt_path)).exists():
        raise ConfigError(f"ckpt_path={ckpt_path} cannot be used: no such checkpoint (last takes the newest whole one)")


def newest_checkpoint(cfg: DictConfig) -> tuple[Path, list[str]]:
    """The newest whole checkpoint of any run of this task, for `ckpt_path=last`; and what was passed over for it, and why."""
    runs = Path(cfg.paths.log_dir) / cfg.task_name
    path, passed = newest_whole(runs)
    if path is None:
        why = f": {'; '.join(passed)}" if passed else ""
        raise ConfigError(f"ckpt_path=last cannot be used: no run below {runs} has a whole checkpoint{why}")
    return path, passed
