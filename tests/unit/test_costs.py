"""What rows cost: the named costs, the coefficients of the quadratic one, and the rows that a budget allows."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_lightning.plan import QuadraticCost, RowLimits
from odb_lightning.plan.costs import describe_cost, named_cost, tokens


class TestNamedCost:
    def test_tokens_is_the_length(self) -> None:
        assert [named_cost("tokens", "budget")(length) for length in (1, 7, 4096)] == [1, 7, 4096]

    def test_quadratic_doubles_a_token_at_24576(self) -> None:
        cost = named_cost("quadratic", "budget")
        assert [cost(length) for length in (1, 24576, 49152)] == [1 + 1 / 24576, 2 * 24576, 3 * 49152]

    def test_a_function_is_itself(self) -> None:
        assert named_cost(math.sqrt, "cost") is math.sqrt
        assert named_cost(QuadraticCost(2, 1), "cost") == QuadraticCost(2, 1)

    @pytest.mark.parametrize("option", ["budget", "cost"])
    def test_another_name_is_refused_with_the_option_and_the_names_there_are(self, option: str) -> None:
        with pytest.raises(ValueError, match=f"{option}='linear' is unknown: choose 'tokens' or 'quadratic', or a function"):
            named_cost("linear", option)

    @pytest.mark.parametrize("choice", [3, None, [tokens]])
    def test_what_cannot_be_called_is_refused(self, choice: Any) -> None:
        with pytest.raises(TypeError, match=r"budget has to be 'tokens' or 'quadratic' or a function of a length, got "):
            named_cost(choice, "budget")


class TestQuadraticCost:
    def test_it_is_a_times_the_length_and_b_times_its_square(self) -> None:
        assert [QuadraticCost(2, 0.5)(length) for length in (1, 4, 10)] == [2.5, 16, 70]
        assert [QuadraticCost(0, 1)(length) for length in (1, 3)] == [1, 9]
        assert [QuadraticCost(3, 0)(length) for length in (1, 3)] == [3, 9]

    @pytest.mark.parametrize(("a", "b"), [(-1, 1), (1, -0.1), (0, 0), (math.nan, 1), (1, math.nan)])
    def test_coefficients_that_cost_nothing_or_less_are_refused_with_their_values(self, a: float, b: float) -> None:
        with pytest.raises(ValueError, match=f"must not be negative, nor both zero: a={a}, b={b}"):
            QuadraticCost(a, b)

    def test_it_can_be_sent_and_is_then_the_same(self) -> None:
        cost = QuadraticCost(1, 0.25)
        assert pickle.loads(pickle.dumps(cost)) == cost

    def test_ranks_can_tell_one_from_another(self) -> None:
        costs = [QuadraticCost(1, 0.25), QuadraticCost(1, 0.5), QuadraticCost(2, 0.25), tokens, math.sqrt]
        assert len({describe_cost(cost, 64) for cost in costs}) == len(costs)
        assert describe_cost(QuadraticCost(1, 0.25), 64) == describe_cost(QuadraticCost(1, 0.25), 64)
        first, second = (partial(pow, exp) for exp in (2, 3))
        assert describe_cost(first, 64) != describe_cost(second, 64), "functions of the same name, by what they give"


class TestRowLimits:
    @pytest.mark.parametrize(
        ("length", "rows", "cost"),
        [(1, 100, 1), (33, 3, 33), (34, 2, 34), (50, 2, 50), (51, 1, 51), (100, 1, 100), (101, 1, 101)],
    )
    def test_tokens(self, length: int, rows: int, cost: int) -> None:
        limits = RowLimits(100)
        assert limits(length) == (rows, cost)
        assert limits(length) == (rows, cost), "the second time, too"
        assert limits.is_oversize(length) == (length > 100)

    @pytest.mark.parametrize(("length", "rows"), [(1, 4), (25, 4), (26, 3), (200, 1)])
    def test_max_rows(self, length: int, rows: int) -> None:
        assert RowLimits(100, max_rows=4)(length)[0] == rows

    def test_a_budget_that_is_no_whole_number(self) -> None:
        """0.3 a token: a row of 13 takes 3.9, so that three of them keep within 12."""
        limits = RowLimits(12, budget=QuadraticCost(0.3, 0))
        assert [limits(length)[0] for length in (1, 10, 13, 40)] == [40, 4, 3, 1]
        costs = [limits(length)[1] for length in (1, 10, 13, 40)]
        assert [round(cost / costs[0], 3) for cost in costs] == [1, 10, 13, 40], "in a finer unit"
        assert [limits.is_oversize(length) for length in (40, 41)] == [False, True]

    def test_a_cost_apart_from_the_budget_is_rounded_and_at_least_one(self) -> None:
        limits = RowLimits(1000, cost=QuadraticCost(0, 0.01))
        assert [limits(length) for length in (1, 10, 13, 50)] == [(1000, 1), (100, 1), (76, 2), (20, 25)]
        assert not limits.is_oversize(1000), "what a row costs is no budget"

    def test_costs_of_any_unit_are_whole_numbers_that_sums_do_not_overflow(self) -> None:
        for scale in (1e-9, 1e13):
            limits = RowLimits(4096, cost=QuadraticCost(scale, 0))
            costs = [limits(length)[1] for length in (1, 2, 64, 4096)]
            assert [round(cost / costs[-1], 6) for cost in costs] == [round(length / 4096, 6) for length in (1, 2, 64, 4096)]
            assert limits(10**9)[1] <= 2**40

    def test_a_budget_that_falls_is_refused_with_both_values(self) -> None:
        with pytest.raises(ValueError, match="budget falls from 99 for a row of length 1 to 98 for one of length 2"):
            RowLimits(64, budget=lambda length: 100 - length)
        limits = RowLimits(64, budget=lambda length: 5 if length == 37 else length)
        with pytest.raises(ValueError, match="budget falls from 32 for a row of length 32 to 5 for one of length 37"):
            limits(37)

    @given(
        st.integers(1, 10**6),
        st.integers(1, 10**5),
        st.floats(0, 8, allow_subnormal=False),
        st.floats(1e-6, 1, allow_subnormal=False),
    )
    def test_rows_are_as_many_as_keep_within_the_budget(self, l_max: int, length: int, a: float, b: float) -> None:
        unit = QuadraticCost(a, b)(length)
        rows, cost = RowLimits(l_max, budget=QuadraticCost(a, b))(length)
        assert rows == max(int(Fraction(l_max) / Fraction(unit)), 1), "to the last bit"
        assert rows == 1 or rows * unit <= l_max
        assert 1 <= cost <= 2**40

    @pytest.mark.parametrize("l_max", [0, -1])
    def test_a_budget_below_one_is_refused(self, l_max: int) -> None:
        with pytest.raises(ValueError, match=f"l_max must be at least 1 token, got {l_max}"):
            RowLimits(l_max)

    @pytest.mark.parametrize("max_rows", [0, -1])
    def test_rows_below_one_are_refused(self, max_rows: int) -> None:
        with pytest.raises(ValueError, match=f"max_rows must be at least 1, got {max_rows}"):
            RowLimits(8, max_rows)

    @pytest.mark.parametrize("value", [0, -2.5, math.nan, math.inf])
    @pytest.mark.parametrize("option", ["budget", "cost"])
    def test_a_cost_that_is_not_positive_is_refused_with_its_value_and_the_length(self, option: str, value: float) -> None:
        with pytest.raises(ValueError, match=f"{option} gave {float(value)} for a row of length 8: it has to give a positive"):
            RowLimits(8, **{option: lambda length: value})
        limits = RowLimits(8, **{option: lambda length: value if length == 5 else length})
        with pytest.raises(ValueError, match=f"{option} gave {float(value)} for a row of length 5: it has to give a positive"):
            limits(5)

    @pytest.mark.parametrize("option", ["budget", "cost"])
    @pytest.mark.parametrize("value", [None, "much"])
    def test_a_cost_that_is_no_number_is_refused(self, option: str, value: Any) -> None:
        with pytest.raises(ValueError, match=f"{option} failed for a row of length 8: (TypeError|ValueError): "):
            RowLimits(8, **{option: lambda length: value})

    @pytest.mark.parametrize("length", [0, -1])
    def test_a_length_below_one_is_refused(self, length: int) -> None:
        with pytest.raises(ValueError, match=f"a length must be from 1 to {2**40}, got {length}"):
            RowLimits(8)(length)
