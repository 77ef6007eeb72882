"""Sweeps: each job is a fresh process with its own folder, a clean environment, and exactly its own overrides."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from odb_lightning.launcher import SweepJob, clean_environment, job_command, quoted
from odb_lightning.sweep_table import changed_overrides, sweep_table
from tests.helpers import run_command

SCRIPT = """
    import json, os, sys
    from pathlib import Path
    import hydra
    from hydra.core.hydra_config import HydraConfig
    import odb_lightning.launcher

    @hydra.main(version_base="1.3", config_path=None, config_name="job")
    def main(cfg):
        folder = Path(HydraConfig.get().runtime.output_dir)
        leaked = [name for name in os.environ if name.startswith(("PL_", "LOCAL_RANK", "MASTER_", "WORLD_SIZE"))]
        os.environ["LOCAL_RANK"] = "0"
        if cfg.fail == cfg.x:
            os._exit(3)
        facts = {"status": "ok", "x": cfg.x, "text": cfg.text, "leaked": leaked, "pid": os.getpid(), "val_loss": float(cfg.x)}
        (folder / "summary.json").write_text(json.dumps(facts))
        return float(cfg.x)

    from hydra.core.config_store import ConfigStore
    node = {"x": 1, "text": "", "fail": -1, "optimized_metric": "val_loss"}
    node["defaults"] = [{"override hydra/launcher": "odb"}, "_self_"]
    node["hydra"] = {"sweep": {"dir": "sweep", "subdir": "${hydra.job.override_dirname}"}}
    ConfigStore.instance().store(name="job", node=node)
    if __name__ == "__main__":
        main()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def summaries(folder: Path) -> list[dict[str, object]]:
    return [json.loads(file.read_text()) for file in sorted(folder.rglob("summary.json"))]


@pytest.mark.distributed
def test_each_job_is_a_fresh_process_and_a_failed_one_does_not_touch_the_next(script: Path) -> None:
    environment = {"PL_GLOBAL_SEED": "3", "LOCAL_RANK": "1", "MASTER_PORT": "1", "WORLD_SIZE": "2"}
    command = [sys.executable, str(script), "-m", "x=1,2,3", "text='a=b c'", "fail=1"]
    result = run_command(command, cwd=script.parent, seconds=200, environment=environment)
    second, third = summaries(script.parent / "sweep")
    assert (second["x"], third["x"]) == (2, 3)
    assert second["text"] == third["text"] == "a=b c"
    assert second["leaked"] == third["leaked"] == []
    assert second["pid"] != third["pid"]
    assert result.status != 0
    assert "sweep job 0 ended with status 3" in result.output
    table = result.output[result.output.index("val_loss") :]
    assert "x=1" in table and "failed" in table and "3.0000" in table


@pytest.mark.parametrize("text", ["plain", "a=b", "a b", "it's", "x,y", "{a: 1}", "back\\slash", "${not.resolved", "[1"])
def test_a_quoted_value_reaches_the_job_as_it_is(text: str) -> None:
    override = OverridesParser.create().parse_override(f"key={quoted(text)}")
    assert override.value() == text


def test_variables_of_launchers_are_removed_and_no_others() -> None:
    environment = {"LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x", "PL_GLOBAL_SEED": "1", "PATH": "p", "OMP_NUM_THREADS": "1"}
    assert clean_environment(environment) == {"PATH": "p", "OMP_NUM_THREADS": "1"}


def test_the_command_of_a_job_keeps_the_user_s_options_and_none_of_the_sweep_s() -> None:
    def task(cfg: object) -> None: ...

    task.__module__ = "odb_lightning.train"
    sources = [
        {"path": "/my/conf", "schema": "file", "provider": "command-line"},
        {"path": "x", "schema": "pkg", "provider": "main"},
    ]
    config = OmegaConf.create(
        {
            "hydra": {
                "overrides": {
                    "hydra": ["hydra.verbose=true", "hydra.sweep.dir=s", "hydra.mode=MULTIRUN", "hydra/launcher=odb"]
                },
                "job": {"config_name": "train"},
                "runtime": {"config_sources": sources},
            }
        }
    )
    command = job_command(task, config, ["odb.l_max=512"], Path("/runs/a=1"), 4)
    assert command == [
        sys.executable, "-m", "odb_lightning.train", "--config-name", "train", "--config-dir", "/my/conf", "odb.l_max=512",
        "hydra.verbose=true", "hydra.mode=RUN", "hydra.run.dir='/runs/a=1'", "hydra.job.num=4",
    ]  # fmt: skip


def test_the_table_shows_what_differs_between_jobs_and_how_each_ended(tmp_path: Path) -> None:
    ends = (0, 1, None)
    jobs = [SweepJob(number, ["a=1", f"x={number}"], tmp_path / str(number), status) for number, status in enumerate(ends)]
    jobs[0].directory.mkdir()
    (jobs[0].directory / "summary.json").write_text(json.dumps({"status": "ok", "l_max": 512, "padding": 0.0123}))
    assert changed_overrides(jobs) == ["x=0", "x=1", "x=2"]
    columns = {str(column.header): list(column.cells) for column in sweep_table(jobs).columns}
    assert columns["status"] == ["ok", "failed", "not run"]
    assert columns["padding"] == ["1.23%", "-", "-"]


def test_an_aborted_job_has_no_summary(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{")
    assert SweepJob(0, [], tmp_path).summary == {}
