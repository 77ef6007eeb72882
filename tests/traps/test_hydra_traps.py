"""What Hydra 1.3 and OmegaConf do under Lightning. A test that fails says that upstream has changed: look at our
design again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from tiny_fit import Loader, Tiny, make_trainer


class TinyWithOptions(Tiny):
    """Saves what it was built with."""

    def __init__(self, betas: Any = (), options: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def node(**extra: Any) -> DictConfig:
    target = f"{TinyWithOptions.__module__}.{TinyWithOptions.__qualname__}"
    return OmegaConf.create({"_target_": target, "betas": [0.9, 0.95], "options": {"width": 4}, **extra})


def trained(model: Tiny, path: Path) -> Path:
    trainer = make_trainer()
    trainer.fit(model, Loader(2))
    trainer.save_checkpoint(path)
    return path


def test_instantiate_leaves_config_nodes_in_the_hyperparameters_and_then_nothing_can_be_resumed(tmp_path: Path) -> None:
    model = instantiate(node())
    assert isinstance(model.hparams.betas, ListConfig)
    assert isinstance(model.hparams.options, DictConfig)
    path = trained(model, tmp_path / "a.ckpt")
    with pytest.raises(UnpicklingError, match="Weights only load failed"):
        torch.load(path, weights_only=True)
    with pytest.raises(UnpicklingError, match="Weights only load failed"):
        make_trainer(max_epochs=2).fit(instantiate(node()), Loader(2), ckpt_path=path)


def test_convert_all_gives_plain_values_and_a_checkpoint_that_can_be_resumed(tmp_path: Path) -> None:
    model = instantiate(node(_convert_="all"))
    assert type(model.hparams.betas) is list
    assert type(model.hparams.options) is dict
    path = trained(model, tmp_path / "a.ckpt")
    assert torch.load(path, weights_only=True)["hyper_parameters"] == {"betas": [0.9, 0.95], "options": {"width": 4}}
    resumed = instantiate(node(_convert_="all"))
    make_trainer(max_epochs=2).fit(resumed, Loader(2), ckpt_path=path)
    assert resumed.trained == [0, 1]


@pytest.fixture
def config_dir(tmp_path: Path) -> Iterator[Path]:
    """Two primary configurations, with and without `recipe: null` in the defaults, and one recipe."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "small.yaml").write_text("# @package _global_\nl_max: 64\n")
    (tmp_path / "listed.yaml").write_text("defaults:\n  - _self_\n  - recipe: null\nl_max: 512\n")
    (tmp_path / "unlisted.yaml").write_text("defaults:\n  - _self_\nl_max: 512\n")
    with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path)):
        yield tmp_path
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.usefixtures("config_dir")
def test_a_listed_group_is_overridden_without_a_plus_and_only_so() -> None:
    assert compose("listed").l_max == 512
    assert compose("listed", overrides=["recipe=small"]).l_max == 64
    with pytest.raises(ConfigCompositionException, match="recipe"):
        compose("listed", overrides=["+recipe=small"])


@pytest.mark.usefixtures("config_dir")
def test_an_unlisted_group_needs_the_plus() -> None:
    assert compose("unlisted", overrides=["+recipe=small"]).l_max == 64
    with pytest.raises(ConfigCompositionException, match="recipe"):
        compose("unlisted", overrides=["recipe=small"])


@pytest.mark.usefixtures("config_dir")
def test_on_a_name_clash_a_searched_folder_loses_to_the_packaged_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    """`--config-dir` is appended to the search path, as `hydra.searchpath` is."""
    theirs = tmp_path_factory.mktemp("theirs")
    (theirs / "recipe").mkdir()
    (theirs / "recipe" / "small.yaml").write_text("# @package _global_\nl_max: 1\n")
    (theirs / "recipe" / "own.yaml").write_text("# @package _global_\nl_max: 2\n")
    searched = f"hydra.searchpath=[file://{theirs}]"
    assert compose("listed", overrides=[searched, "recipe=small"]).l_max == 64
    assert compose("listed", overrides=[searched, "recipe=own"]).l_max == 2
