"""What the configuration of `odb-train` needs beside its YAML files: the typed `odb` node, the recipes as a group, and
resolvers. Importing this module registers them, so that a primary configuration of your own can use them, too."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import resources
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from odb_lightning.run_stamp import only_on_rank_zero, rank_suffix, run_stamp


@dataclass
class ODBConfig:
    """The node `odb`: the knobs of `ODBDataLoader`. How many micro-batches an update has is not among them: the strategy
    tells the loader."""

    l_max: int = 4096
    """Budget of a batch: samples times the longest of them, in tokens."""
    val_l_max: int | None = None
    """The same for validation; `l_max` where it is null."""
    mode: str = "join"
    quota: int | None = None
    buffer_size: int = 1024
    max_rows: int | None = None
    alignment: str = "matched"
    budget: Any = "tokens"
    """`tokens`, `quadratic`, or a node with a `_target_`: a function of a padded length. So is `cost`."""
    cost: Any = None
    patches_fn: Any = None
    """A node with a `_target_`: a function of a sample (with `_partial_: true`)."""
    max_patches: int | None = None
    oversize: str = "emit"
    empty: str = "drop"
    num_workers: int = 2
    prefetch_factor: int | None = None
    pin_memory: bool = False
    persistent_workers: bool = True
    multiprocessing_context: str | None = None
    seed: int = 0


def loader_options(odb: DictConfig) -> dict[str, Any]:
    """The node `odb` as keyword arguments of `ODBDataModule`, those left at null out: the loader has its own defaults."""
    options = {field.name: odb[field.name] for field in fields(ODBConfig)}
    return {
        name: instantiate(value) if isinstance(value, DictConfig) else value
        for name, value in options.items()
        if value is not None
    }


def register() -> None:
    """Register schema, recipes, launcher and resolvers with Hydra and OmegaConf; calling it again changes nothing."""
    store = ConfigStore.instance()
    store.store(group="odb", name="schema", node=ODBConfig, provider="odb_lightning")
    for file in resources.files("odb_lightning.recipes").iterdir():
        if file.name.endswith(".yaml"):
            node = OmegaConf.create(file.read_text(encoding="utf-8"))
            store.store(group="recipe", name=file.name, node=node, package="_global_", provider="odb_lightning.recipes")
    OmegaConf.register_new_resolver("odb_stamp", run_stamp, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("odb_rank_zero", only_on_rank_zero, replace=True)
    OmegaConf.register_new_resolver("odb_rank_suffix", rank_suffix, replace=True)


register()
