"""Each shipped configuration composes, and what it names exists; bad overrides are refused with their name."""

from __future__ import annotations

from importlib import resources

import hydra.utils
import pytest
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import DictConfig, OmegaConf

from odb_lightning import config
from odb_lightning.config_checks import ConfigError, validate_config
from odb_lightning.train import fixed_batch_size, memory_budget, with_known_devices

GROUPS = ("data", "model", "odb", "strategy", "trainer", "optim", "callbacks", "logger", "paths", "extras")


def options_of(group: str) -> list[str]:
    package = "odb_lightning.recipes" if group == "recipe" else f"odb_lightning.conf.{group}"
    return sorted(file.name.removesuffix(".yaml") for file in resources.files(package).iterdir() if file.name.endswith(".yaml"))


ALL_OPTIONS = [f"{group}={name}" for group in (*GROUPS, "recipe") for name in options_of(group)]


def composed(*overrides: str) -> DictConfig:
    with initialize_config_module("odb_lightning.conf", version_base="1.3"):
        return compose("train", overrides=["paths.output_dir=out", *overrides])


def filled(cfg: DictConfig) -> DictConfig:
    for key in OmegaConf.missing_keys(cfg):
        OmegaConf.update(cfg, key, ".")
    return cfg


def nodes_with_target(node: object) -> list[dict[str, object]]:
    if not isinstance(node, dict):
        return []
    below = [found for value in node.values() for found in nodes_with_target(value)]
    return [node, *below] if "_target_" in node else below


@pytest.mark.parametrize("override", ALL_OPTIONS)
def test_each_option_of_each_group_composes_and_names_what_exists(override: str) -> None:
    cfg = filled(composed(override))
    validate_config(cfg)
    nodes = nodes_with_target(OmegaConf.to_container(cfg, resolve=True))
    assert len(nodes) >= 5
    for node in nodes:
        assert hydra.utils.get_object(str(node["_target_"])) is not None
        assert node["_convert_"] == "all", f"{node['_target_']}: without it, checkpoints hold configuration objects"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_strategy_node_makes_the_strategy(stage: int) -> None:
    strategy = hydra.utils.instantiate(composed(f"strategy=odb_deepspeed_stage_{stage}").strategy)
    assert strategy.config["zero_optimization"]["stage"] == stage


def test_recipes_hold_only_deltas_and_begin_with_their_command() -> None:
    for file in resources.files("odb_lightning.recipes").iterdir():
        if file.name.endswith(".yaml"):
            first, second = file.read_text().splitlines()[:2]
            name = file.name.removesuffix(".yaml")
            assert first.startswith("# odb-train") and (name == "quickstart" or f"recipe={name}" in first)
            assert second == "# @package _global_"


@pytest.mark.parametrize(
    "override",
    ["odb.l_max=abc", "odb.buffer_size=1.5", "odb.lmax=512", "odb.pin_memory=perhaps", "dta.limit=3", "trainer.max_epoch=3"],
)
def test_a_wrong_name_or_type_fails_when_composing(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigCompositionException) as failure:
        composed(override)
    assert key in f"{failure.value} {failure.value.__cause__}"


def test_an_unknown_recipe_fails_with_the_known_ones() -> None:
    with pytest.raises(MissingConfigException, match="quickstart"):
        composed("recipe=nosuch")


@pytest.mark.parametrize(
    "overrides",
    [
        ["odb.l_max=-1"],
        ["odb.l_max=0"],
        ["odb.mode=joint"],
        ["odb.oversize=cut"],
        ["odb.empty=emit"],
        ["odb.num_workers=-1"],
        ["odb.multiprocessing_context=thread"],
        ["odb.prefetch_factor=0"],
        ["odb.budget=5"],
        ["odb.cost=cubic"],
        ["odb.alignment=best"],
        ["data.limit=0"],
        ["data.limit=many"],
        ["data.cutoff=1"],
        ["batch_size=0"],
        ["loader=torch"],
        ["validate=perhaps"],
        ["seed=-1"],
        ["checkpoint.every_n_steps=0"],
        ["ckpt_path=last"],
        ["ckpt_path=no/such/file"],
        ["trainer.devices=0"],
        ["trainer.devices=two"],
        ["trainer.accumulate_grad_batches=0"],
        ["trainer.max_epochs=abc"],
        ["trainer.max_epochs=-5"],
        ["trainer.limit_train_batches=0.5"],
        ["trainer.precision=fp17"],
        ["trainer.precision=16-mixed", "trainer.accelerator=cpu"],
        ["trainer.accelerator=gpux"],
        ["trainer.gradient_clip_val=x"],
        ["trainer.devices=2", "strategy=odb"],
        ["optim.lr=abc"],
        ["optim.lr=-1"],
        ["data.val_fraction=2", "data=sft", f"data.path={__file__}"],
        ["data.tokenizer=/nonexistent"],
        ["data.path=no/such/file", "data=sft"],
        ["optimized_metric=loss_of_hair"],
        ["loader=fixed"],
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_name(overrides: list[str], tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "strategy.loss_scaling=token" if overrides == ["loader=fixed"] else overrides[0]
    with pytest.raises(ConfigError) as failure:
        validate_config(composed(*overrides))
    assert name in str(failure.value)
    assert len(str(failure.value).splitlines()) == 1


def test_a_missing_value_is_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.path"):
        validate_config(composed("data=sft"))


def test_loader_options_are_those_of_the_loader() -> None:
    from odb_lightning.loader import LOADER_OPTIONS

    options = config.loader_options(composed("odb.max_rows=7").odb)
    assert options["max_rows"] == 7
    assert set(options) - {"l_max", "val_l_max"} <= LOADER_OPTIONS


def test_devices_are_two_processes_without_gpus_and_what_torchrun_started(monkeypatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert with_known_devices(composed()).trainer.devices == 2
    assert with_known_devices(composed("strategy=odb")).trainer.devices == 1
    assert with_known_devices(composed("trainer.devices=3")).trainer.devices == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert with_known_devices(composed()).trainer.devices == 4


def test_the_standard_recipe_takes_the_largest_fixed_batch_within_the_budget() -> None:
    cfg = composed("recipe=standard", "odb.l_max=4096", "data.cutoff=500")
    assert (cfg.loader, cfg.strategy.loss_scaling) == ("fixed", "none")
    assert fixed_batch_size(cfg) == 8
    assert memory_budget(cfg) == 4000
    assert fixed_batch_size(composed("recipe=standard", "batch_size=3")) == 3
