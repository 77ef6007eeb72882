"""The shapes of a Lightning run, on two ranks of unequal data: each does exactly the steps on the samples that are due, in
order, and ends cleanly."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from odb_lightning import ShardedSampler
from odb_lightning.plan import RoundPlanner, simulate_ranks
from tests.multiprocess.ranks import run_ranks
from tests.multiprocess.shape_cases import (
    ALL_PADDING,
    CASES,
    DEALT,
    DEALT_VAL,
    L_MAX,
    LENGTHS,
    MINIMAL,
    MINIMAL_SHARDS,
    NUM_STEPS,
    NUM_VAL_STEPS,
    STREAM,
    TRAIN,
    VAL,
    WINDOW,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(320)]

Event = tuple[str, int, int, list[list[int]]]
"""Loop, epoch (in training) or number of the loader, number of the step, and the ids of the samples on each rank."""


class Ranks:
    """The results of all cases on both ranks, which run them once."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._results: list[Any] | None = None

    def _all(self) -> list[Any]:
        if self._results is None:
            self._results = run_ranks(
                "tests.multiprocess.shape_cases:run_cases",
                2,
                self._folders.mktemp("shapes"),
                seconds=300,
                names=list(CASES),
            )
        return self._results

    def __call__(self, name: str) -> list[dict[str, Any]]:
        """A case's results, after a look at what holds for every case."""
        both = [result.value[name] for result in self._all()]
        for rank, result in enumerate(both):
            assert "exception" not in result, f"rank {rank}:\n{result['exception']}"
            assert result["is_clean"], "a process is left"
            assert result["is_finite"]
            assert result["has_moved"] == (result["global_step"] > 0)
        for key in ("parameters", "global_step", "metrics", "error"):
            assert json.dumps(both[0].get(key)) == json.dumps(both[1].get(key)), f"{key} differs"  # and NaN is NaN
        return both


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(tmp_path_factory)


def events(both: list[dict[str, Any]]) -> list[Event]:
    """What both ranks did: they have to have done the same, on samples of their own."""
    first, second = (result["events"] for result in both)
    assert [event[:3] for event in first] == [event[:3] for event in second]
    return [(loop, place, step, [ids, other[3]]) for (loop, place, step, ids), other in zip(first, second, strict=True)]


def simulated(
    shards: Sequence[Sequence[int]],
    lengths: Sequence[int] = LENGTHS,
    *,
    order: int | None,
    joins: bool = True,
    quota: int | None = None,
) -> list[list[list[int]]]:
    """Per step and rank the ids of its samples. `order`: the epoch whose order the steps have, None for the shards' own."""

    def planner(_: int) -> RoundPlanner:
        seed = None if order is None else f"0/{order}"
        return RoundPlanner(l_max=L_MAX, buffer_size=WINDOW, alignment="paper", order_seed=seed, joins=joins)

    run = simulate_ranks([[lengths[index] for index in shard] for shard in shards], planner, quota=quota)
    return [[[shards[rank][position] for position in group] for rank, group in enumerate(step)] for step in run.steps]


def numbered(loop: str, place: int, steps: list[list[list[int]]]) -> list[Event]:
    return [(loop, place, number, ids) for number, ids in enumerate(steps)]


def train(epoch: int) -> list[Event]:
    return numbered("train", epoch, simulated(TRAIN, order=epoch))


def val(loop: str = "val", loader: int = 0) -> list[Event]:
    return numbered(loop, loader, simulated(VAL, order=None))


