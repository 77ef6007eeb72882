"""`odb-simulate`: the steps, padding and efficiency that loaders would have on given lengths, without training."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from odb_lightning import config
from odb_lightning.config_checks import ConfigError
from odb_lightning.lengths import Lengths, of_dataset
from odb_lightning.loader_options import CHOICES, check_at_least_one, check_choice
from odb_lightning.plan import (
    ALIGNMENTS,
    Alignment,
    RoundPlan,
    RoundPlanner,
    RowLimits,
    exchange_blocks,
    fixed_batch_steps,
    oracle_steps,
    simulate_ranks,
)
from odb_lightning.plan.costs import named_cost
from odb_lightning.sampling import ShardedSampler
from odb_lightning.schedule_figures import Schedule, length_figures, schedule_bound, schedule_figures, short_share
from odb_lightning.sharding import is_iterable
from odb_lightning.simulation_table import print_simulation

_WORD_BYTES = 8
_CHOICES: dict[str, tuple[str, ...]] = {
    "output": ("table", "json"),
    **{f"odb.{name}": choices for name, choices in CHOICES.items() if name != "sharding"},
}


@dataclass
class Simulation:
    """What `odb-simulate` finds."""

    lengths: dict[str, Any]
    rows: list[dict[str, Any]]
    """One for each l_max and loader."""
    plan: Schedule
    """Of the default ODB row of the first l_max."""

    def report(self) -> dict[str, Any]:
        """The fields of `output=json`."""
        return {"lengths": self.lengths, "rows": self.rows}


def simulate(cfg: DictConfig) -> Simulation:
    """Runs the plans that `cfg` describes. Raises `ConfigError` for a value that can't be used."""
    budgets = _check(cfg)
    lengths = _lengths(cfg)
    found = Simulation(length_figures(lengths, budgets[0]), [], [])
    for l_max in budgets:
        for row, schedule in _rows(cfg, lengths, l_max):
            found.rows.append(row)
            if row["default"] and l_max == budgets[0]:
                found.plan = schedule
    return found


