"""Budgets other than tokens, and the second one, on the loader with real processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from odb_lightning import ODBDataLoader, ODBLoaderError
from odb_lightning.plan import ALIGNMENTS, Alignment, QuadraticCost, RoundPlanner, RowLimits, simulate_ranks
from tests.loader_data import Lengths, UserError, epoch_of, lognormal_lengths, make_loader
from tests.loader_processes import no_process_is_left  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_process_is_left")]

of_workers = pytest.mark.parametrize("num_workers", [0, 2])
LONG = [40 * length for length in lognormal_lengths(120, seed=3, longest=90)]


class Pictures(Lengths):
    """Samples with a number of patches each."""

    def __init__(self, lengths: Sequence[int], patches: Sequence[Any]) -> None:
        super().__init__(lengths)
        self.patches = list(patches)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"patches": self.patches[index]}


def patches_of(sample: dict[str, Any]) -> Any:
    return sample["patches"]


def patches_that_fail(sample: dict[str, Any]) -> int:
    if sample["input_ids"][0] == 37:
        raise UserError("no picture", code=1)
    return 1


def four_a_token(length: int) -> int:
    return 4 * length


def steps_of(loader: ODBDataLoader) -> list[list[int]]:
    """The samples of each batch of an epoch, of which each has to be there once."""
    with loader:
        steps = [list(step[2]) for step in epoch_of(loader)]
    assert sorted(index for step in steps for index in step) == list(range(len(loader.dataset)))
    return steps


def check_budget(steps: list[list[int]], lengths: Sequence[int], l_max: int, budget: Callable[[int], float]) -> None:
    for step in steps:
        longest = max(lengths[index] for index in step)
        assert len(step) == 1 or len(step) * budget(longest) <= l_max


@of_workers
def test_a_quadratic_budget(num_workers: int) -> None:
    loader = make_loader(Lengths(LONG), l_max=4096, budget="quadratic", num_workers=num_workers)
    steps = steps_of(loader)
    check_budget(steps, LONG, 4096, lambda length: length + length * length / 24576)
    assert len(steps) < len(LONG)
    assert loader.stats.over_budget == 0


def test_two_rows_of_2048_are_over_a_quadratic_budget_of_4096() -> None:
    dataset = Lengths([2048] * 4)
    sizes = {
        budget: {len(step) for step in steps_of(make_loader(dataset, 4096, budget=budget))}
        for budget in ("tokens", "quadratic")
    }
    assert sizes == {"tokens": {2}, "quadratic": {1}}


@of_workers
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_a_function_as_budget(alignment: Alignment, num_workers: int) -> None:
    lengths = lognormal_lengths(120, longest=60)
    loader = make_loader(Lengths(lengths), 256, budget=four_a_token, alignment=alignment, num_workers=num_workers)
    steps = steps_of(loader)
    check_budget(steps, lengths, 256, four_a_token)
    plain = make_loader(Lengths(lengths), 64, alignment=alignment, num_workers=num_workers)
    assert steps == steps_of(plain), "a quarter of the tokens"


def test_a_row_over_the_budget_goes_out_alone_and_is_counted() -> None:
    """Of 4096, a row of 4000 tokens takes 4651."""
    loader = make_loader(Lengths([4000, 100, 100, 3500]), 4096, budget="quadratic")
    with pytest.warns(UserWarning, match=r"^dataset\[0\] .*goes out alone"):
        steps = steps_of(loader)
    assert [0] in steps
    assert loader.stats.over_budget == 1
    with (
        make_loader(Lengths([4000, 100, 100, 3500]), 4096, budget="quadratic", oversize="drop") as dropping,
        pytest.warns(UserWarning, match=r"^dataset\[0\] .*is dropped"),
    ):
        assert sorted(index for step in epoch_of(dropping) for index in step[2]) == [1, 2, 3]
    assert dropping.stats.dropped == {"oversize": 1}


@of_workers
def test_a_cost_apart_from_the_budget_changes_steps_but_not_what_they_may_hold(num_workers: int) -> None:
    """Where time grows with the square of a length, groups are made of what is more alike."""
    steps, plain = (
        steps_of(make_loader(Lengths(LONG), 4096, budget="tokens", cost=cost, num_workers=num_workers))
        for cost in (QuadraticCost(0, 1), None)
    )
    check_budget(steps, LONG, 4096, lambda length: length)
    assert steps != plain


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("count", [31, 32, 33, 150])
def test_the_loader_forms_the_groups_of_simulated_ranks(count: int, alignment: Alignment) -> None:
    """Also where the last sample fills the window to the brim, of 32."""
    lengths = lognormal_lengths(count, longest=40)
    options: dict[str, Any] = {"budget": QuadraticCost(1, 0.01)}
    if alignment == "matched":
        options["cost"] = QuadraticCost(0, 1)
    limits = RowLimits(64, **options)
    run = simulate_ranks([lengths], lambda _: RoundPlanner(limits=limits, buffer_size=32, alignment=alignment))
    steps = steps_of(make_loader(Lengths(lengths), shuffle=False, num_workers=0, alignment=alignment, **options))
    assert steps == [step[0] for step in run.steps]


@of_workers
def test_patches_of_a_batch_keep_within_their_budget(num_workers: int) -> None:
    lengths = lognormal_lengths(150, longest=60)
    patches = [index * 7 % 11 for index in range(150)]
    options: dict[str, Any] = {"patches_fn": patches_of, "max_patches": 12, "num_workers": num_workers}
    loader = make_loader(Pictures(lengths, patches), 200, **options)
    steps = steps_of(loader)
    check_budget(steps, lengths, 200, lambda length: length)
    sums = [sum(patches[index] for index in step) for step in steps]
    assert max(sums) <= 12
    assert max(map(len, steps)) > 1
    assert loader.stats.over_budget == 0
    assert steps != steps_of(make_loader(Lengths(lengths), 200, num_workers=num_workers))


@of_workers
def test_a_sample_of_too_many_patches_goes_out_alone_and_is_counted(num_workers: int) -> None:
    dataset = Pictures([5] * 6, [1, 30, 1, 0, 13, 12])
    options: dict[str, Any] = {"patches_fn": patches_of, "max_patches": 12, "num_workers": num_workers, "shuffle": False}
    loader = make_loader(dataset, **options)
    with pytest.warns(UserWarning, match=r"^dataset\[1\] has 30 patches, over max_patches=12: it goes out alone") as caught:
        steps = steps_of(loader)
    assert len(caught) == 1, "more are only counted"
    assert [1] in steps
    assert [4] in steps
    assert loader.stats.over_budget == 2


def test_a_sample_of_too_many_patches_can_be_dropped_or_refused() -> None:
    dataset = Pictures([5] * 4, [1, 1, 30, 1])
    options: dict[str, Any] = {"patches_fn": patches_of, "max_patches": 12, "shuffle": False, "num_workers": 0}
    with (
        make_loader(dataset, oversize="drop", **options) as loader,
        pytest.warns(UserWarning, match=r"dataset\[2\] has 30 patches, over max_patches=12 and is dropped"),
    ):
        assert sorted(index for step in epoch_of(loader) for index in step[2]) == [0, 1, 3]
    assert loader.stats.dropped == {"oversize": 1}
    with pytest.raises(ODBLoaderError, match=r"dataset\[2\].*it has 30 patches, over max_patches=12, and the policy is"):
        list(make_loader(dataset, oversize="error", **options))


@of_workers
@pytest.mark.parametrize(
    ("dataset", "patches_fn", "error"),
    [
        (Lengths([4] * 60), patches_that_fail, "UserError: no picture"),
        (Pictures([4] * 60, [1] * 37 + [-2] * 23), patches_of, "ValueError: patches_fn returned -2; .* 0 or more"),
        (Pictures([4] * 60, [1] * 37 + [1.5] * 23), patches_of, "TypeError: 'float' object"),
        (Lengths([4] * 38, masked=2), lambda sample: sample["grid"] if sample["input_ids"][0] == 37 else 1, "KeyError: 'grid'"),
    ],
    ids=["raises", "negative", "fraction", "missing-key"],
)
def test_an_error_of_patches_fn_names_the_sample(dataset: Any, patches_fn: Any, error: str, num_workers: int) -> None:
    loader = make_loader(dataset, patches_fn=patches_fn, max_patches=8, shuffle=False, num_workers=num_workers)
    with pytest.raises(ODBLoaderError, match=rf"patches_fn for dataset\[37\].*{error}"):
        list(loader)


@pytest.mark.parametrize("half", [{"patches_fn": patches_of}, {"max_patches": 8}])
def test_half_of_the_second_budget_is_refused(half: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="patches_fn and max_patches go together"):
        make_loader(Lengths([4]), **half)


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_max_patches_is_a_whole_number_of_at_least_one(value: Any) -> None:
    with pytest.raises(ValueError, match=f"max_patches must be a whole number of at least 1, got {value}"):
        make_loader(Lengths([4]), patches_fn=patches_of, max_patches=value)


def test_the_papers_rule_knows_no_patches() -> None:
    with pytest.raises(ValueError, match="alignment='paper' knows one budget only: use alignment='matched'"):
        make_loader(Lengths([4]), patches_fn=patches_of, max_patches=8, alignment="paper")


@pytest.mark.parametrize("option", ["budget", "cost"])
def test_a_budget_that_is_none_is_refused_by_name(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}='words' is unknown: choose 'tokens' or 'quadratic'"):
        make_loader(Lengths([4]), **{option: "words"})
    with pytest.raises(TypeError, match=f"{option} has to be 'tokens' or 'quadratic' or a function of a length, got 3"):
        make_loader(Lengths([4]), **{option: 3})


@pytest.mark.parametrize("option", ["budget", "cost", "patches_fn"])
def test_what_cannot_be_sent_to_spawned_processes_is_refused_by_name(option: str) -> None:
    options: dict[str, Any] = {"patches_fn": patches_of, "max_patches": 8} | {option: lambda value: 1}
    with pytest.raises(TypeError, match=f"^{option}=<function .*can't be sent to the loader's processes .*'spawn'"):
        make_loader(Lengths([4]), multiprocessing_context="spawn", **options)


def test_costs_of_ones_own_reach_spawned_processes() -> None:
    lengths = lognormal_lengths(40, longest=40)
    options: dict[str, Any] = {
        "budget": QuadraticCost(1, 0.01),
        "cost": four_a_token,
        "max_patches": 12,
        "patches_fn": patches_of,
    }
    dataset = Pictures(lengths, [index % 5 for index in range(40)])
    spawned, forked = (steps_of(make_loader(dataset, multiprocessing_context=how, **options)) for how in ("spawn", "fork"))
    assert spawned == forked


def nothing(length: int) -> int:
    return 0


def less_than_nothing(length: int) -> float:
    return -0.5


def not_a_number(length: int) -> float:
    return math.nan


def fails_at_nine(length: int) -> int:
    if length == 9:
        raise UserError("no cost of nine", code=9)
    return length


class TestBadCosts:
    @pytest.mark.parametrize("option", ["budget", "cost"])
    @pytest.mark.parametrize(("function", "value"), [(nothing, "0"), (less_than_nothing, r"-0\.5"), (not_a_number, "nan")])
    def test_one_that_is_not_positive_is_told_with_its_value_and_the_length(
        self, option: str, function: Any, value: str
    ) -> None:
        with pytest.raises(
            ValueError, match=rf"{option} gave {value}\S* for a row of length 64: it has to give a positive number"
        ):
            make_loader(Lengths([7] * 4), num_workers=0, **{option: function})

    @pytest.mark.parametrize("option", ["budget", "cost"])
    def test_one_that_raises_is_told_with_its_traceback(self, option: str) -> None:
        failure = (
            rf"dataset\[1\]: ValueError: {option} failed for a row of length 9: \w+: no cost of nine[\s\S]*in fails_at_nine"
        )
        with pytest.raises(ODBLoaderError, match=failure):
            list(make_loader(Lengths([7, 9, 8]), num_workers=0, shuffle=False, **{option: fails_at_nine}))

    def test_a_cost_that_the_paper_alignment_does_not_know_warns(self) -> None:
        with pytest.warns(UserWarning, match="cost is ignored with alignment='paper'"):
            make_loader(Lengths([7]), alignment="paper", cost="quadratic")

    def test_patches_fn_has_to_be_a_function(self) -> None:
        with pytest.raises(TypeError, match="patches_fn has to be a function, got 'abc'"):
            make_loader(Lengths([7]), patches_fn="abc", max_patches=3)
