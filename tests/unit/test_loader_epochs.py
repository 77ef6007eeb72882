"""Which epoch an iteration is, on one rank with real processes, and which processes live through it."""

from __future__ import annotations

import pytest

from odb_lightning import ODBDataLoader
from tests.loader_data import Augmented, Lengths, collate_augmented, epoch_of, make_loader
from tests.loader_processes import no_process_is_left  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_process_is_left")]


class TestEpochs:
    def test_each_pass_is_the_next_epoch_with_an_order_of_its_own(self) -> None:
        with make_loader(Lengths([4] * 40)) as loader:
            epochs = [epoch_of(loader) for _ in range(3)]
        assert [{step[0] for step in epoch} for epoch in epochs] == [{0}, {1}, {2}]
        assert len({tuple(step[2] for step in epoch) for epoch in epochs}) == 3

    def test_iter_before_a_batch_was_taken_restarts_the_same_epoch(self) -> None:
        with make_loader(Lengths([4] * 40)) as loader:
            iter(loader)
            abandoned = iter(loader)
            assert {step[0] for step in epoch_of(loader)} == {0}
            assert next(abandoned, None) is None, "an abandoned pass gives nothing any more"

    def test_after_a_break_a_new_epoch_begins(self) -> None:
        with make_loader(Lengths([4] * 40)) as loader:
            for batch in loader:
                assert batch.step.epoch == 0
                break
            for batch in loader:
                assert (batch.step.epoch, batch.step.step) == (1, 0)
                break
            assert {step[0] for step in epoch_of(loader)} == {2}

    def test_a_second_pass_ends_the_first(self) -> None:
        with make_loader(Lengths([4] * 40)) as loader:
            first = iter(loader)
            next(first)
            second = iter(loader)
            assert next(second).step.epoch == 1
            assert next(first, None) is None
            rest = list(second)
            assert {batch.step.epoch for batch in rest} == {1}
            assert [batch.step.step for batch in rest] == list(range(1, len(rest) + 1))

    def test_set_epoch_names_the_next_pass_and_the_ones_after_follow(self) -> None:
        with make_loader(Lengths([4] * 40)) as loader:
            zero = epoch_of(loader)
            loader.set_epoch(7)
            seven, eight = epoch_of(loader), epoch_of(loader)
            loader.set_epoch(0)
            assert epoch_of(loader) == zero
            loader.set_epoch(7)
            assert epoch_of(loader) == seven
        assert {step[0] for step in seven} == {7}
        assert {step[0] for step in eight} == {8}

    def test_an_epoch_does_not_depend_on_those_before_it(self) -> None:
        with make_loader(Augmented([5] * 40), collate_fn=collate_augmented) as loader:
            list(loader)
            after = [batch.data["drawn"] for batch in loader]
        with make_loader(Augmented([5] * 40), collate_fn=collate_augmented) as fresh:
            fresh.set_epoch(1)
            assert [batch.data["drawn"] for batch in fresh] == after

    def test_workers_and_collate_process_are_kept_over_epochs(self) -> None:
        with make_loader(Lengths([4] * 40), num_workers=2) as loader:
            pids = [self.pids(loader) for _ in range(3)]
            assert pids[0] == pids[1] == pids[2]
            assert (len(pids[0][0]), len(pids[0][1])) == (2, 1)

    def test_processes_that_are_not_persistent_are_new_in_each_epoch(self) -> None:
        with make_loader(Lengths([4] * 40), persistent_workers=False) as loader:
            first, second = self.pids(loader), self.pids(loader)
        assert not first[0] & second[0]
        assert not first[1] & second[1]

    @staticmethod
    def pids(loader: ODBDataLoader) -> tuple[set[int], set[int]]:
        batches = list(loader)
        return {pid for batch in batches for pid in batch.data["pids"]}, {batch.data["collate_pid"] for batch in batches}

    def test_a_closed_loader_can_be_iterated_again(self) -> None:
        loader = make_loader(Lengths([4] * 40))
        first = epoch_of(loader)
        loader.close()
        loader.close()
        assert {step[0] for step in epoch_of(loader)} == {1}
        loader.close()
        loader.set_epoch(0)
        assert epoch_of(loader) == first
        loader.close()

    def test_two_loaders_can_be_used_in_turns(self) -> None:
        with make_loader(Lengths([4] * 40)) as train, make_loader(Lengths([4] * 40), shuffle=False) as val:
            alone = epoch_of(train)
            train.set_epoch(0)
            interleaved = []
            for batch in train:
                interleaved.append((batch.step.epoch, batch.step.step, batch.step.sample_ids))
                assert [step[2][0] for step in epoch_of(val)]
            assert interleaved == alone
