"""The benchmarks' own code, on tiny sizes: what they count, and the page they write."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("measuring", "samples", "peers", "loader_rate", "stalls", "schedule", "stages", "exchange", "run")


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


def batch_of(lengths: list[int], first_ids: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    ids[:, 0] = torch.tensor(first_ids)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long()}


def test_a_reading_tells_what_was_trained(benchmarks: Any) -> None:
    dataset = benchmarks.samples.Tokens(4, "0.5")
    dataset.lengths[:] = [10, 20, 30, 40]
    reading = benchmarks.measuring.consume([batch_of([40, 30], [3, 2]), batch_of([20, 10, 20], [1, 0, 1])])
    assert reading.shapes == [(2, 40), (3, 20)] and reading.sample_ids == [3, 2, 1, 0, 1]
    figures = benchmarks.measuring.summary([reading], dataset)
    assert (figures["samples"], figures["steps"], figures["missing"], figures["repeated"]) == (5, 2, 0, 1)
    assert figures["padding"] == pytest.approx(1 - 120 / (80 + 60))
    dataset.lengths[:] = [10, 20, 30, 41]
    with pytest.raises(RuntimeError, match="the attention masks count 120 tokens, the samples have 121"):
        benchmarks.measuring.summary([reading], dataset)


def test_the_loader_in_the_benchmark_leaves_nothing_out(benchmarks: Any) -> None:
    kind = benchmarks.samples.KINDS["tokens"]
    dataset = kind.dataset(200, "1.0")
    turns = {name: [benchmarks.loader_rate.one_pass(name, kind, dataset, 1, 0, 1)] for name in ("odb", "plain", "arrays")}
    for (figures,) in turns.values():
        assert (figures["samples"], figures["missing"], figures["repeated"]) == (200, 0, 0)
        assert set(figures["cpu_us"]) <= {"trainer", "children", "grandchildren"}
    assert turns["plain"][0]["steps"] == turns["arrays"][0]["steps"] == 13
    cell = {"kind": "tokens", "law": "1.0", "ranks": 1, "workers": 1, "turns": turns | {"bucketing": [None]}}
    page = benchmarks.loader_rate.page([cell], peers=True)
    assert "| 1 | 1 | 1.0 | bucketing |  | failed |" in page and "left out" not in page
    turns["odb"][0]["missing"] = 1
    assert "ODB left out 1 samples" in benchmarks.loader_rate.page([cell], peers=True)


def test_what_is_in_flight_stays_within_the_formula(benchmarks: Any) -> None:
    figures = benchmarks.stalls.one_pass("odb", 300, "0.5", 1, 0.0, 0, 1)
    assert 0 < figures["in_flight"] <= min(300, figures["bound"]) and figures["first_window"] == [300]
    assert 0 <= figures["wait_share"] <= 1
    found = [{"loader": "odb", "workers": 1, "step_ms": 0, "ranks": 1, "figures": figures}]
    assert "| 1 | 1 | 0 | odb |" in benchmarks.stalls.page(found)


def test_schedules_of_few_samples(benchmarks: Any) -> None:
    found = benchmarks.schedule.measure(2000, [0], 2)
    assert [(cell["law"], cell["row"]) for cell in found] == [
        (law, row) for law in benchmarks.samples.SCHEDULE_LAWS for row in benchmarks.schedule.ROWS
    ]
    for cell in found:
        (row,) = cell["seeds"]
        assert row["samples"] == 2000 and 0 < row["schedule_efficiency"] <= 1
    assert benchmarks.schedule.page(found).count("\n") == 2 + len(found)


def test_the_exchange_is_simulated(benchmarks: Any) -> None:
    row = benchmarks.exchange.simulate_bytes(2, 200)
    assert row["rounds"] >= 1 and 0 < row["bytes_per_round"] < row["gathered_bytes_per_round"]
    assert "| 2 | 200 |" in benchmarks.exchange.page({"times": [], "bytes": [row]})


def test_stages_of_few_samples(benchmarks: Any) -> None:
    found = benchmarks.stages.measure(["tokens", "objects"], 200, 1)
    for (spent,) in found.values():
        assert list(spent) == [stage for _, stage in benchmarks.stages.STAGES]
        assert min(spent.values()) > 0, "each stage was passed through"
    assert "| trainer | receive |" in benchmarks.stages.page(found)


def test_the_page_says_what_ran_and_what_failed(benchmarks: Any, tmp_path: Path) -> None:
    run = benchmarks.run
    options = run.parse(["--quick", "--only", "schedule", "exchange"])
    part = run.Part("schedule", "schedule.py", arguments=("--seeds", "0", "1"), quick=("--num-samples", "10", "--seeds", "2"))
    assert run.arguments_of(part, False) == ["--seeds", "0", "1"]
    assert run.arguments_of(part, True) == ["--seeds", "2", "--num-samples", "10"]
    results = {
        "schedule": [run.Result(part, "| a table |\n|---|\n", seconds=3.0)],
        "exchange": [run.Result(run.Part("exchange", "exchange.py", ranks=2), fault="failed with exit code 1")],
    }
    (tmp_path / "schedule.png").touch()
    text = run.write_page(tmp_path, options, ["* a machine"], results).read_text()
    assert "| a table |" in text and "![Schedules](schedule.png)" in text and "A quick run" in text and "* a machine" in text
    assert "OMP_NUM_THREADS=1 python benchmarks/schedule.py --seeds 2 --num-samples 10" in text
    assert "OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/exchange.py" in text
    assert "**It failed with exit code 1.**" in text
    assert str(tmp_path) not in text and str(BENCHMARKS) not in text


def test_each_part_can_be_run_alone(benchmarks: Any, tmp_path: Path) -> None:
    options = benchmarks.run.parse([])
    parts = [part for section in benchmarks.run.SECTIONS.values() for part in section.parts]
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        assert (BENCHMARKS / part.script).exists()
        command = benchmarks.run.command_of(part, options, tmp_path)
        assert command[-2:] == ["--json", str(tmp_path / f"{part.name}.json")]
    done = benchmarks.run.Part("words", "peers.py", arguments=("--help",))
    result = benchmarks.run.run_part(done, [sys.executable, "-c", "print('said')"])
    assert (result.output, result.fault) == ("said\n", "")
    late = benchmarks.run.Part("late", "peers.py", seconds=0.2)
    result = benchmarks.run.run_part(late, [sys.executable, "-c", "import signal; signal.pause()"])
    assert (result.output, result.fault) == ("", "did not end within 0.2 seconds")
