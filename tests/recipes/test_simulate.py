"""`odb-simulate`: what it gives for each source of lengths, and what it refuses."""

from __future__ import annotations

import io
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException
from hydra.utils import instantiate
from omegaconf import DictConfig, open_dict
from rich.console import Console

from odb_lightning import ShardedSampler, simulate
from odb_lightning.config_checks import ConfigError
from odb_lightning.lengths import of_dataset
from odb_lightning.plan import RoundPlanner, simulate_ranks
from odb_lightning.simulate import Simulation
from odb_lightning.simulation_table import print_simulation
from tests.helpers import run_command
from tests.loader_data import Lengths, make_loader

FIELDS = """
    loader default alignment world_size l_max f_s batch_size dropped over_budget steps idle_steps padding budget_fill
    lockstep_efficiency schedule_efficiency samples samples_per_step length_step_correlation neighbour_correlation
    schedule_bound rounds bytes_per_round gathered_bytes_per_round
"""


@pytest.fixture(autouse=True)
def hydra_forgets() -> Iterator[None]:
    yield
    HydraConfig.instance().cfg = None


def composed(*overrides: str) -> DictConfig:
    with initialize_config_module("odb_lightning.conf", version_base="1.3"):
        cfg = compose("simulate", overrides=list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def simulated(*overrides: str) -> Simulation:
    return simulate.simulate(composed(*overrides))


def row_of(found: Simulation, **wanted: Any) -> dict[str, Any]:
    (row,) = (row for row in found.rows if all(row[name] == value for name, value in wanted.items()))
    return row


def written(tmp_path: Path, lengths: list[int]) -> str:
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(map(str, lengths)))
    return str(file)


@pytest.mark.parametrize("law", ["lognormal", "bimodal", "heavy", "uniform"])
def test_each_law_gives_lengths_and_a_row_for_each_loader(law: str) -> None:
    found = simulated(f"lengths={law}", "lengths.n=1500", "odb.l_max=12288", "world_size=3")
    report = json.loads(json.dumps(found.report(), allow_nan=False))
    assert set(report) == {"lengths", "rows"}
    assert report["lengths"]["n"] == 1500 and report["lengths"]["cv"] > 0.2 and 0 <= report["lengths"]["f_s"] <= 1
    assert [(row["loader"], row["alignment"], row["default"]) for row in report["rows"]] == [
        ("odb", "matched", True),
        ("odb", "paper", False),
        ("standard", None, False),
        ("gmt", None, False),
    ]
    for row in report["rows"]:
        assert set(row) == set(FIELDS.split())
        assert row["samples"] == 1500 and row["l_max"] == 12288
        assert 0 < row["schedule_efficiency"] <= row["lockstep_efficiency"] <= 1
        assert row["schedule_efficiency"] == pytest.approx(row["lockstep_efficiency"] * (1 - row["padding"]))
        assert row["budget_fill"] == pytest.approx(report["lengths"]["tokens"] / (row["steps"] * 3 * 12288))
        assert row["schedule_efficiency"] <= (row["schedule_bound"] or 1)


def test_the_plan_holds_each_length_once_and_is_that_of_simulated_ranks(tmp_path: Path) -> None:
    lengths = [1 + 37 * index % 400 for index in range(900)]
    path = written(tmp_path, lengths)
    found = simulated("lengths=file", f"lengths.path={path}", "world_size=64", "odb.l_max=1000", "odb.buffer_size=8", "seed=5")
    row = row_of(found, default=True)
    assert {len(step) for step in found.plan} == {64} and len(found.plan) == row["steps"]
    assert Counter(length for step in found.plan for group in step for length in group) == Counter(lengths)
    assert all(len(group) * max(group) <= 1000 for step in found.plan for group in step if len(group) > 1)
    samplers = [ShardedSampler(len(lengths), rank=rank, world_size=64, seed=5) for rank in range(64)]
    shards = [[lengths[index] for index in sampler] for sampler in samplers]
    run = simulate_ranks(shards, lambda rank: RoundPlanner(buffer_size=8, l_max=1000, order_seed="5/0"))
    assert found.plan == [
        [[shard[position] for position in group] for group, shard in zip(step, shards, strict=True)] for step in run.steps
    ]
    assert row["rounds"] == run.num_rounds
    assert row["idle_steps"] == sum(not group for step in found.plan for group in step)


