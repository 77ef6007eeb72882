"""The loader on one rank, with real processes: what it gives, in which order, whatever the number of workers."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch

from odb_lightning import IDLE_DATA, ODBBatch, ODBDataLoader
from tests.loader_data import (
    Augmented,
    Counted,
    Lengths,
    Stored,
    collate_augmented,
    collate_in_place,
    collate_with_meta,
    epoch_of,
    lognormal_lengths,
    make_loader,
    plain_list,
)
from tests.loader_processes import no_process_is_left  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_process_is_left")]


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (300, {}),
        (300, {"l_max": 200, "buffer_size": 7, "num_workers": 2}),
        (40, {"l_max": 500, "buffer_size": 1024}),
        (50, {"max_rows": 3, "l_max": 300}),
        (60, {"buffer_size": 1}),
        (45, {"shuffle": False, "num_workers": 0}),
        (1, {}),
    ],
    ids=["many", "small-window", "window-over-data", "max-rows", "window-of-one", "in-order", "one-sample"],
)
@pytest.mark.parametrize("alignment", ["matched", "paper"])
def test_every_sample_once_within_the_budget_and_the_step_says_what_it_holds(
    count: int, options: dict[str, Any], alignment: str
) -> None:
    lengths = lognormal_lengths(count, longest=60)
    with make_loader(Lengths(lengths), alignment=alignment, **options) as loader:
        batches = list(loader)
    assert sorted(itertools.chain.from_iterable(batch.step.sample_ids for batch in batches)) == list(range(count))
    assert [batch.step.step for batch in batches] == list(range(len(batches)))
    for batch in batches:
        assert type(batch) is ODBBatch
        step, data = batch.step, batch.data
        rows = [lengths[index] for index in step.sample_ids]
        assert rows == sorted(rows, reverse=True), "the longest first"
        assert len(rows) * rows[0] <= loader.l_max
        assert len(rows) <= options.get("max_rows", count)
        assert data["input_ids"].shape == (len(rows), rows[0])
        assert data["input_ids"][:, 0].tolist() == list(step.sample_ids)
        assert (step.num_samples, step.num_tokens_real, step.max_length) == (len(rows), sum(rows), rows[0])
        assert step.num_tokens_padded == data["input_ids"].numel()
        assert step.num_tokens_supervised == int((data["labels"][:, 1:] != -100).sum())
        assert (step.global_num_samples, step.window_num_samples) == (len(rows), len(rows))
        assert step.global_num_tokens_supervised == step.window_num_tokens_supervised == step.num_tokens_supervised
        assert (step.is_idle, step.num_active_ranks, step.world_size, step.accumulate, step.epoch) == (False, 1, 1, 1, 0)
        assert batch.stand_in is None
        assert all(type(index) is int for index in step.sample_ids)


@pytest.mark.parametrize("count", [0, 3])
def test_an_epoch_without_a_sample_to_emit_ends_at_once(count: int) -> None:
    with make_loader(Lengths([0] * count)) as loader, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert epoch_of(loader) == epoch_of(loader) == []
        assert loader.stats.dropped == ({"empty": 6} if count else {})


class TestDeterminism:
    @staticmethod
    def contents(loader: ODBDataLoader, epochs: int = 2) -> list[Any]:
        with loader:
            return [
                [batch.step.sample_ids, batch.data["input_ids"].tolist(), batch.data["drawn"], batch.data["drawn_by_collate"]]
                for _ in range(epochs)
                for batch in loader
            ]

    def loader(self, **options: Any) -> ODBDataLoader:
        return make_loader(
            Augmented(lognormal_lengths(90, longest=50)), **({"collate_fn": collate_augmented, "seed": 5} | options)
        )

    @pytest.mark.filterwarnings("ignore:This DataLoader will create")
    def test_workers_prefetch_and_process_lifetime_do_not_change_a_batch(self) -> None:
        expected = self.contents(self.loader(num_workers=0))
        assert len({tuple(row) for batch in expected for row in batch[2]}) == 180, "each draws anew in each epoch"
        assert len({tuple(batch[3]) for batch in expected}) == len(expected)
        for options in (
            {"num_workers": 1},
            {"num_workers": 3, "prefetch_factor": 1},
            {"num_workers": 2, "persistent_workers": False},
        ):
            assert self.contents(self.loader(**options)) == expected, options

    def test_the_random_state_of_training_is_neither_used_nor_altered(self) -> None:
        torch.manual_seed(1)
        expected, state = self.contents(self.loader(), 1), torch.get_rng_state()
        assert torch.equal(state, torch.manual_seed(1).get_state())
        torch.manual_seed(2)
        assert self.contents(self.loader(), 1) == expected

    def test_another_seed_is_another_order_and_other_draws(self) -> None:
        ours, theirs = (self.contents(self.loader(seed=seed), 1) for seed in (1, 2))
        assert [batch[0] for batch in ours] != [batch[0] for batch in theirs]
        first, second = ({tuple(row) for batch in batches for row in batch[2]} for batches in (ours, theirs))
        assert not first & second

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_a_collate_fn_that_works_in_place_does_not_reach_the_data_set(self, num_workers: int) -> None:
        with make_loader(Stored([3, 4, 5]), collate_fn=collate_in_place, num_workers=num_workers, shuffle=False) as loader:
            epochs = [[(batch.data["input_ids"].tolist(), batch.data["values"]) for batch in loader] for _ in range(2)]
        assert epochs[0] == epochs[1]


class TestSampler:
    def test_ids_of_any_kind_reach_the_data_set_and_come_back(self) -> None:
        dataset = {"a": {"input_ids": [1]}, ("b", 2): {"input_ids": [1, 2]}, 3: {"input_ids": [1, 2, 3]}}
        with make_loader(dataset, sampler=list(dataset), collate_fn=plain_list, num_supervised_fn=len) as loader:
            seen = {
                index: len(row["input_ids"])
                for batch in loader
                for index, row in zip(batch.step.sample_ids, batch.data, strict=True)
            }
        assert seen == {"a": 1, ("b", 2): 2, 3: 3}

    def test_views_may_repeat(self) -> None:
        with make_loader(Lengths([4, 4]), sampler=[1, 0, 1, 1]) as loader:
            assert sorted(index for step in epoch_of(loader) for index in step[2]) == [0, 1, 1, 1]
            assert loader.stats.views_expected == 4


class TestPolicies:
    LENGTHS = (5, 0, 90, 70, 6, 0, 0, 64)

    def test_by_default_empty_samples_are_dropped_and_long_ones_go_out_alone(self) -> None:
        loader = make_loader(Lengths(self.LENGTHS), shuffle=False)
        with pytest.warns(UserWarning) as caught, loader:
            epochs = [epoch_of(loader) for _ in range(2)]
        assert sorted(str(w.message).split(" ")[0] for w in caught) == ["dataset[1]", "dataset[2]"], "once for each kind"
        assert all("/tests/" in w.filename for w in caught), "the warning points at the user's line"
        for epoch in epochs:
            assert sorted(index for step in epoch for index in step[2]) == [0, 2, 3, 4, 7]
            assert {step[2] for step in epoch} >= {(2,), (3,), (7,)}
        assert loader.stats.dropped == {"empty": 6}
        assert loader.stats.dropped_ids == [1, 5, 6, 1, 5, 6]
        assert loader.stats.over_budget == 4

    def test_long_samples_can_be_dropped(self) -> None:
        loader = make_loader(Lengths(self.LENGTHS), shuffle=False, oversize="drop")
        with pytest.warns(UserWarning) as caught, loader:
            assert sorted(index for step in epoch_of(loader) for index in step[2]) == [0, 4, 7]
        assert sum("oversize='drop'" in str(w.message) for w in caught) == 1
        assert loader.stats.dropped == {"empty": 3, "oversize": 2}
        assert loader.stats.over_budget == 0

    def test_a_budget_exactly_met_is_not_over_it(self) -> None:
        with (
            make_loader(Lengths([513, 10, 10, 512]), l_max=512, shuffle=False) as loader,
            pytest.warns(UserWarning, match=r"dataset\[0\]"),
        ):
            steps = epoch_of(loader)
        assert {step[2] for step in steps} >= {(0,), (3,)}
        assert loader.stats.over_budget == 1


class TestStats:
    def test_lengths_and_views_are_counted_over_all_epochs(self) -> None:
        lengths = lognormal_lengths(80, longest=60)
        with make_loader(Lengths(lengths), num_workers=0, alignment="paper") as loader:
            list(loader)
            list(loader)
        stats = loader.stats
        assert (stats.views_expected, stats.length_count, stats.length_sum) == (160, 160, 2 * sum(lengths))
        assert stats.length_sum_squares == 2 * sum(length * length for length in lengths)
        assert stats.length_short == 2 * sum(4 * length < loader.l_max for length in lengths)
        assert (stats.dropped, stats.dropped_ids, stats.over_budget) == ({}, [], 0)
        assert stats.rounds == 2 * (-(-80 // 32) + 1), "each window at once, and a round that finds nothing left"
        assert stats.wait_seconds > 0
        assert stats.exchange_seconds == 0

    @pytest.mark.parametrize(("options", "chunks"), [({"num_workers": 0}, 1), ({"num_workers": 2, "prefetch_factor": 3}, 6)])
    def test_depth_counts_window_and_messages(self, options: dict[str, Any], chunks: int) -> None:
        with make_loader(Lengths([2] * 50), **options) as loader:
            list(loader)
            assert loader.stats.outstanding_depth == 32 + chunks * loader._options["chunk_size"]


@pytest.mark.parametrize(("accumulate", "count"), [(1, 5), (3, 20), (4, 9), (20, 7)])
def test_windows_know_their_sums_from_their_first_step(accumulate: int, count: int) -> None:
    with make_loader(Lengths([40 + n % 7 for n in range(count)], masked=3), accumulate=accumulate) as loader:
        for _ in range(2):
            steps = [batch.step for batch in loader]
            assert len(steps) == count
            for start in range(0, count, accumulate):
                window = steps[start : start + accumulate]
                assert {step.window_num_tokens_supervised for step in window} == {
                    sum(step.num_tokens_supervised for step in window)
                }
                assert {step.window_num_samples for step in window} == {sum(step.num_samples for step in window)}
                assert {step.accumulate for step in window} == {accumulate}
                shares = sum(step.loss_multiplier() for step in window) / accumulate
                assert shares == pytest.approx(1.0)


def test_fractional_targets_are_summed_as_they_are() -> None:
    with make_loader(Lengths([40] * 5), accumulate=2, num_supervised_fn=half_of_the_rows) as loader:
        steps = [batch.step for batch in loader]
    assert [step.num_tokens_supervised for step in steps] == [0.5] * 5
    assert [step.window_num_tokens_supervised for step in steps] == [1, 1, 1, 1, 0.5]


def half_of_the_rows(batch: Any) -> float:
    return len(batch["input_ids"]) / 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_trainers_last_step_ends_the_epoch_and_its_window(num_workers: int) -> None:
    with make_loader(Lengths([40] * 300), num_workers=num_workers) as loader:
        loader.attach(rank=0, world_size=1, accumulate=4, max_steps=10)
        for epoch in range(3):
            steps = [batch.step for batch in loader]
            assert [step.step for step in steps] == list(range(10))
            assert {step.epoch for step in steps} == {epoch}
            assert [step.window_num_samples for step in steps] == [4] * 8 + [2] * 2
        loader.attach(rank=0, world_size=1, accumulate=4, max_steps=None)
        assert sorted(index for step in epoch_of(loader) for index in step[2]) == list(range(300))


def test_what_a_trainer_knows_must_not_contradict_what_the_user_said() -> None:
    with pytest.raises(ValueError, match="accumulate=2, but the trainer has accumulate_grad_batches=3"):
        make_loader(Lengths([1]), accumulate=2).attach(rank=0, world_size=1, accumulate=3, max_steps=None)
    with pytest.raises(ValueError, match="rank=0, world_size=1, but"):
        make_loader(Lengths([1]), rank=0, world_size=1).attach(rank=1, world_size=2, accumulate=3, max_steps=None)


def test_look_ahead_is_bounded_by_what_the_loader_says() -> None:
    """C07: the lengths of 100000 samples are not all looked at before the first step."""
    dataset = Counted([16] * 100_000)
    with make_loader(dataset, l_max=64, buffer_size=64, num_workers=2) as loader:
        for taken, batch in enumerate(itertools.islice(loader, 60), start=1):
            depth = loader.stats.outstanding_depth
            assert depth <= 64 + 2 * 2 * 64
            assert dataset.calls.value >= sum([batch.step.num_samples])
            assert dataset.calls.value <= depth + (16 + 8 + taken) * 4


class TestBatches:
    def test_a_dict_subclass_with_attributes_stays_what_it_is(self) -> None:
        with make_loader(Lengths([4, 5, 6]), collate_fn=collate_with_meta) as loader:
            for batch in loader:
                assert type(batch.data).__name__ == "WithMeta"
                assert batch.data.meta["rows"] == batch.step.num_samples
                assert batch.data.meta["first"].tolist() == [batch.step.sample_ids[0]]

    def test_pinning_is_left_out_where_there_is_nothing_to_pin_for(self) -> None:
        with pytest.warns(UserWarning, match="pin_memory=True is ignored"):
            loader = make_loader(Lengths([4] * 10), pin_memory=True)
        with loader:
            for batch in loader:
                assert batch.data["input_ids"].is_pinned() == torch.cuda.is_available()

    def test_samples_of_a_megabyte(self) -> None:
        with make_loader(
            Large(24, 2**18), collate_fn=plain_list, num_supervised_fn=len, l_max=80, num_workers=2, buffer_size=8
        ) as loader:
            for batch in loader:
                for index, sample in zip(batch.step.sample_ids, batch.data, strict=True):
                    assert sample["pixels"].shape == (2**18,)
                    assert bool((sample["pixels"] == index).all())

    def test_batches_larger_than_the_shared_memory(self) -> None:
        with make_loader(Large(3, 10 * 2**20), collate_fn=plain_list, num_supervised_fn=len, l_max=20, buffer_size=3) as loader:
            sizes = {}
            for batch in loader:
                for index, sample in zip(batch.step.sample_ids, batch.data, strict=True):
                    assert bool((sample["pixels"] == index).all())
                    sizes[index] = sample["pixels"].numel() * 4
        assert sizes == dict.fromkeys(range(3), 40 * 2**20)

    def test_batches_stay_as_they_are_while_later_ones_arrive(self) -> None:
        with make_loader(Lengths([60] * 200)) as loader:
            batches = list(loader)
        for batch in batches:
            assert batch.data["input_ids"][:, 0].tolist() == list(batch.step.sample_ids)
            batch.data["input_ids"].add_(1)

    def test_default_collate_and_samples_of_one_length(self) -> None:
        with make_loader(Lengths([8] * 20), collate_fn=None) as loader:
            assert sum(batch.data["input_ids"].shape[0] for batch in loader) == 20

    def test_no_step_is_idle_on_one_rank(self) -> None:
        with make_loader(Lengths([8] * 20)) as loader:
            assert all(batch.data is not IDLE_DATA and not batch.step.is_idle for batch in loader)


class Large(Lengths):
    """Samples of `size` float32 with few tokens."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__([4] * count)
        self.size = size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(4), "labels": torch.arange(4), "pixels": torch.full((self.size,), float(index))}


def test_training_in_a_loop_of_ones_own_gives_the_mean_over_all_targets() -> None:
    """Two micro-batches an update; the gradient equals that of all the window's targets at once."""
    model = torch.nn.Embedding(64, 64)
    torch.nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(0))

    def summed_loss(batch: Any) -> torch.Tensor:
        logits, targets = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")

    with make_loader(Lengths([5 + n % 40 for n in range(64)], masked=3), accumulate=2) as loader:
        window: list[Any] = []
        updates = 0
        for batch in loader:
            mean = summed_loss(batch.data) / max(batch.step.num_tokens_supervised, 1)
            (mean * batch.step.loss_multiplier() / 2).backward()  # type: ignore[no-untyped-call]
            window.append(batch)
            if len(window) == 2:
                gradient = model.weight.grad
                assert gradient is not None
                targets = sum(int((b.data["labels"][:, 1:] != -100).sum()) for b in window)
                (expected,) = torch.autograd.grad(sum(summed_loss(b.data) for b in window) / targets, [model.weight])
                torch.testing.assert_close(gradient, expected)
                with torch.no_grad():
                    model.weight -= 0.1 * gradient
                model.weight.grad, window = None, []
                updates += 1
    assert updates > 5