def _check(cfg: DictConfig) -> list[int]:
    """The values of l_max. Raises `ConfigError` for what no simulation can use."""
    for key in ("seed", "odb.seed", "odb.num_workers"):
        value = OmegaConf.select(cfg, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{key}={value} cannot be used: give an integer of at least 0")
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ConfigError(f"{missing[0]} is missing: give {missing[0]}=...")
    if cfg.odb.max_patches is not None or cfg.odb.patches_fn is not None:
        raise ConfigError("odb.max_patches and odb.patches_fn cannot be used: lengths say nothing of patches")
    budgets: list[int] = list(dict.fromkeys(cfg.l_max)) if OmegaConf.is_list(cfg.l_max) else [cfg.l_max]
    if not budgets:
        raise ConfigError("l_max=[] cannot be used: give an integer, or a list of them")
    try:
        check_at_least_one(**{"odb.l_max": cfg.odb.l_max, "odb.buffer_size": cfg.odb.buffer_size})
        for l_max in budgets:
            check_at_least_one(l_max=l_max)
        for key in ("world_size", "batch_size", "odb.max_rows", "odb.quota"):
            value = OmegaConf.select(cfg, key)
            if value is not None or key == "world_size":
                check_at_least_one(**{key: value})
        for key, choices in _CHOICES.items():
            check_choice(key, OmegaConf.select(cfg, key), choices)
        if cfg.odb.multiprocessing_context is not None:
            methods = tuple(multiprocessing.get_all_start_methods())
            check_choice("odb.multiprocessing_context", cfg.odb.multiprocessing_context, methods)
        _limits(cfg, budgets[0])
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    _check_plan(cfg.plan, budgets)
    return budgets


def _check_plan(plan: str | None, budgets: list[int]) -> None:
    if plan is None:
        return
    if len(budgets) > 1:
        raise ConfigError(f"plan={plan} cannot be used with l_max={budgets}: a plan is of one l_max")
    if Path(plan).is_dir() or not Path(plan).absolute().parent.is_dir():
        raise ConfigError(f"plan={plan} cannot be used: give a file in a folder that there is")


def _lengths(cfg: DictConfig) -> Lengths:
    """From the law or the file of `cfg.lengths`, or of the training data of `cfg.data` if that is chosen."""
    if "data" not in cfg:
        try:
            lengths: Lengths = instantiate(cfg.lengths, _partial_=True)()
        except ValueError as error:
            raise ConfigError(f"lengths.{error}") from error
        return lengths
    asked = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    for override in asked:
        if override.lstrip("+~").startswith("lengths"):
            raise ConfigError(f"{override} cannot be used with data=...: the lengths are those of the data set")
    try:
        dataset, _ = instantiate(cfg.data, _partial_=True)()
    except (ValueError, OSError) as error:
        raise ConfigError(f"data: {error}") from error
    if is_iterable(dataset):
        raise ConfigError("data: an iterable data set cannot be dealt out; write its lengths to a file, for lengths=file")
    if len(dataset) == 0:
        raise ConfigError("data: the data set is empty")
    return of_dataset(
        dataset,
        num_workers=cfg.odb.num_workers,
        seed=cfg.odb.seed,
        multiprocessing_context=cfg.odb.multiprocessing_context,
    )


def _rows(cfg: DictConfig, lengths: Lengths, l_max: int) -> Iterator[tuple[dict[str, Any], Schedule]]:
    """The figures and the schedule of each loader: ODB by its own rule and by the other, fixed batches, and the oracle."""
    limits = _limits(cfg, l_max)
    order = ShardedSampler(len(lengths), seed=cfg.odb.seed).views()  # rank r of W has every W-th of it, from r on
    shards = [_kept(cfg, lengths[order[rank :: cfg.world_size]], limits) for rank in range(cfg.world_size)]
    kept = [length for shard in shards for length in shard]
    if not kept:
        raise ConfigError(f"no sample is left to plan with: all are empty, or over l_max={l_max} with odb.oversize=drop")

    def row(loader: str, schedule: Schedule, **more: Any) -> tuple[dict[str, Any], Schedule]:
        facts = {
            "loader": loader,
            "default": more.get("alignment") == cfg.odb.alignment,
            "alignment": None,
            "world_size": cfg.world_size,
            "l_max": l_max,
            "f_s": short_share(lengths, l_max),
            "batch_size": None,
            "dropped": len(lengths) - len(kept),
            "over_budget": sum(map(limits.is_oversize, kept)),
            **schedule_figures(schedule, cfg.world_size, l_max),
            "schedule_bound": None,
            "rounds": None,
            "bytes_per_round": None,
            "gathered_bytes_per_round": None,
        }
        return facts | more, schedule

    bound = schedule_bound(shards)
    for alignment in sorted(ALIGNMENTS, key=lambda name: name != cfg.odb.alignment):
        schedule, exchange = _odb_schedule(cfg, shards, limits, alignment)
        yield row("odb", schedule, alignment=alignment, schedule_bound=bound if cfg.odb.mode == "join" else None, **exchange)
    batch_size = limits(max(kept))[0] if cfg.batch_size is None else cfg.batch_size
    schedule = _lengths_of(fixed_batch_steps(shards, batch_size), shards)
    yield row("standard", schedule, batch_size=batch_size, schedule_bound=bound)
    steps = oracle_steps(kept, limits, cfg.world_size, cfg.odb.seed)
    yield row("gmt", [[[kept[position] for position in batch] for batch in step] for step in steps])


def _limits(cfg: DictConfig, l_max: int) -> RowLimits:
    options = config.loader_options(cfg.odb)
    cost = options.get("cost")
    budget = named_cost(options["budget"], "odb.budget")
    return RowLimits(l_max, cfg.odb.max_rows, budget, None if cost is None else named_cost(cost, "odb.cost"))


def _kept(cfg: DictConfig, lengths: Lengths, limits: RowLimits) -> list[int]:
    """Those that the policies of `cfg.odb` do not drop."""
    policies = {"empty": str(cfg.odb.empty), "oversize": str(cfg.odb.oversize), None: "emit"}
    kept = []
    for length in lengths.tolist():
        fault = "empty" if length == 0 else "oversize" if limits.is_oversize(length) else None
        if policies[fault] == "error":
            raise ConfigError(f"odb.{fault}=error: there is a sample of length {length} (l_max={limits.l_max})")
        if policies[fault] == "emit":
            kept.append(length)
    return kept


class _CountingPlanner(RoundPlanner):
    """Counts the bytes of what a rank receives: the report's integers, then three sums a step and two flags a block of them."""

    num_bytes = 0

    def report(self, *, is_exhausted: bool, stop_code: int = 0) -> list[int]:
        report = super().report(is_exhausted=is_exhausted, stop_code=stop_code)
        self.num_bytes += _WORD_BYTES * len(report)
        return report

    def settle(self, reduced: Any) -> RoundPlan:
        plan = super().settle(reduced)
        self.num_bytes += sum(_WORD_BYTES * (3 * size + 2) for size in exchange_blocks(len(plan.groups), 1))
        return plan


def _odb_schedule(
    cfg: DictConfig, shards: list[list[int]], limits: RowLimits, alignment: Alignment
) -> tuple[Schedule, dict[str, Any]]:
    """As in the first epoch of a loader with these knobs, and what its exchange takes."""
    planners = [
        _CountingPlanner(
            limits=limits,
            alignment=alignment,
            buffer_size=cfg.odb.buffer_size,
            order_seed=f"{cfg.odb.seed}/0",
            joins=cfg.odb.mode == "join",
        )
        for _ in shards
    ]
    run = simulate_ranks(shards, planners.__getitem__, quota=cfg.odb.quota)
    exchange = {
        "rounds": run.num_rounds,
        "bytes_per_round": planners[0].num_bytes / run.num_rounds,
        # The authors' package gathers each rank's counts and twice as many integers as the buffer has places.
        "gathered_bytes_per_round": (2 + 2 * cfg.odb.buffer_size) * _WORD_BYTES * len(shards),
    }
    return _lengths_of(run.steps, shards), exchange


def _lengths_of(steps: list[list[list[int]]], shards: list[list[int]]) -> Schedule:
    """`steps` with lengths in place of positions in the shards."""
    return [[[shard[position] for position in batch] for batch, shard in zip(step, shards, strict=True)] for step in steps]


@hydra.main(version_base="1.3", config_path="pkg://odb_lightning.conf", config_name="simulate")
def main(cfg: DictConfig) -> None:
    """The command."""
    found = simulate(cfg)
    if cfg.plan is not None:
        with Path(cfg.plan).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(step) + "\n" for step in found.plan)
    if cfg.output == "json":
        print(json.dumps(found.report(), allow_nan=False))
    else:
        print_simulation(found)


if __name__ == "__main__":
    main()
