"""Non-join on one rank: passes, quota, and what they are made of. On several ranks: tests/multiprocess/test_loader_ranks.py."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from odb_lightning import ODBDataLoader, ODBLoaderError
from tests.loader_data import Augmented, Lengths, collate_augmented, make_loader
from tests.loader_processes import no_process_is_left  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_process_is_left")]


def non_join(dataset: Any = None, **options: Any) -> ODBDataLoader:
    return make_loader(Lengths([4] * 40) if dataset is None else dataset, **({"mode": "non_join"} | options))


def ids_of(loader: ODBDataLoader) -> list[Any]:
    return list(chain.from_iterable(batch.step.sample_ids for batch in loader))


def test_alone_and_without_a_quota_an_epoch_is_one_pass() -> None:
    with non_join() as loader:
        for epoch in range(1, 3):
            assert sorted(ids_of(loader)) == list(range(40))
            assert loader.stats.passes == epoch


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("persistent_workers", [True, False])
def test_a_quota_beyond_the_data_begins_it_anew_in_another_order(num_workers: int, persistent_workers: bool) -> None:
    with non_join(quota=120, num_workers=num_workers, persistent_workers=persistent_workers) as loader:
        ids = ids_of(loader)
        assert loader.stats.passes == 3
    passes = [ids[start : start + 40] for start in range(0, 120, 40)]
    assert [sorted(part) for part in passes] == [list(range(40))] * 3
    assert len({tuple(part) for part in passes}) == 3


def test_the_order_of_a_sampler_of_the_users_own_is_kept() -> None:
    views = [3, 1, 2]
    with non_join(sampler=views, quota=9, l_max=4, max_rows=1, buffer_size=1) as loader:
        assert ids_of(loader) == views * 3


def test_a_small_quota_ends_the_epoch_early_and_the_next_one_begins_anew() -> None:
    with non_join(quota=10, l_max=16) as loader:
        first, second = ids_of(loader), ids_of(loader)
    assert all(10 <= len(ids) < 10 + 4 for ids in (first, second))
    assert first != second


def test_random_transforms_draw_anew_in_each_pass_whatever_the_workers() -> None:
    def drawn(num_workers: int) -> dict[int, list[Any]]:
        by_id: dict[int, list[Any]] = {}
        options: dict[str, Any] = {"quota": 24, "collate_fn": collate_augmented, "num_workers": num_workers, "l_max": 200}
        with non_join(Augmented([5] * 8), **options) as loader:
            for batch in loader:
                for index, values in zip(batch.data["ids"], batch.data["drawn"], strict=True):
                    by_id.setdefault(index, []).append(values)
        return by_id

    draws = drawn(2)
    assert draws == drawn(0)
    assert all(len({tuple(values) for values in passes}) == 3 for passes in draws.values())


def test_a_window_of_micro_batches_ends_with_the_quota() -> None:
    with non_join(quota=10, l_max=8, accumulate=4) as loader:
        steps = [batch.step for batch in loader]
    assert [step.num_samples for step in steps] == [2] * 5
    assert [step.window_num_samples for step in steps] == [8] * 4 + [2]


def test_a_quota_that_cant_be_reached_is_told() -> None:
    with pytest.raises(ODBLoaderError, match="no rank has a sample"):
        ids_of(non_join(Lengths([])))
    with pytest.raises(
        ODBLoaderError, match=r"no rank has a sample \(left out by a policy: \{'empty': 3\}\), so the quota of 3"
    ):
        ids_of(non_join(Lengths([0, 0, 0])))
