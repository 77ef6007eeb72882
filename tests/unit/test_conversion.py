"""torch's loaders and Lightning's data modules are taken over as they are meant, or refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from odb_lightning import ODBDataLoader, ODBDataModule
from tests.loader_data import Lengths, collate, plain_list

DATA = Lengths([3, 5, 2, 4])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([{"input_ids": [1]}])


def views(loader: ODBDataLoader, rank: int = 0, world_size: int = 1) -> list[Any]:
    return list(loader._views(rank, world_size))


class TestFromDataLoader:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            pytest.param({}, [0, 1, 2, 3], id="in-order"),
            pytest.param({"sampler": SequentialSampler(DATA)}, [0, 1, 2, 3], id="sequential-sampler"),
            pytest.param({"batch_size": None}, [0, 1, 2, 3], id="no-batches"),
            pytest.param({"sampler": DistributedSampler(DATA, 2, 1, shuffle=False)}, [0, 1, 2, 3], id="distributed-in-order"),  # type: ignore[arg-type]
        ],
    )
    def test_sequential_orders_stay(self, arguments: dict[str, Any], expected: list[int]) -> None:
        loader = ODBDataLoader.from_dataloader(DataLoader(DATA, **arguments), l_max=8)  # type: ignore[arg-type]
        assert views(loader) == expected
        assert sorted(views(loader, 0, 2) + views(loader, 1, 2)) == expected

    @pytest.mark.parametrize(
        "arguments",
        [
            {"shuffle": True},
            {"sampler": RandomSampler(range(40))},
            {"sampler": DistributedSampler(range(40), num_replicas=4, rank=1, seed=0)},  # type: ignore[arg-type]
        ],
    )
    def test_random_orders_become_the_default_without_padding_or_loss(self, arguments: dict[str, Any]) -> None:
        loader = ODBDataLoader.from_dataloader(DataLoader(Lengths([1] * 40), **arguments), l_max=8)  # type: ignore[arg-type]
        dealt = [views(loader, rank, 3) for rank in range(3)]
        assert sorted(list(itertools.chain.from_iterable(dealt))) == list(range(40))
        assert list(itertools.chain.from_iterable(dealt)) != sorted(list(itertools.chain.from_iterable(dealt)))

    def test_options_are_inherited_and_can_be_overridden(self) -> None:
        existing = DataLoader(
            DATA, collate_fn=collate, num_workers=1, worker_init_fn=print, multiprocessing_context="forkserver"
        )  # type: ignore[arg-type]
        loader = ODBDataLoader.from_dataloader(existing, l_max=9, buffer_size=12)
        options = loader._options
        assert loader.dataset is DATA
        assert (loader.l_max, options["buffer_size"], options["num_workers"]) == (9, 12, 1)
        assert (options["collate_fn"], options["worker_init_fn"], options["start_method"]) == (collate, print, "forkserver")
        overridden = ODBDataLoader.from_dataloader(existing, l_max=9, num_workers=0, collate_fn=plain_list)
        assert (overridden._options["num_workers"], overridden._options["collate_fn"]) == (0, plain_list)

    @pytest.mark.parametrize(
        ("arguments", "match"),
        [
            ({"batch_size": 4}, "batch_size=4 of the loader is dropped: l_max decides"),
            ({"drop_last": True}, "drop_last=True of the loader is dropped: no sample is"),
            ({"num_workers": 1, "prefetch_factor": 5}, "prefetch_factor=5 of the loader is dropped"),
            ({"generator": torch.Generator()}, "generator is dropped"),
        ],
    )
    def test_what_has_no_meaning_any_more_warns(self, arguments: dict[str, Any], match: str) -> None:
        with pytest.warns(UserWarning, match=match) as caught:
            ODBDataLoader.from_dataloader(DataLoader(DATA, **arguments), l_max=8)  # type: ignore[arg-type]
        assert len(caught) == 1
        assert caught[0].filename == __file__, "the warning points at the user's line"

    def test_another_sampler_is_refused_unless_it_may_be_dealt_out(self) -> None:
        existing = DataLoader(DATA, sampler=WeightedRandomSampler([1.0, 2.0, 3.0, 4.0], 6))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"a WeightedRandomSampler.*deal_sampler=True"):
            ODBDataLoader.from_dataloader(existing, l_max=8)
        assert len(views(ODBDataLoader.from_dataloader(existing, l_max=8, deal_sampler=True))) == 6

    def test_a_random_sampler_with_replacement_or_of_a_part_is_no_permutation(self) -> None:
        for sampler in (RandomSampler(DATA, replacement=True), RandomSampler(DATA, num_samples=2)):  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="RandomSampler"):
                ODBDataLoader.from_dataloader(DataLoader(DATA, sampler=sampler), l_max=8)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "sampler", [SequentialSampler(range(2)), RandomSampler(range(2)), DistributedSampler(range(2), 1, 0)]
    )  # type: ignore[arg-type]
    def test_a_sampler_over_other_data_does_not_silently_become_one_over_all(self, sampler: Any) -> None:
        """Two of four samples: the loader may refuse it or keep the two, but must not train on four."""
        try:
            loader = ODBDataLoader.from_dataloader(DataLoader(DATA, sampler=sampler), l_max=8)  # type: ignore[arg-type]
        except ValueError:
            return
        assert sorted(views(loader)) == [0, 1]

    def test_a_subset_is_a_data_set_like_any_other(self) -> None:
        loader = ODBDataLoader.from_dataloader(DataLoader(Subset(DATA, [3, 1]), shuffle=True), l_max=8)  # type: ignore[arg-type]
        assert sorted(views(loader)) == [0, 1]

    def test_a_batch_sampler_of_the_users_own_is_refused(self) -> None:
        class Buckets(BatchSampler):
            pass

        existing = DataLoader(DATA, batch_sampler=Buckets(SequentialSampler(DATA), 2, False))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="batch_sampler is a Buckets"):
            ODBDataLoader.from_dataloader(existing, l_max=8)

    @pytest.mark.parametrize(
        "sampler", [RandomSampler(range(40)), WeightedRandomSampler([1.0] * 40, 40), [5, 6]], ids=["random", "weighted", "list"]
    )
    def test_the_order_inside_a_batch_sampler_is_not_lost(self, sampler: Any) -> None:
        """torch then reports a SequentialSampler as the loader's sampler, which is not what it uses."""
        existing = DataLoader(Lengths([1] * 40), batch_sampler=BatchSampler(sampler, 2, False))  # type: ignore[arg-type]
        try:
            loader = ODBDataLoader.from_dataloader(existing, l_max=8)
        except ValueError:
            return
        assert isinstance(sampler, RandomSampler)
        assert views(loader) != list(range(40))

    def test_iterable_data_is_taken_over(self) -> None:
        with ODBDataLoader.from_dataloader(DataLoader(Stream()), l_max=8) as loader:
            assert sorted(sample_id for batch in loader for sample_id in batch.step.sample_ids) == [0]

    @pytest.mark.parametrize("existing", [[1, 2], None, DATA])
    def test_what_is_no_dataloader_is_refused(self, existing: Any) -> None:
        with pytest.raises(TypeError, match=f"existing has to be a torch DataLoader, got {type(existing).__name__}"):
            ODBDataLoader.from_dataloader(existing, l_max=8)

    def test_unbatched_loading_keeps_a_collate_fn_of_the_users_own_only(self) -> None:
        without = ODBDataLoader.from_dataloader(DataLoader(DATA, batch_size=None), l_max=8)  # type: ignore[arg-type]
        assert without._options["collate_fn"] is torch.utils.data.default_collate
        with_own = ODBDataLoader.from_dataloader(DataLoader(DATA, batch_size=None, collate_fn=collate), l_max=8)  # type: ignore[arg-type]
        assert with_own._options["collate_fn"] is collate


