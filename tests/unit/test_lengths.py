"""Lengths from laws, files and data sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odb_lightning.lengths import LONGEST, Lengths, bimodal, from_file, lognormal, of_dataset, uniform
from tests.loader_data import Augmented, collate_augmented, make_loader
from tests.loader_processes import no_process_is_left  # noqa: F401  (a fixture)

LAWS: dict[str, Callable[..., Lengths]] = {
    "lognormal": lambda **options: lognormal(**({"n": 5000, "mean": 600, "cv": 0.5} | options)),
    "bimodal": lambda **options: bimodal(**({"n": 5000, "means": [100, 900], "share": 0.25, "cv": 0.2} | options)),
    "uniform": lambda **options: uniform(**({"n": 5000, "low": 50, "high": 150} | options)),
}


@pytest.mark.parametrize("law", LAWS)
def test_a_law_gives_n_positive_integers_that_depend_on_the_seed_alone(law: str) -> None:
    lengths = LAWS[law](seed=3)
    assert (lengths.dtype, lengths.shape, lengths.min() >= 1) == (np.int64, (5000,), True)
    assert np.array_equal(lengths, LAWS[law](seed=3))
    assert not np.array_equal(lengths, LAWS[law](seed=4))


@pytest.mark.parametrize("law", LAWS)
def test_clip_cuts_what_is_above_it_and_leaves_the_rest(law: str) -> None:
    whole, clipped = LAWS[law](), LAWS[law](clip=120)
    assert np.array_equal(clipped, np.minimum(whole, 120)) and whole.max() > 120


def test_a_lognormal_law_has_the_mean_and_the_variation_asked_for() -> None:
    lengths = lognormal(n=200_000, mean=1800, cv=0.94)
    assert lengths.mean() == pytest.approx(1800, rel=0.01)
    assert lengths.std() / lengths.mean() == pytest.approx(0.94, rel=0.03)
    assert set(lognormal(n=10, mean=7, cv=0).tolist()) == {7}


def test_a_bimodal_law_has_the_share_and_the_means_asked_for() -> None:
    lengths = bimodal(n=100_000, means=[100, 900], share=0.25, cv=0.1)
    is_first = lengths < 400
    assert is_first.mean() == pytest.approx(0.25, abs=0.01)
    assert lengths[is_first].mean() == pytest.approx(100, rel=0.01)
    assert lengths[~is_first].mean() == pytest.approx(900, rel=0.01)


def test_a_uniform_law_includes_both_ends() -> None:
    assert set(uniform(n=1000, low=2, high=4).tolist()) == {2, 3, 4}


@pytest.mark.parametrize(
    ("law", "options"),
    [
        ("lognormal", {"n": 0}),
        ("lognormal", {"n": 2.5}),
        ("lognormal", {"n": None}),
        ("lognormal", {"mean": 0}),
        ("lognormal", {"mean": "abc"}),
        ("lognormal", {"mean": float("inf")}),
        ("lognormal", {"cv": -0.1}),
        ("lognormal", {"cv": float("nan")}),
        ("lognormal", {"clip": 0}),
        ("lognormal", {"seed": -1}),
        ("bimodal", {"means": [1]}),
        ("bimodal", {"means": "ab"}),
        ("bimodal", {"means": [100, -1]}),
        ("bimodal", {"share": 1.5}),
        ("uniform", {"low": 0}),
        ("uniform", {"high": 49}),
    ],
)
def test_what_a_law_cannot_use_is_refused_by_name(law: str, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=rf"^{name}=.* cannot be used: give ") as failure:
        LAWS[law](**options)
    assert len(str(failure.value).splitlines()) == 1


def test_a_file_has_a_length_a_line(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("12\n 7 \n\n0\r\n2147483647\n5")
    assert from_file(path=str(file)).tolist() == [12, 7, 0, LONGEST, 5]
    assert from_file(path=str(file), limit=2).tolist() == [12, 0], "spread over the file"
    assert from_file(path=str(file), limit=9).tolist() == [12, 7, 0, LONGEST, 5]


@pytest.mark.parametrize("line", ["abc", "1.5", "-3", "1,2", "2147483648", "9" * 5000, "²", "\udcff", "1_000"])
def test_a_line_that_is_no_length_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_bytes(b"12\n\n" + line.encode("utf-8", "surrogateescape") + b"\n7\n")
    with pytest.raises(
        ValueError, match=r"^path=.*lengths\.txt, line 3: .* is no length: give an integer from 0 to"
    ) as failure:
        from_file(path=str(file))
    assert len(str(failure.value).splitlines()) == 1 and len(str(failure.value)) < 300 + len(str(file))


def test_a_file_without_lengths_and_none_at_all_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    with pytest.raises(ValueError, match=r"^path=.*empty\.txt holds no lengths"):
        from_file(path=str(empty))
    for missing in (tmp_path / "missing.txt", tmp_path):
        with pytest.raises(ValueError, match=r"^path=.* cannot be used: there is no such file"):
            from_file(path=str(missing))
    with pytest.raises(ValueError, match=r"^limit=0 cannot be used"):
        from_file(path=str(empty), limit=0)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("no_process_is_left")
def test_a_data_set_has_the_lengths_that_the_loader_sees_random_ones_included() -> None:
    dataset = Augmented([5 + index % 40 for index in range(150)])
    with make_loader(dataset, l_max=400, collate_fn=collate_augmented, max_rows=1, seed=7) as loader:
        seen = {batch.step.sample_ids[0]: batch.step.num_tokens_real for batch in loader}
    for num_workers in (0, 2):
        lengths = of_dataset(dataset, num_workers=num_workers, seed=7, multiprocessing_context="fork")
        assert lengths.tolist() == [seen[index] for index in range(150)]
    assert of_dataset(dataset, seed=8).tolist() != lengths.tolist()