def test_a_real_loader_makes_the_batches_of_the_plan(tmp_path: Path) -> None:
    lengths = [1 + 37 * index % 90 for index in range(250)]
    found = simulated(
        "lengths=file",
        f"lengths.path={written(tmp_path, lengths)}",
        "world_size=1",
        "odb.l_max=300",
        "odb.buffer_size=40",
        "odb.seed=2",
    )
    with make_loader(Lengths(lengths), l_max=300, buffer_size=40, seed=2, num_supervised_fn=len) as loader:
        batches = [[[lengths[index] for index in batch.step.sample_ids]] for batch in loader]
        rounds = loader.stats.rounds
    assert batches == found.plan
    assert rounds == row_of(found, default=True)["rounds"]


def test_the_data_of_a_recipe_go_through_their_pipeline() -> None:
    found = simulated("data=stdlib", "data.limit=40", "data.cutoff=256", "odb.l_max=512", "odb.num_workers=0", "world_size=2")
    dataset, _ = instantiate(composed("data=stdlib", "data.limit=40", "data.cutoff=256").data)
    assert sorted(of_dataset(dataset).tolist()) == sorted(length for step in found.plan for group in step for length in group)
    assert (found.lengths["n"], found.lengths["max"]) == (40, 256)


def test_several_budgets_have_rows_of_their_own() -> None:
    found = simulated("l_max=[2048,8192]", "lengths.n=3000")
    assert [row["l_max"] for row in found.rows] == [2048] * 4 + [8192] * 4
    small, large = (row_of(found, l_max=l_max, default=True) for l_max in (2048, 8192))
    assert small["steps"] > 3 * large["steps"] and small["f_s"] < large["f_s"]
    assert len(found.plan) == small["steps"]


def test_the_exchange_does_not_grow_with_the_ranks_and_the_authors_does() -> None:
    few, many = (row_of(simulated(f"world_size={ranks}", "lengths.n=2000"), default=True) for ranks in (2, 40))
    for row, ranks in ((few, 2), (many, 40)):
        assert row["gathered_bytes_per_round"] == (2 + 2 * 1024) * 8 * ranks
        sums = 24 * row["steps"] / row["rounds"]
        assert 8 * 27 + sums <= row["bytes_per_round"] <= 8 * 27 + sums + 16 * (row["steps"] / row["rounds"] / 16 + 1)


def test_knobs_of_the_loader_reach_the_plan(tmp_path: Path) -> None:
    path = f"lengths.path={written(tmp_path, [0, 5, 5, 5, 40, 10, 10, 0, 3, 3])}"
    common = ("lengths=file", path, "world_size=2", "odb.l_max=20")
    emitted, dropped = simulated(*common), simulated(*common, "odb.oversize=drop")
    row = row_of(emitted, default=True)
    assert (row["samples"], row["dropped"], row["over_budget"]) == (8, 2, 1)
    assert {row["dropped"] for row in dropped.rows} == {3} and {row["samples"] for row in dropped.rows} == {7}
    alone = simulated(*common, "odb.max_rows=1")
    assert all(len(group) <= 1 for step in alone.plan for group in step)
    assert row_of(alone, loader="standard")["batch_size"] == 1
    paper = simulated(*common, "odb.alignment=paper")
    assert [row["alignment"] for row in paper.rows if row["default"]] == ["paper"] and paper.rows[0]["default"]
    again = simulated(*common, "odb.mode=non_join", "odb.quota=30")
    assert row_of(again, default=True)["samples"] >= 30 and row_of(again, default=True)["schedule_bound"] is None
    squares = simulated("lengths=uniform", "lengths.n=200", "lengths.low=500", "odb.budget=quadratic", "odb.l_max=2100")
    assert not any(len(group) == 4 for step in squares.plan for group in step), "4 * 500 tokens cost more than 2,100"


def test_fixed_batches_keep_within_the_budget_whatever_the_lengths_or_have_the_size_given() -> None:
    common = ("lengths=uniform", "lengths.high=1000", "lengths.n=3000", "odb.l_max=4096", "world_size=2")
    assert row_of(simulated(*common), loader="standard")["batch_size"] == 4
    row = row_of(simulated(*common, "batch_size=10"), loader="standard")
    assert (row["batch_size"], row["steps"], row["samples_per_step"]) == (10, 150, 10)


