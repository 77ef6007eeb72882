"""What went wrong with the loss for people elsewhere, on the numbers of their cases: each is known by hand."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isnan
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.loss_case_fits import GROUPS, OF_RANKS, REDUCTIONS, STAGES, STATED, stated_value
from tests.multiprocess.ranks import run_ranks

STRATEGIES = [("single", 1), ("zero2", 1), ("ddp", 2), ("zero2", 2)]
"""With the number of ranks."""
ON_TWO_RANKS = ["ddp", "zero2"]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


def run(function: str, num_ranks: int, folder: Path, **arguments: Any) -> list[Any]:
    """What it returned on each rank."""
    results = run_ranks(f"tests.multiprocess.loss_case_fits:{function}", num_ranks, folder, seconds=90, **arguments)
    return [result.value for result in results]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[dict[str, Any]]]:
    """By case, under a strategy on each of so many ranks, which run all of them."""
    known: dict[tuple[str, int], list[Any]] = {}

    def of(strategy: str, num_ranks: int) -> list[dict[str, Any]]:
        if (strategy, num_ranks) not in known:
            folder = tmp_path_factory.mktemp(strategy)
            known[strategy, num_ranks] = run("by_hand", num_ranks, folder, strategy=strategy, size=num_ranks)
        return known[strategy, num_ranks]

    return of


@pytest.fixture
def stated(results: Any) -> Callable[[str, str], list[dict[str, Any]]]:
    """One of `STATED` under a strategy, on each rank."""
    return lambda case, strategy: [rank[case] for rank in results(strategy, len(STATED[case]["shards"]))]


class TestStatedMeans:
    """Means over targets, of which the update is to be the mean over all targets."""

    @pytest.mark.parametrize("strategy", ON_TWO_RANKS)
    def test_few_targets_on_one_rank(self, stated: Any, strategy: str) -> None:
        """C28: 1.375, not 2.5, the mean of means."""
        ranks = stated("C28", strategy)
        assert [rank["gradients"] for rank in ranks] == [pytest.approx([1.375])] * 2
        assert [rank["multipliers"] for rank in ranks] == [pytest.approx([0.25]), pytest.approx([1.75])]

    @pytest.mark.parametrize("strategy", ON_TWO_RANKS)
    def test_targets_weigh_not_inputs(self, stated: Any, strategy: str) -> None:
        """C29: both ranks have a hundred tokens."""
        ranks = stated("C29", strategy)
        assert [rank["sizes"] for rank in ranks] == [[1], [5]]
        assert [rank["gradients"] for rank in ranks] == [pytest.approx([(10 * 1.0 + 60 * 3.0) / 70])] * 2
        assert [rank["multipliers"] for rank in ranks] == [pytest.approx([2 / 7]), pytest.approx([12 / 7])]

    @pytest.mark.parametrize("strategy", ["single", "zero2"])
    def test_a_window_has_the_mean_of_its_targets(self, stated: Any, strategy: str) -> None:
        """C31: 2.6, not 5.0, as one batch of all ten has."""
        (rank,) = stated("C31", strategy)
        assert rank["gradients"] == pytest.approx([0.0, 2.6])
        assert sorted(rank["multipliers"]) == pytest.approx([0.2, 1.8])
        (rank,) = stated("C31, one batch", strategy)
        assert (rank["gradients"], rank["sizes"]) == (pytest.approx([2.6]), [2])

    @pytest.mark.parametrize("strategy", ON_TWO_RANKS)
    def test_a_window_of_two_ranks_has_the_mean_of_its_targets(self, stated: Any, strategy: str) -> None:
        """C31, on either rank in another order."""
        first, second = stated("C31, two ranks", strategy)
        for rank in (first, second):
            assert rank["gradients"] == pytest.approx([0.0, 2.6])
            assert sorted(rank["multipliers"]) == pytest.approx([0.2, 1.8])
        assert first["multipliers"] == second["multipliers"][::-1]

    @pytest.mark.parametrize(("case", "strategy"), [("C32", "single"), ("C32", "zero2"), ("C32, two ranks", "ddp")])
    def test_a_short_last_window_is_stepped_with_its_own_mean(self, stated: Any, case: str, strategy: str) -> None:
        """C32: five micro-batches, four an update; elsewhere the last gradient is 0.25, or is lost."""
        for rank in stated(case, strategy):
            assert rank["gradients"] == pytest.approx([0.0, 0.0, 0.0, 1.0, 1.0])
            assert rank["updates"] == rank["global_step"] == 2


class TestWithoutTargets:
    @pytest.mark.parametrize(("strategy", "num_ranks"), STRATEGIES)
    def test_on_no_rank(self, results: Any, strategy: str, num_ranks: int) -> None:
        """C33: momentum and weight decay would move the weights. Samples count, and one warning is given."""
        for rank in results(strategy, num_ranks):
            ours = rank["C33, ours"]
            for case in (ours, rank["C33, plain"]):
                assert case["moved_first"] > 0.01
                assert case["moved_then"] == case["spread"] == 0.0
                assert case["multipliers"] == [1.0, 0.0, 0.0]
                assert case["sizes"] == ([1, 2, 2] if num_ranks == 1 else [1, 1, 1])
                assert case["samples"] == (5 if num_ranks == 1 else 6)
                assert case["counted"] == 2
                assert len(case["told"]) == 1
            assert ours["losses"][1:] == [0.0, 0.0]
            assert ours["logged"] == {"loss": 0.0, "loss_step": 0.0, "loss_epoch": 0.0}

    @pytest.mark.parametrize("strategy", ON_TWO_RANKS)
    def test_on_one_rank(self, results: Any, strategy: str) -> None:
        """C34: its loss is NaN, and zero times NaN is NaN."""
        ranks = [rank["C34"] for rank in results(strategy, 2)]
        assert [rank["targets"] for rank in ranks] == [[0], [5]]
        assert [rank["multipliers"] for rank in ranks] == [[0.0], [2.0]]
        for rank in ranks:
            assert rank["error"] < 1e-6 < 0.01 < rank["moved"]
            assert rank["spread"] == 0.0
            assert rank["logged"] == {name: pytest.approx(rank["mean"]) for name in ("loss", "loss_step", "loss_epoch")}


def test_adapters_of_a_rank_that_is_idle_at_first_move_with_the_others(tmp_path: Path) -> None:
    """C37: each of them, after three steps under gradient checkpointing. For all strategies: test_adapters.py."""
    pytest.importorskip("peft")
    ranks = run("adapters", 2, tmp_path, strategy="ddp")
    assert [rank["idle"] for rank in ranks] == [[False] * 3, [True, False, False]]
    for rank in ranks:
        assert rank["adapters"] == 14
        assert rank["smallest"] > 0.01
        assert rank["spread"] == rank["base_moved"] == 0.0


def test_a_strict_forward_gets_what_collate_fn_returned_in_every_loop(tmp_path: Path) -> None:
    """C40: and so it does in idle steps of each."""
    first, second = run("strict_forward", 2, tmp_path, strategy="ddp")
    busy, idle = [False] * 3, [False, True, True]
    assert first["idle"] == {"train": busy, "val": idle, "test": idle, "predict": idle}
    assert second["idle"] == {"train": idle, "val": busy, "test": busy, "predict": busy}
    assert first["types"] == second["types"] == ["dict"]
    assert first["val_loss"] == second["val_loss"] > 0.0


def test_reductions_over_some_of_the_ranks_are_those_of_the_active_ones_among_them(tmp_path: Path) -> None:
    """Of two groups of four ranks; in one of them at last both are idle."""
    ranks = run("reductions_in_groups", 4, tmp_path)
    active = [[not idle for idle in rank["idle"]] for rank in ranks]
    shards = [shard[0] for shard in OF_RANKS]
    assert active == [[step < len(shard) for step in range(3)] for shard in shards]
    for members in GROUPS:
        for step in range(3):
            values = [stated_value(rank, step) for rank in members if active[rank][step]]
            expected = {"sum": sum(values), "max": max(values, default=-inf), "min": min(values, default=inf)}
            for rank in members:
                reduced = dict(ranks[rank]["reduced"][step])
                assert set(reduced) == set(REDUCTIONS)
                mean = reduced.pop("mean")
                assert mean == pytest.approx(sum(values) / len(values)) if values else isnan(mean)
                assert reduced == expected
    for rank in ranks:
        assert rank["spread"] == 0.0 and rank["is_finite"]


def test_a_part_that_an_update_does_not_use_is_left_alone(tmp_path: Path) -> None:
    """DeepSpeed by itself applies the gradient of the update before again, in stage 3 and with the optimizer offloaded."""
    for rank in run("spares", 2, tmp_path):
        for name in STAGES:
            assert rank[name] == pytest.approx([-1.0] * 4)
            repeats = name == "3" or "offloaded" in name
            assert rank[f"{name}, as it is"] == pytest.approx([-3.0 if repeats else -1.0] * 4)


def test_a_part_that_some_micro_batches_of_a_window_use(tmp_path: Path) -> None:
    """Is refused where DeepSpeed loses gradients."""
    for rank in run("spares_in_windows", 2, tmp_path):
        for used_in in ([0], [1], [0, 1]):
            weights = rank[f"ddp {used_in}"]
            assert weights == pytest.approx([-0.5 * len(used_in)] * 4, abs=0.2), "about, as windows weigh by their tokens"
            for name in STAGES:
                result = rank[f"{name} {used_in}"]
                if len(used_in) == 1 and (name == "1" or "offloaded" in name):
                    assert "window use spare.weight, and others do not" in result
                else:
                    assert result == pytest.approx(weights)


def test_parts_that_some_ranks_use(tmp_path: Path) -> None:
    """Are refused where DeepSpeed adds one rank's gradient to another part."""
    for rank in run("layers_of_ranks", 2, tmp_path):
        exact = rank.pop("ddp")
        assert len(set(exact)) == 2 and sum(exact) == pytest.approx(-4.0)
        for name, result in rank.items():
            if name == "0":
                assert result == pytest.approx(exact)
            else:
                assert "some ranks use spare.weight, other.weight in a micro-batch in which others do not" in result


def test_what_is_left_of_a_window_goes_into_no_other(tmp_path: Path) -> None:
    """DeepSpeed's stage 2 by itself adds it to the next window's."""
    for rank in run("left_inside_a_window", 2, tmp_path):
        assert rank["zero2"] == pytest.approx(rank["ddp"], abs=1e-6)
        assert rank["zero2, elsewhere"] == pytest.approx(rank["ddp, elsewhere"], abs=1e-6)
