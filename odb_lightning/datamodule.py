"""The ODB loaders as a `LightningDataModule`."""

from __future__ import annotations

import copy
import weakref
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from odb_lightning.loader import LOADER_OPTIONS, ODBDataLoader
from odb_lightning.sharding import is_iterable

_EVALUATION_METHODS = ("val_dataloader", "test_dataloader", "predict_dataloader")
_OF_TRAINING_ALONE = ("sampler", "deal_sampler", "accumulate", "mode", "quota")


class _NeedsODBStrategy(LightningDataModule):
    def setup(self, stage: str) -> None:
        """Refuses a strategy that would train on idle steps and with a wrong loss."""
        super().setup(stage)
        from odb_lightning.strategies import ODBStrategyMixin

        trainer = self.trainer
        if trainer is not None and not isinstance(trainer.strategy, ODBStrategyMixin):
            raise TypeError(
                f"{type(self).__name__} needs an ODB strategy, but the trainer has {type(trainer.strategy).__name__}: "
                "Trainer(strategy='odb') for one device, 'odb_ddp', or 'odb_deepspeed_stage_1', '_2', '_3'"
            )


class ODBDataModule(_NeedsODBStrategy):
    """Data sets for training, validation, test and prediction behind an `ODBDataLoader` each; all but training unshuffled.

    Takes every option of `ODBDataLoader` (not rank and world size, which the strategy knows). `val_l_max`: token budget of
    batches that are not of training, by default `l_max`.
    """

    def __init__(
        self,
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        l_max: int,
        val_l_max: int | None = None,
        **loader_options: Any,
    ) -> None:
        super().__init__()
        unknown = loader_options.keys() - LOADER_OPTIONS
        if unknown:
            raise TypeError(
                f"unknown option {sorted(unknown)[0]!r}; an ODBDataModule takes {', '.join(sorted(LOADER_OPTIONS))}"
            )
        self.train_dataset = train_dataset
        self.val_dataset = val_dataset
        self.test_dataset = test_dataset
        self.predict_dataset = predict_dataset
        self.l_max = l_max
        self.val_l_max = l_max if val_l_max is None else val_l_max
        self.loader_options = loader_options
        self.train_loader: ODBDataLoader | None = None
        self.val_loader: ODBDataLoader | None = None
        # Weakly: a loader that Lightning has replaced goes, and its processes with it.
        self._loaders: weakref.WeakSet[ODBDataLoader] = weakref.WeakSet()

    @property
    def val_dataset(self) -> Any:
        """None for no validation."""
        return self._val_dataset

    @val_dataset.setter
    def val_dataset(self, dataset: Any) -> None:
        self._val_dataset = dataset
        # Lightning validates as soon as there is a method of this name that is not its own.
        if dataset is None:
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]
        else:
            self.__dict__.pop("val_dataloader", None)

    def train_dataloader(self) -> Any:
        if self.train_dataset is None:
            return super().train_dataloader()
        self.train_loader = ODBDataLoader(self.train_dataset, l_max=self.l_max, **self.loader_options)
        self._loaders.add(self.train_loader)
        return self.train_loader

    def val_dataloader(self) -> Any:
        self.val_loader = self._evaluation_loader(self.val_dataset)
        return self.val_loader

    def test_dataloader(self) -> Any:
        return super().test_dataloader() if self.test_dataset is None else self._evaluation_loader(self.test_dataset)

    def predict_dataloader(self) -> Any:
        return super().predict_dataloader() if self.predict_dataset is None else self._evaluation_loader(self.predict_dataset)

    def _evaluation_loader(self, dataset: Any) -> ODBDataLoader:
        options = {name: value for name, value in self.loader_options.items() if name not in _OF_TRAINING_ALONE}
        if not is_iterable(dataset):
            options.pop("sharding", None)
            options.pop("skip_ahead", None)
        loader = ODBDataLoader(dataset, l_max=self.val_l_max, **(options | {"shuffle": False}))
        self._loaders.add(loader)
        return loader

    def teardown(self, stage: str) -> None:
        for loader in list(self._loaders):
            loader.close()
        super().teardown(stage)

    @staticmethod
    def from_datamodule(existing: LightningDataModule, l_max: int, **options: Any) -> LightningDataModule:
        """A copy of your data module whose `DataLoader`s are ODB loaders, those of test and prediction, too (see
        `ODBDataLoader.from_dataloader` for `options`); everything else is your class's own, transfer hooks included.

        Loaders that are no torch `DataLoader` are left as they are.
        """
        if not isinstance(existing, LightningDataModule):
            raise TypeError(f"existing has to be a LightningDataModule, got {type(existing).__name__}")
        if isinstance(existing, _NeedsODBStrategy):
            raise TypeError(f"existing is a {type(existing).__name__}: its loaders are ODB loaders already")
        original = type(existing)
        of_evaluation = {name: value for name, value in options.items() if name not in ("accumulate", "mode", "quota")}

        def converting(name: str, chosen: dict[str, Any]) -> Any:
            return lambda self: _converted(getattr(original, name)(self), l_max, chosen)

        names = {"train_dataloader": options} | dict.fromkeys(_EVALUATION_METHODS, of_evaluation)
        replaced = {name: converting(name, chosen) for name, chosen in names.items() if _has(existing, name)}
        methods = {"__module__": original.__module__} | replaced
        converted = copy.copy(existing)
        converted.__class__ = type(f"ODB{original.__name__}", (_NeedsODBStrategy, original), methods)
        return converted


def _has(module: LightningDataModule, name: str) -> bool:
    """Whether the user's class has a method of its own."""
    return getattr(type(module), name) is not getattr(LightningDataModule, name)


def _converted(loaders: Any, l_max: int, options: dict[str, Any]) -> Any:
    if isinstance(loaders, DataLoader):
        return ODBDataLoader.from_dataloader(loaders, l_max=l_max, **options)
    if isinstance(loaders, (list, tuple)):
        return [_converted(loader, l_max, options) for loader in loaders]
    if isinstance(loaders, dict):
        return {name: _converted(loader, l_max, options) for name, loader in loaders.items()}
    return loaders
