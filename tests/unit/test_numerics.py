"""The numerics page's own code, on tiny sizes: what it compares, and that it can tell right from wrong."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("measuring", "run", "rank_processes", "numerics_reference", "numerics_fits", "numerics_peer", "numerics")


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[Any]:
    """The scripts, which import each other as files of one folder."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture
def samples(benchmarks: Any) -> Any:
    """Twelve with prompts of three tokens masked; the last has no target."""
    generator = torch.Generator().manual_seed(0)
    items = []
    for length in [5, 9, 12, 20, 7, 31, 16, 8, 25, 11, 6, 3]:
        ids = torch.randint(100, 140, (length,), generator=generator)
        labels = ids.clone()
        labels[:3] = -100
        items.append({"input_ids": ids, "labels": labels})
    return benchmarks.numerics_reference.with_a_small_vocabulary(items)


def test_ids_are_numbered_by_those_that_occur(benchmarks: Any, samples: Any) -> None:
    ids = torch.cat([item["input_ids"] for item in samples.items])
    assert sorted(set(ids.tolist())) == list(range(1, samples.vocabulary))
    for item in samples.items:
        assert item["labels"][:3].tolist() == [-100] * 3 and torch.equal(item["labels"][3:], item["input_ids"][3:])
    assert samples.supervised_share == pytest.approx(1 - 36 / 153)
    assert benchmarks.numerics_reference.num_targets(samples.unmasked()[0]) == 4


def test_an_error_is_seen_and_rounding_is_none(benchmarks: Any, samples: Any) -> None:
    kit = benchmarks.numerics_reference
    network, reference, ids = kit.network_for(samples), kit.Reference(samples), [5, 0, 3]
    network.mean_loss(kit.pad([samples[index] for index in ids])).backward()
    assert reference.error(network, ids) < 1e-6
    assert reference.error(network, [5, 0, 2]) > 1e-2
    for parameter in network.parameters():
        parameter.grad *= 2
    assert reference.error(network, ids) == pytest.approx(1, abs=1e-6)
    assert reference.error(network, [11]) is None, "there is no target"


@pytest.mark.parametrize(("precision", "limit"), [("32-true", 2e-6), ("64-true", 1e-14)])
def test_gradients_of_a_fit_are_exact_to_rounding(benchmarks: Any, samples: Any, precision: str, limit: float) -> None:
    fits = benchmarks.numerics_fits
    limits = {"samples": samples, "shards": "equal", "accumulate": 3, "l_max": 40}
    cell = fits.gradient_errors(**limits, precision=precision, loss_scaling="token")
    assert cell["trained"] == len(samples) and cell["steps"] >= 4 and cell["idle_steps"] == 0
    assert len(cell["errors"]) == -(-cell["steps"] // 3) and max(cell["errors"]) < limit
    wrong = fits.gradient_errors(**limits, precision=precision, loss_scaling="none")
    assert max(wrong["errors"]) > 1e-2


def test_a_curve_is_that_of_the_reference(benchmarks: Any, samples: Any) -> None:
    groups = [[0, 1], [2], [3, 4], [5], [6, 7], [8, 9, 10]]
    fits, numerics = benchmarks.numerics_fits, benchmarks.numerics
    curve = fits.loss_curve(samples, groups, per_update=4, max_epochs=2, precision="64-true")
    assert curve["samples"] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10]] * 2
    reference = fits.reference_curve(samples, groups, per_update=4, max_epochs=2)
    found = numerics.Findings()
    numerics.compare(found, [{"label": "W = 1", **curve}, {"label": "reference", "precision": "64-true", **reference}])
    assert found.curves[0]["loss_reference"] < 1e-13 and found.curves[0]["weights_reference"] < 1e-12
    assert found.curves[0]["loss_alone"] == 0 and curve["losses"][-1] < curve["losses"][0]
    assert "| W = 1 | 4 | 64 | 0 | 4 |" in numerics.curve_table(found.curves)


