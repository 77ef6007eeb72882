"""How many targets the mean loss of a batch is over."""

from __future__ import annotations

import collections
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies

from odb_lightning import ODBDataLoader
from odb_lightning.runtime.counting import DEFAULT_RULE, TargetCounter, check_rule, labels_of

LABELS = torch.tensor([[-100, 5, 6, -100], [7, 8, -100, 9]])


def counted(rule: Any, data: Any, num_samples: int = 2) -> tuple[int | float, list[str]]:
    counter = TargetCounter(rule)
    return counter(data, num_samples), counter.take_warnings()


@pytest.mark.parametrize(("rule", "expected"), [("causal", 4), ("unshifted", 5), (DEFAULT_RULE, 4)])
@pytest.mark.parametrize(
    "data",
    [
        pytest.param({"labels": LABELS}, id="dict"),
        pytest.param(collections.UserDict(labels=LABELS), id="user-dict"),
        pytest.param(SimpleNamespace(labels=LABELS), id="attribute"),
        pytest.param({"labels": LABELS.numpy()}, id="numpy"),
        pytest.param({"labels": LABELS.tolist()}, id="lists"),
        pytest.param({"labels": LABELS.int()}, id="int32"),
        pytest.param({"labels": LABELS.t().contiguous().t()}, id="strided"),
    ],
)
def test_labels_are_found_and_counted(rule: Any, expected: int, data: Any) -> None:
    count, warnings = counted(rule, data)
    assert count == expected
    assert type(count) is int
    assert not warnings


@pytest.mark.parametrize("rule", ["causal", "unshifted"])
@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([3, -100, 0], 2),
        (torch.tensor([-100, -100]), 0),
        (torch.tensor([1.5, 2.5, -100.0]), 2),
        (torch.tensor([0, 1, 2]), 3),
        (torch.zeros(0, dtype=torch.int64), 0),
    ],
)
def test_one_dimensional_labels_are_not_shifted(rule: str, labels: Any, expected: int) -> None:
    assert counted(rule, {"labels": labels}, 3) == (expected, [])


@given(
    numpy_strategies.arrays(np.int64, st.tuples(st.integers(0, 5), st.integers(0, 6)), elements=st.sampled_from([-100, 0, 3]))
)
def test_causal_counts_what_a_shifted_loss_averages_over(labels: np.ndarray[Any, Any]) -> None:
    targets = [token for row in labels.tolist() for token in row[1:] if token != -100]
    assert counted("causal", {"labels": torch.from_numpy(labels)})[0] == len(targets)
    assert counted("unshifted", {"labels": torch.from_numpy(labels)})[0] == int((labels != -100).sum())


@pytest.mark.parametrize("data", [{"input_ids": torch.ones(3, 2)}, {"labels": None}, {}])
def test_a_mapping_without_labels_counts_samples(data: Any) -> None:
    assert counted(DEFAULT_RULE, data, 3) == (3, [])


@pytest.mark.parametrize("data", [torch.ones(2, 2), (torch.ones(2), torch.ones(2)), [1, 2], SimpleNamespace(x=1)])
def test_a_batch_that_shows_no_labels_counts_samples_and_warns_once(data: Any) -> None:
    counter = TargetCounter(DEFAULT_RULE)
    assert [counter(data, 2), counter(data, 5)] == [2, 5]
    (warning,) = counter.take_warnings()
    assert "num_supervised_fn=" in warning
    assert type(data).__name__ in warning
    assert counter(data, 1) == 1
    assert not counter.take_warnings()


def test_the_default_warns_once_where_column_0_is_supervised_everywhere() -> None:
    counter = TargetCounter(DEFAULT_RULE)
    assert counter({"labels": torch.ones(2, 4)}, 2) == 6
    assert counter({"labels": torch.ones(2, 4)}, 2) == 6
    (warning,) = counter.take_warnings()
    assert "num_supervised_fn='unshifted'" in warning


@pytest.mark.parametrize("labels", [LABELS, torch.zeros(2, 0), torch.zeros(0, 3)])
def test_the_default_does_not_warn_without_evidence(labels: torch.Tensor) -> None:
    assert counted(DEFAULT_RULE, {"labels": labels})[1] == []


@pytest.mark.parametrize("rule", ["causal", "unshifted"])
def test_who_names_the_rule_is_not_warned(rule: str) -> None:
    counter = TargetCounter(rule)
    counter({"labels": torch.ones(2, 4)}, 2)
    counter([1, 2], 2)
    assert not counter.take_warnings()


def test_the_default_is_still_told_apart_from_the_named_rule_in_another_process() -> None:
    received = pickle.loads(pickle.dumps((DEFAULT_RULE, "causal")))
    assert [bool(counted(rule, [1, 2])[1]) for rule in received] == [True, False]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (3, 3),
        (2.5, 2.5),
        (4.0, 4),
        (0, 0),
        (True, 1),
        (np.float32(1.5), 1.5),
        (torch.tensor(7), 7),
        (torch.tensor([0.25]), 0.25),
    ],
)
def test_a_function_of_the_batch(returned: Any, expected: float) -> None:
    count, _ = counted(lambda data: data["n"], {"n": returned})
    assert count == expected
    assert type(count) is type(expected)


@pytest.mark.parametrize("returned", [-1, float("nan"), float("inf"), None, "many", torch.ones(2)])
def test_a_result_that_is_no_count_raises(returned: Any) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        counted(lambda data: returned, {})


@pytest.mark.parametrize("rule", ["casual", "", None, 3, ["causal"]])
def test_an_unknown_rule_is_refused(rule: Any) -> None:
    with pytest.raises(ValueError, match=r"num_supervised_fn=.* is unknown: choose 'causal', 'unshifted'"):
        check_rule(rule)


def test_known_rules_are_accepted() -> None:
    for rule in (DEFAULT_RULE, "causal", "unshifted", len):
        check_rule(rule)


def test_labels_of_a_mapping_are_its_item_not_its_attribute() -> None:
    class Batch(dict[str, Any]):
        labels = "class attribute"

    assert labels_of(Batch(labels=1)) == 1
    assert labels_of(Batch()) is None


def test_batches_without_targets_are_counted_and_told_once() -> None:
    """By the loader, which knows that they are batches of the loss."""
    samples = [{"input_ids": torch.ones(4, dtype=torch.int64), "labels": torch.full((4,), -100 if i else 1)} for i in range(3)]
    with ODBDataLoader(samples, l_max=4, num_workers=0, num_supervised_fn="causal") as loader:
        with pytest.warns(UserWarning, match="a batch of 1 samples has no target") as told:
            counts = [batch.step.num_tokens_supervised for batch in loader]
        assert sorted(counts) == [0, 0, 3]
        assert len([warning for warning in told if "no target" in str(warning.message)]) == 1
        assert loader.stats.batches_without_targets == 2
