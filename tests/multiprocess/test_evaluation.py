"""What the trainer's loops measure is that of one process without padding, whatever the ranks, their shares and the budget."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.multiprocess.evaluation_cases import ALL, CASES, reference
from tests.multiprocess.fitting import run_group
from tests.multiprocess.training_cases import LENGTHS

GROUPS = [["single"], ["ddp"], ["zero0", "zero1", "zero2", "zero3"], ["fsdp2"]]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]

Evaluated = list[tuple[list[int], dict[str, Any]]]


@pytest.fixture(scope="module", params=[strategy for group in GROUPS for strategy in group])
def evaluated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Evaluated]:
    """By case, each rank's samples and what it got."""
    folder = tmp_path_factory.mktemp(request.param)
    results = run_group("tests.multiprocess.evaluation_cases:all_cases", GROUPS, request.param, folder, seconds=180)
    return {name: list(zip(CASES[name][0], ranks, strict=True)) for name, ranks in results.items()}


@pytest.fixture(scope="module")
def expected() -> tuple[dict[str, float], dict[int, tuple[float, int]]]:
    over_all, of_samples = reference(ALL)
    assert 0.0 < over_all["token_accuracy"] < 1.0
    assert of_samples[5][1] == of_samples[6][1] == 0
    return over_all, of_samples


def test_loss_perplexity_and_accuracy_are_over_all_targets(evaluated: dict[str, Evaluated], expected: Any) -> None:
    assert len(evaluated) == 2
    for ranks in evaluated.values():
        for _, values in ranks:
            for loop, stage in (("fit", "val"), ("validate", "val"), ("test", "test")):
                for name, value in expected[0].items():
                    assert values[loop][f"{stage}_{name}"] == pytest.approx(value, rel=1e-5), (loop, name)


def test_metrics_of_the_users_see_each_sample_once(evaluated: dict[str, Evaluated]) -> None:
    """A mean, and one that keeps every value, on a rank without any, too."""
    for ranks in evaluated.values():
        for _, values in ranks:
            assert values["validate"]["num_lengths"] == len(ALL)
            assert values["validate"]["mean_length"] == pytest.approx(sum(LENGTHS[index] for index in ALL) / len(ALL))


def test_the_loss_of_training_is_over_all_targets(evaluated: dict[str, Evaluated], expected: Any) -> None:
    """Of a fit that changes nothing, since the learning rate is zero."""
    for ranks in evaluated.values():
        for _, values in ranks:
            assert values["fit"]["train_loss_epoch"] == pytest.approx(expected[0]["loss"], rel=1e-5)


def test_predictions_come_with_their_samples_each_once(evaluated: dict[str, Evaluated], expected: Any) -> None:
    _, of_samples = expected
    for ranks in evaluated.values():
        for shard, values in ranks:
            rows = [row for row in values["predict"] if row is not None]
            assert sorted(index for index, _, _ in rows) == sorted(shard)
            for index, loss, num_targets in rows:
                assert num_targets == of_samples[index][1]
                assert loss == pytest.approx(of_samples[index][0], rel=1e-5, nan_ok=True)
                assert math.isnan(loss) == (num_targets == 0)


def test_an_idle_step_predicts_none(evaluated: dict[str, Evaluated]) -> None:
    for ranks in evaluated.values():
        if len(ranks) > 1:
            assert any(None in values["predict"] for _, values in ranks)
        for shard, values in ranks:
            assert shard or set(values["predict"]) == {None}
