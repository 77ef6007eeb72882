"""The figures of a schedule, by hand; their definitions are those of the design."""

from __future__ import annotations

import numpy as np
import pytest

from odb_lightning.schedule_figures import Schedule, length_figures, schedule_bound, schedule_figures


def test_the_figures_of_a_small_schedule() -> None:
    schedule: Schedule = [[[10, 8], [12]], [[5, 5, 4], []]]
    figures = schedule_figures(schedule, world_size=2, l_max=24)
    real, padded, waited_for = 44, 20 + 12 + 15, 2 * (20 + 15)
    assert (figures["steps"], figures["idle_steps"], figures["samples"], figures["samples_per_step"]) == (2, 1, 6, 1.5)
    assert figures["padding"] == pytest.approx(1 - real / padded)
    assert figures["budget_fill"] == pytest.approx(real / (2 * 2 * 24))
    assert figures["lockstep_efficiency"] == pytest.approx(padded / waited_for)
    assert figures["schedule_efficiency"] == pytest.approx(real / waited_for)


def test_an_order_by_length_is_told_from_a_shuffle() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 4000).tolist()

    def in_steps(ordered: list[int]) -> Schedule:
        return [[ordered[start : start + 4], ordered[start + 4 : start + 8]] for start in range(0, len(ordered), 8)]

    ascending, shuffled = (schedule_figures(in_steps(order), 2, 400) for order in (sorted(lengths), lengths))
    assert ascending["length_step_correlation"] > 0.99 and ascending["neighbour_correlation"] > 0.99
    assert abs(shuffled["length_step_correlation"]) < 0.1 and abs(shuffled["neighbour_correlation"]) < 0.15


def test_nothing_is_said_of_an_order_that_cannot_vary() -> None:
    figures = schedule_figures([[[7, 7]], [[7, 7]], [[7, 7]]], 1, 14)
    assert figures["length_step_correlation"] is None and figures["neighbour_correlation"] is None


def test_the_rank_with_most_tokens_bounds_every_schedule() -> None:
    assert schedule_bound([[4, 4], [4]]) == pytest.approx(12 / 16)
    assert schedule_bound([[4], []]) == 0.5
    assert schedule_bound([[], []]) is None


def test_the_figures_of_lengths() -> None:
    figures = length_figures(np.array([1, 2, 3, 10]), l_max=12)
    assert (figures["n"], figures["tokens"], figures["mean"], figures["min"], figures["p50"], figures["max"]) == (
        4,
        16,
        4,
        1,
        2,
        10,
    )
    assert figures["cv"] == pytest.approx(np.std([1, 2, 3, 10]) / 4)
    assert figures["f_s"] == 0.5, "below 3, a quarter of l_max"
    assert length_figures(np.array([0, 0]), l_max=12)["cv"] is None