def test_fits_of_different_samples_are_no_proof(benchmarks: Any) -> None:
    curve = {"precision": "64-true", "losses": [1.0, 2.0], "weights": torch.zeros(2)}
    other = {"precision": "64-true", "losses": [1.0, 2.5], "weights": torch.ones(2)}
    found = benchmarks.numerics.Findings()
    curves = [{"label": "W = 1", "samples": [[0], [1]], **curve}, {"label": "W = 2", "samples": [[0], [2]], **other}]
    benchmarks.numerics.compare(found, [*curves, {"label": "reference", **curve}])
    assert found.curves[1]["loss_alone"] == 0.5 and found.curves[1]["weights_alone"] == 1.0
    assert found.faults == ["curves: the fits had different samples in their updates"] and not found.plan["same"]


def test_groups_keep_within_the_budget_and_leave_two_for_the_last_update(benchmarks: Any) -> None:
    kit, numerics = benchmarks.numerics_reference, benchmarks.numerics
    items = [{"input_ids": torch.arange(length), "labels": torch.arange(length)} for length in range(20, 220)]
    groups = numerics.groups_of(kit.Samples(220, items))
    assert len(groups) % numerics.PER_UPDATE == 2
    assert all(len(group) * max(len(items[index]["input_ids"]) for index in group) <= numerics.L_MAX for group in groups)
    indices = [index for group in groups for index in group]
    assert len(set(indices)) == len(indices) > 100


def test_windows_of_the_package_end_with_its_batches(benchmarks: Any) -> None:
    windows_of = benchmarks.numerics_peer.windows_of
    assert list(windows_of(iter(range(6)), 4)) == [[0, 1, 2, 3], [4, 5]]
    assert list(windows_of(iter(range(4)), 4)) == [[0, 1, 2, 3]]


def test_the_page_says_what_was_found_and_what_failed(benchmarks: Any, tmp_path: Path) -> None:
    numerics = benchmarks.numerics
    options = numerics.parse(["--quick"])
    found = numerics.Findings(data={"stdlib": {"targets": 0.5}}, faults=["0.1.2: rank 1 ended with exit code 3"])
    cell = {"data": "stdlib", "shards": "equal", "k": 4, "idle_steps": 3, "errors": [1e-7, None, 3e-7]}
    found.gradients = [{**cell, "loader": "odb_lightning", "mode": "token", "precision": "32-true"}]
    (tmp_path / "gradients.png").touch()
    text = numerics.write_page(tmp_path, options, ["* a machine"], found, 96).read_text()
    assert "| stdlib | 50% | equal | 4 | 2 | 3 | 2e-07, **3e-07** |" in text
    for part in ("A quick run", "* a machine", "was left out", "**0.1.2: rank 1 ended with exit code 3.**", "(gradients.png)"):
        assert part in text
    assert "## Loss curves" not in text and str(tmp_path) not in text and str(BENCHMARKS) not in text
    theirs = {"loader": "odb-0.1.2", "mode": "exact", "precision": "32-true", "errors": [0.5, 0.1], "idle_steps": 0}
    page = numerics.gradient_table([*found.gradients, cell | theirs], found.data)
    assert "| 2 / 2 | 3 / 0 | 2e-07, **3e-07** | 0.3, **0.5** |" in page


def test_a_rank_that_fails_ends_the_others(benchmarks: Any, tmp_path: Path) -> None:
    run_ranks = benchmarks.rank_processes.run_ranks
    begin = f"import os, signal, sys; rank = os.environ['RANK']; open('{tmp_path}/' + rank, 'w').write(str(os.getpid()))"
    assert run_ranks([sys.executable, "-c", begin], 2, 60) == ""
    assert {file.name for file in tmp_path.iterdir()} == {"0", "1"}
    fails = f"{begin}; sys.exit(3) if rank == '1' else signal.pause()"
    assert run_ranks([sys.executable, "-c", fails], 2, 60) == "rank 1 ended with exit code 3"
    waits = f"{begin}; signal.pause() if rank == '1' else None"
    assert run_ranks([sys.executable, "-c", waits], 2, 2) == "rank 1 did not end within 2 seconds"
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