class UsersData(LightningDataModule):
    """A data module as people have it."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.size = size
        self.stages: list[str] = []

    def setup(self, stage: str) -> None:
        self.stages.append(stage)
        self.train = Lengths([2] * self.size)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return [DataLoader(self.train, collate_fn=collate), "not a loader"]  # type: ignore[arg-type]

    def test_dataloader(self) -> Any:
        return DataLoader(self.train, collate_fn=collate)  # type: ignore[arg-type]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return ("transferred", batch)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return ("before", batch)

    def state_dict(self) -> dict[str, Any]:
        return {"size": self.size}

    def helper(self) -> str:
        return f"helper of {self.size}"


class TestFromDataModule:
    def converted(self, **options: Any) -> Any:
        module = ODBDataModule.from_datamodule(UsersData(3), l_max=8, **options)
        module.setup("fit")
        return module

    def test_torch_loaders_are_converted_and_nothing_else(self) -> None:
        module = self.converted(buffer_size=5)
        train, (val, other) = module.train_dataloader(), module.val_dataloader()
        assert isinstance(train, ODBDataLoader)
        assert isinstance(val, ODBDataLoader)
        assert (train.shuffle, val.shuffle) == (True, False)
        assert (train.l_max, train._options["buffer_size"], train._options["collate_fn"]) == (8, 5, collate)
        assert other == "not a loader"
        test = module.test_dataloader()
        assert isinstance(test, ODBDataLoader)
        assert (test.shuffle, test.l_max) == (False, 8)

    def test_what_is_meant_for_training_does_not_reach_validation(self) -> None:
        """In non-join a validation would begin its samples anew, or leave some out; in windows it has no step."""
        module = self.converted(mode="non_join", quota=7, accumulate=2)
        train, (val, _) = module.train_dataloader(), module.val_dataloader()
        assert [(x._options["mode"], x._options["quota"], x.accumulate) for x in (train, val)] == [
            ("non_join", 7, 2),
            ("join", None, None),
        ]

    def test_the_users_own_methods_and_state_stay(self) -> None:
        module = self.converted()
        assert isinstance(module, UsersData)
        assert module.helper() == "helper of 3"
        assert module.stages == ["fit"]
        assert module.state_dict() == {"size": 3}
        assert module.transfer_batch_to_device(1, torch.device("cpu"), 0) == ("transferred", 1)
        assert module.on_before_batch_transfer(1, 0) == ("before", 1)

    def test_the_existing_module_is_left_as_it_was(self) -> None:
        existing = UsersData()
        ODBDataModule.from_datamodule(existing, l_max=8)
        existing.setup("fit")
        assert type(existing) is UsersData
        assert type(existing.train_dataloader()) is DataLoader

    def test_what_is_no_data_module_is_refused(self) -> None:
        with pytest.raises(TypeError, match="existing has to be a LightningDataModule, got DataLoader"):
            ODBDataModule.from_datamodule(DataLoader(DATA), l_max=8)  # type: ignore[arg-type]

    def test_lightning_knows_the_users_transfer_hooks(self) -> None:
        from lightning.pytorch.utilities.model_helpers import is_overridden

        module = self.converted()
        assert is_overridden("transfer_batch_to_device", module)
        assert is_overridden("on_before_batch_transfer", module)
        assert not is_overridden("predict_dataloader", module)


class TestODBDataModule:
    def test_loaders_take_the_options_and_validation_keeps_the_order(self) -> None:
        module = ODBDataModule(DATA, Lengths([1, 2]), l_max=8, val_l_max=6, collate_fn=collate, buffer_size=4, seed=2)
        assert (module.train_loader, module.val_loader) == (None, None)
        train, val = module.train_dataloader(), module.val_dataloader()
        assert (train, val) == (module.train_loader, module.val_loader)
        assert (train.l_max, train.shuffle, train.seed, train._options["buffer_size"]) == (8, True, 2, 4)
        assert (val.l_max, val.shuffle, val._options["collate_fn"]) == (6, False, collate)
        assert views(val) == [0, 1]

    def test_validation_takes_the_training_budget_by_default_and_none_of_its_sampler(self) -> None:
        module = ODBDataModule(DATA, Lengths([1, 2]), l_max=8, sampler=[3, 3], accumulate=2)
        assert module.val_l_max == 8
        assert views(module.train_dataloader()) == [3, 3]
        assert views(module.val_dataloader()) == [0, 1]

    def test_validation_is_never_in_non_join(self) -> None:
        module = ODBDataModule(DATA, Lengths([1, 2]), l_max=8, mode="non_join", quota=9)
        options = [loader._options for loader in (module.train_dataloader(), module.val_dataloader())]
        assert [(loader["mode"], loader["quota"]) for loader in options] == [("non_join", 9), ("join", None)]

    def test_a_sampler_that_is_dealt_out_does_not_break_validation(self) -> None:
        module = ODBDataModule(DATA, Lengths([1, 2]), l_max=8, sampler=[3, 2], deal_sampler=True)
        assert views(module.train_dataloader(), 1, 2) == [2]
        assert views(module.val_dataloader()) == [0, 1]

    def test_an_unknown_option_is_refused_at_once_and_the_known_are_named(self) -> None:
        with pytest.raises(TypeError, match=r"unknown option 'batch_size'.*buffer_size"):
            ODBDataModule(DATA, l_max=8, batch_size=3)

    def test_bad_values_fail_when_the_loader_is_made(self) -> None:
        with pytest.raises(ValueError, match="l_max must be"):
            ODBDataModule(DATA, l_max=0).train_dataloader()

    @pytest.mark.parametrize("name", ["val_dataloader", "test_dataloader", "predict_dataloader"])
    def test_without_a_data_set_there_is_no_loader(self, name: str) -> None:
        from lightning.pytorch.utilities.exceptions import MisconfigurationException

        module = ODBDataModule(DATA, l_max=8)
        with pytest.raises(MisconfigurationException):
            getattr(module, name)()

    def test_test_and_prediction_sets_have_loaders_in_their_order(self, tmp_path: Path) -> None:
        class Predicts(Model):
            def predict_step(self, batch: Any, _: int) -> Any:
                return self.trainer.strategy.val_step_info.sample_ids  # type: ignore[attr-defined]

            def test_step(self, batch: Any, _: int) -> None:
                tested.extend(self.trainer.strategy.val_step_info.sample_ids)  # type: ignore[attr-defined]

        tested: list[Any] = []
        module = ODBDataModule(
            test_dataset=Lengths([3, 1]),
            predict_dataset=DATA,
            l_max=8,
            val_l_max=6,
            collate_fn=collate,
            num_workers=0,
            quota=9,
            num_supervised_fn=len,
            mode="non_join",
        )
        used, model = trainer(tmp_path, strategy="odb"), Predicts()
        predictions = used.predict(model, datamodule=module)
        assert predictions is not None
        assert sorted(sample_id for ids in predictions for sample_id in ids) == [0, 1, 2, 3]
        used.test(model, datamodule=module, verbose=False)
        assert sorted(tested) == [0, 1]
        assert all(loader._process is None for loader in module._loaders), "closed at the end"


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.trained = 0

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.trained += 1
        return self.weight * 1.0

    def validation_step(self, batch: Any, _: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(folder: Path, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )


@pytest.mark.parametrize(
    "make", [lambda: ODBDataModule(DATA, DATA, l_max=8), lambda: ODBDataModule.from_datamodule(UsersData(), l_max=8)]
)
def test_a_plain_strategy_is_refused_before_training(make: Any, tmp_path: Path) -> None:
    model = Model()
    with pytest.raises(TypeError, match="needs an ODB strategy, but the trainer has SingleDeviceStrategy"):
        trainer(tmp_path).fit(model, datamodule=make())
    assert model.trained == 0


class TrainOnly(LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(DATA, collate_fn=collate)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ODBDataModule(DATA, l_max=8, collate_fn=collate, num_workers=0),
        lambda: ODBDataModule.from_datamodule(TrainOnly(), l_max=8),
    ],
    ids=["ODBDataModule", "from_datamodule"],
)
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:You defined a `validation_step` but have no")
def test_training_without_validation_data_works_for_a_model_that_can_validate(make: Any, tmp_path: Path) -> None:
    """Lightning leaves validation out where there is no val_dataloader, and so it has to be with ours."""
    model = Model()
    module = make()
    trainer(tmp_path, strategy="odb").fit(model, datamodule=module)
    assert model.trained == 1