def test_the_table_has_the_figures_and_says_how_odb_compares() -> None:
    found = simulated("l_max=[4096,8192]", "lengths.n=2000", "lengths.clip=5000")
    console = Console(file=io.StringIO(), width=160)
    print_simulation(found, console)
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith("2,000 lengths: mean ")
    (first,) = (line for line in lines if "4,096" in line and "odb, matched *" in line)
    row = row_of(found, l_max=4096, default=True)
    assert f" {row['steps']:,} " in first and f"{row['schedule_efficiency']:.1%}" in first and f"{row['padding']:.1%}" in first
    assert sum("gmt oracle" in line for line in lines) == 2
    assert [line.split(":")[0] for line in lines if "against standard" in line] == ["l_max 4,096", "l_max 8,192"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["world_size=0"],
        ["world_size=two"],
        ["world_size=null"],
        ["l_max=0"],
        ["l_max=[512,-1]"],
        ["l_max=[]"],
        ["l_max=abc"],
        ["odb.l_max=0"],
        ["odb.buffer_size=0"],
        ["odb.max_rows=0"],
        ["odb.quota=0"],
        ["odb.alignment=best"],
        ["odb.mode=joint"],
        ["odb.oversize=cut"],
        ["odb.empty=emit"],
        ["odb.budget=cubic"],
        ["odb.cost=cubic"],
        ["odb.max_patches=4"],
        ["odb.multiprocessing_context=thread"],
        ["odb.num_workers=-1"],
        ["odb.oversize=error", "odb.l_max=64"],
        ["batch_size=0"],
        ["output=xml"],
        ["seed=-1"],
        ["seed=abc"],
        ["plan=no/such/folder/plan.jsonl"],
        ["plan=."],
        ["plan=p.jsonl", "l_max=[512,1024]"],
        ["lengths.n=0"],
        ["lengths.mean=-5"],
        ["lengths.cv=x"],
        ["lengths.clip=0"],
        ["lengths.means=[1]", "lengths=bimodal"],
        ["lengths.share=2", "lengths=bimodal"],
        ["lengths.high=1", "lengths=uniform"],
        ["lengths.path=no/such/file", "lengths=file"],
        ["lengths.path", "lengths=file"],
        ["lengths.limit=0", "lengths=file", f"lengths.path={__file__}"],
        ["lengths.cv=2", "data=stdlib"],
        ["lengths=uniform", "data=stdlib"],
        ["data.path", "data=sft"],
        ["data", "data=sft", "data.path=no/such/file"],
        ["data", "data=sft", f"data.path={__file__}"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_used_is_refused_by_name_in_one_line(overrides: list[str], tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = composed(*(override for override in overrides if "=" in override))
    with pytest.raises(ConfigError) as failure:
        simulate.simulate(cfg)
    assert overrides[0].partition("=")[0] in str(failure.value)
    assert len(str(failure.value).splitlines()) == 1


@pytest.mark.parametrize("override", ["wrld_size=3", "lengths.sd=3", "odb.l_max=abc", "data.limit=3"])
def test_a_wrong_name_or_type_fails_when_composing(override: str) -> None:
    with pytest.raises(ConfigCompositionException) as failure:
        composed(override)
    assert override.partition("=")[0] in f"{failure.value} {failure.value.__cause__}"


def test_a_policy_that_leaves_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no sample is left .* odb\.oversize=drop"):
        simulated("lengths=file", f"lengths.path={written(tmp_path, [9, 9])}", "odb.l_max=4", "odb.oversize=drop")


def test_each_length_the_same_is_planned_without_a_word_on_the_order(tmp_path: Path) -> None:
    found = simulated("lengths=file", f"lengths.path={written(tmp_path, [7] * 40)}", "world_size=2", "odb.l_max=70")
    assert row_of(found, loader="gmt")["schedule_efficiency"] == 1
    assert {row["length_step_correlation"] for row in found.rows} == {None}


@pytest.mark.distributed
def test_the_command_writes_json_alone_and_the_plan_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    # Standard error apart, so that what is left is stdout.
    inner = [sys.executable, "-m", "odb_lightning.simulate", "world_size=64", "lengths.n=5000", "output=json", "plan=p.jsonl"]
    script = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:], stderr=subprocess.DEVNULL, cwd='work').returncode)"
    result = run_command([sys.executable, "-c", script, *inner], cwd=tmp_path, seconds=120)
    assert result.status == 0, result.output[-4000:]
    report = json.loads(result.output)
    assert os.listdir(folder) == ["p.jsonl"]
    plan = [json.loads(line) for line in (folder / "p.jsonl").read_text().splitlines()]
    (row,) = (row for row in report["rows"] if row["default"])
    assert len(plan) == row["steps"] and {len(step) for step in plan} == {64}
    assert sum(len(group) for step in plan for group in step) == 5000