def dealt_shards(lengths: Sequence[int], epoch: int, shuffle: bool) -> list[list[int]]:
    samplers = [ShardedSampler(len(lengths), rank=rank, world_size=2, shuffle=shuffle) for rank in range(2)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def dealt(epoch: int) -> list[Event]:
    return numbered("train", epoch, simulated(dealt_shards(DEALT, epoch, True), DEALT, order=epoch))


def dealt_val() -> list[Event]:
    return numbered("val", 0, simulated(dealt_shards(DEALT_VAL, 0, False), DEALT_VAL, order=None))


def test_idle_steps_are_part_of_what_is_expected() -> None:
    """Which the other tests compare with."""
    assert (len(train(0)), len(val())) == (NUM_STEPS, NUM_VAL_STEPS)
    assert [sum(not ids[rank] for *_, ids in train(0)) for rank in range(2)] == [0, 6]
    assert [sum(not ids[rank] for *_, ids in val()) for rank in range(2)] == [3, 0]
    assert all(any(not ids[1] for *_, ids in events) for events in (dealt(0), dealt(1), dealt_val()))
    orders = [[ids for *_, ids in dealt(epoch)] for epoch in range(3)]
    assert len({str(order) for order in orders}) == 3
    for order in orders:
        assert sorted(index for step in order for ids in step for index in ids) == list(range(len(DEALT)))


EXPECTED: dict[str, Callable[[], list[Event]]] = {
    "fast_dev_run=True": lambda: train(0)[:1] + val()[:1],
    "fast_dev_run=3": lambda: train(0)[:3] + val()[:3],
    "fast_dev_run above": lambda: train(0) + val(),
    "overfit": lambda: 3 * (dealt(0)[:2] + dealt_val()[:2]),
    "overfit above": lambda: 2 * (dealt(0) + dealt_val()),
    "train limit below": lambda: train(0)[:3] + val() + train(1)[:3] + val(),
    "train limit equal": lambda: train(0) + val() + train(1) + val(),
    "train limit above": lambda: train(0) + val() + train(1) + val(),
    "train limit below, k=2": lambda: train(0)[:3] + train(1)[:3],
    "train limit above, k=4": lambda: train(0) + train(1),
    "no limit, k=4": lambda: train(0) + train(1),
    "train limit 0": lambda: [],
    "val limit 2": lambda: train(0) + val()[:2] + train(1) + val()[:2],
    "val limit above": lambda: train(0) + val(),
    "val limit 0": lambda: train(0),
    "test and predict limit 2": lambda: val("test")[:2] + val("predict")[:2],
    "test and predict limit above": lambda: val("test") + val("predict"),
    "test and predict limit 0": lambda: [],
    "reload": lambda: dealt(0) + dealt_val() + dealt(1) + dealt_val() + dealt(2) + dealt_val(),
    "no reload": lambda: dealt(0) + dealt_val() + dealt(1) + dealt_val() + dealt(2) + dealt_val(),
    "sanity 2": lambda: val("sanity")[:2] + train(0) + val() + train(1) + val(),
    "sanity all": lambda: val("sanity") + train(0) + val() + train(1) + val(),
    "val_check_interval": lambda: (
        val("sanity")[:2]
        + [event for epoch in (0, 2) for event in train(epoch) + _with_validation_every_third(train(epoch + 1))]
    ),
    "val_check_interval over epochs": lambda: (
        train(0)[:5] + val() + train(0)[5:] + train(1)[:1] + val() + train(1)[1:6] + val() + train(1)[6:]
    ),
    "should_stop": lambda: train(0)[:3] + val(),
    "should_stop without validation": lambda: train(0)[:3],
    "rest of an epoch left out": lambda: train(0)[:3] + train(1)[:3],
    "max_steps": lambda: train(0)[:3],
    "max_steps in the second epoch": lambda: train(0) + val() + train(1)[:2],
    "early stopping": lambda: train(0)[:2] + val() + train(0)[2:4] + val(),
    "fit again": lambda: 2 * (dealt(0) + dealt_val()) + dealt(1) + dealt_val() + dealt_val() + val("test") + val("predict"),
    "fit after a stop": lambda: train(0)[:3] + val() + train(1) + val(),
}


def _with_validation_every_third(steps: list[Event]) -> list[Event]:
    return [event for start in range(0, len(steps), 3) for event in steps[start : start + 3] + val()]


@pytest.mark.parametrize("name", EXPECTED)
def test_each_rank_does_exactly_what_is_due(ranks: Ranks, name: str) -> None:
    assert events(ranks(name)) == EXPECTED[name]()


@pytest.mark.parametrize(
    ("name", "updates"),
    [
        ("train limit below", 6),
        ("train limit equal", 2 * NUM_STEPS),
        ("train limit above", 2 * NUM_STEPS),
        ("train limit below, k=2", 4),
        ("train limit above, k=4", 2 * 3),
        ("no limit, k=4", 2 * 3),
        ("max_steps", 3),
        ("max_steps in the second epoch", 11),
    ],
)
def test_each_window_is_an_update_the_last_of_an_epoch_too(ranks: Ranks, name: str, updates: int) -> None:
    assert ranks(name)[0]["global_step"] == updates


def test_a_limit_that_is_not_reached_changes_nothing(ranks: Ranks) -> None:
    assert ranks("train limit above, k=4")[0]["parameters"] == ranks("no limit, k=4")[0]["parameters"]


def test_a_pass_that_is_left_before_its_end_ends_its_processes_in_order(ranks: Ranks) -> None:
    """Not by the limit of ten seconds on an end that nothing comes of. Each of these runs takes a fraction of a second."""
    for result in ranks("should_stop without validation"):
        assert result["longest"] < 9


@pytest.mark.parametrize("stage", ["train", "val"])
def test_a_fraction_of_an_unknown_number_of_steps_is_refused(ranks: Ranks, stage: str) -> None:
    for result in ranks(f"{stage} limit 0.5"):
        assert result["error"].startswith("MisconfigurationException: ")
        assert f"`Trainer(limit_{stage}_batches)` must be `1.0` or an int" in result["error"]
        assert result["events"] == []


@pytest.mark.parametrize("name", ["test and predict limit 2", "test and predict limit above", "fit again"])
def test_predictions_are_those_of_each_rank_and_none_where_it_is_idle(ranks: Ranks, name: str) -> None:
    for rank, result in enumerate(ranks(name)):
        due = [ids[rank] or None for *_, ids in val("predict")]
        assert result["predictions"] == (due[:2] if name.endswith(" 2") else due)


def test_processes_of_replaced_loaders_end(ranks: Ranks) -> None:
    """At the beginning of each epoch there are the rank itself, and the collate process and the worker of the training loader
    and, once it was used, of the validation loader."""
    for result in ranks("reload"):
        assert result["num_processes"] == [3, 5, 5]
        assert result["is_outlived"] == [False, False, False]


def test_processes_of_loaders_that_are_not_replaced_stay(ranks: Ranks) -> None:
    for result in ranks("no reload"):
        assert result["num_processes"] == [3, 5, 5]
        assert result["is_outlived"] == [False, True, True]


class TestSeveralTrainingLoaders:
    @pytest.mark.parametrize("kind", ["list", "dict", "max_size_cycle", "sequential", "unscaled"])
    def test_they_are_refused_with_the_reason_on_all_ranks(self, ranks: Ranks, kind: str) -> None:
        for result in ranks(f"several: {kind}"):
            assert result["error"].startswith(
                "ValueError: ODBDDPStrategy trains on one ODBDataLoader, but there are 2 training"
            )
            assert result["events"] == []

    def test_one_without_loss_scaling_trains_each_sample_once(self, ranks: Ranks) -> None:
        """The sum of losses counts what reached the weights; idle steps must not."""
        for result in ranks("one, unscaled"):
            assert result["counts"] == {str(index): 1.0 for shard in TRAIN for index in shard}


def test_an_odb_and_a_plain_validation_loader(ranks: Ranks) -> None:
    """Lightning's own sampler deals the plain one's five samples out, and gives the first one twice."""
    steps = [[[0, 2], [1, 3]], [[4], [0]]]
    both = [*val(), *numbered("val", 1, steps)]
    assert events(ranks("several validation loaders")) == [
        *train(0),
        *both,
        *train(1),
        *both,
        *numbered("val", 0, steps),
        *val(loader=1),
    ]


def test_samples_too_short_too_long_and_without_targets(ranks: Ranks) -> None:
    both = ranks("minimal")
    assert events(both) == numbered("train", 0, simulated(MINIMAL_SHARDS, MINIMAL, order=0))
    for result, shard in zip(both, MINIMAL_SHARDS, strict=True):
        assert sorted(index for *_, ids in result["events"] for index in ids) == shard
        targets = [index for index in shard if index != ALL_PADDING and MINIMAL[index] > 1]
        assert len(result["losses"]) == len(targets)
        assert all(map(math.isfinite, result["losses"]))
        assert result["over_budget"] == sum(MINIMAL[index] > L_MAX for index in shard)
        assert result["dropped"] == {}
    assert [result["over_budget"] for result in both] == [2, 0]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_each_sample_of_an_iterable_data_set_is_trained_once_an_epoch(ranks: Ranks, num_workers: int) -> None:
    seen = events(ranks(f"stream, {num_workers} worker{'s' * (num_workers > 1)}"))
    loops = [[event for event in seen if event[:2] == ("train", epoch)] for epoch in range(2)]
    validated = [event for event in seen if event[0] == "val"]
    runs = [validated[: len(validated) // 2], validated[len(validated) // 2 :]]
    assert seen == [*loops[0], *runs[0], *loops[1], *runs[1]]
    for loop, length in zip([*loops, *runs], [len(STREAM), len(STREAM), 5, 5], strict=True):
        assert [step for _, _, step, _ in loop] == list(range(len(loop)))
        for rank in range(2):
            own = sorted(index for *_, ids in loop for index in ids[rank])
            assert own == [index for index in range(length) if index % (2 * num_workers) // num_workers == rank]
    assert any([] in ids for *_, ids in seen), "a rank is idle"


@pytest.mark.parametrize(("name", "quota"), [("non-join", sum(map(len, TRAIN))), ("non-join, k=2", 20)])
def test_non_join_ends_with_the_quota_and_has_no_idle_step(ranks: Ranks, name: str, quota: int) -> None:
    both = ranks(name)
    due: list[Event] = []
    for epoch in range(2):
        steps = simulated(TRAIN, order=epoch, joins=False, quota=quota)
        sizes = [sum(map(len, step)) for step in steps]
        assert quota <= sum(sizes) < quota + max(sizes)
        assert all(all(step) for step in steps)
        due += numbered("train", epoch, steps) + val()
    assert events(both) == due
    for result in both:
        assert len(result["losses"]) == sum(event[0] == "train" for event in due)
        assert all(map(math.isfinite, result["losses"]))
