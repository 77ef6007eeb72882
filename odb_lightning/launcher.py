"""A Hydra launcher that runs each job of a sweep as a fresh run of its own, one after the other.

Distributed jobs need that: in a sweep inside one process, the ranks that Lightning starts would re-run the whole sweep,
and what a job leaves in the environment reaches the next one. `hydra/launcher=odb` selects it (odb-train's default).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from odb_lightning.config_checks import ConfigError, validate_config
from odb_lightning.sweep_table import print_sweep_table

_INTERRUPT_SECONDS = 20.0
_INTERRUPTED_STATUS = 130  # what shells give a command that Ctrl-C ended
_STRAGGLER_SECONDS = 5.0
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHER_PREFIXES = ("PL_", "TORCHELASTIC_", "GROUP_", "ROLE_")
_SWEEP_OVERRIDES = (
    "hydra.run.",
    "hydra.sweep",
    "hydra/sweeper",
    "hydra.launcher",
    "hydra/launcher",
    "hydra.mode",
    "hydra.job.num",
)
PLUGIN_MODULE = "hydra_plugins.odb_lightning"
"""Hydra takes launchers from this namespace only. There is no file of that name: Hydra would import it, and torch with it, in
each Hydra program of the environment."""


def clean_environment(environment: dict[str, str]) -> dict[str, str]:
    """`environment` without what a launcher of ranks leaves in it."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }


def quoted(value: str) -> str:
    """`value` as a literal of Hydra's override grammar, whatever characters it holds."""
    # Between single quotes, backslashes are only special before a quote.
    escaped = value.replace("\\'", "\\\\'").replace("'", "\\'")
    return f"'{escaped}'"


def job_command(
    task_function: TaskFunction, config: DictConfig, overrides: Sequence[str], job_dir: Path, number: int
) -> list[str]:
    """The command line of one job: a single run of the same program in `job_dir`."""
    own = [text for text in config.hydra.overrides.hydra if not text.startswith(_SWEEP_OVERRIDES)]
    return [
        sys.executable,
        *_program(task_function),
        *_config_options(config),
        *overrides,
        *own,
        "hydra.mode=RUN",
        f"hydra.run.dir={quoted(str(job_dir))}",
        f"hydra.job.num={number}",
    ]


def _program(task_function: TaskFunction) -> list[str]:
    module = task_function.__module__
    if module != "__main__":
        return ["-m", module]
    import __main__

    spec = getattr(__main__, "__spec__", None)
    return ["-m", spec.name] if spec is not None else [os.path.abspath(sys.argv[0])]


def _config_options(config: DictConfig) -> list[str]:
    options = ["--config-name", str(config.hydra.job.config_name)] if config.hydra.job.config_name else []
    for source in config.hydra.runtime.config_sources:
        if source.provider == "command-line":
            options += ["--config-dir", source.path]
    return options


@dataclass
class SweepJob:
    """One job of a sweep and what became of it."""

    number: int
    overrides: list[str]
    directory: Path
    exit_status: int | None = None

    @property
    def summary(self) -> dict[str, Any]:
        """What the job wrote into its summary; empty where it wrote none."""
        try:
            return dict(json.loads((self.directory / "summary.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    @property
    def succeeded(self) -> bool:
        return self.exit_status == 0


class ODBLauncher(Launcher):
    """Runs jobs as fresh processes, each with its own run directory; a job that fails does not touch the next."""

    __module__ = PLUGIN_MODULE

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config
        self.jobs: list[SweepJob] = []

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """One `JobReturn` a job, failed ones included; the sweeper raises for those once all have run."""
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise ConfigError("a sweep starts the ranks of its jobs itself: run it without torchrun")
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        planned = [self._plan(list(overrides), initial_job_idx + i) for i, overrides in enumerate(job_overrides)]
        self.jobs += [job for job, _ in planned]
        returns = []
        try:
            for job, job_config in planned:
                print(f"sweep job {job.number}: {' '.join(job.overrides)}\n  in {job.directory}", flush=True)
                job.exit_status = self._run(job)
                returns.append(_job_return(job, job_config))
        except KeyboardInterrupt:
            print("sweep interrupted", file=sys.stderr)
            raise SystemExit(_INTERRUPTED_STATUS) from None
        finally:
            print_sweep_table(self.jobs)
        return returns

    def _plan(self, overrides: list[str], number: int) -> tuple[SweepJob, DictConfig]:
        job_config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(job_config):
            job_config.hydra.job.id = str(number)
            job_config.hydra.job.num = number
        directory = Path(str(job_config.hydra.sweep.dir)) / str(job_config.hydra.sweep.subdir)
        if "odb" in job_config:
            validate_config(job_config)
        return SweepJob(number, overrides, directory.absolute()), job_config

    def _run(self, job: SweepJob) -> int:
        job.directory.mkdir(parents=True, exist_ok=True)
        command = job_command(self.task_function, self.config, job.overrides, job.directory, job.number)
        # A session of its own, so that the whole job, its ranks included, can be ended as one group.
        process = subprocess.Popen(command, env=clean_environment(dict(os.environ)), start_new_session=True)
        previous = signal.signal(signal.SIGTERM, _raise_interrupt)
        try:
            status = process.wait()
        except KeyboardInterrupt:
            _interrupt(process)
            raise
        finally:
            signal.signal(signal.SIGTERM, previous)
            _end_stragglers(process)
        return status


def _job_return(job: SweepJob, job_config: DictConfig) -> JobReturn:
    config = OmegaConf.masked_copy(job_config, [str(key) for key in job_config if key != "hydra"])
    result = JobReturn(overrides=job.overrides, cfg=config, working_dir=str(job.directory), task_name=config.get("task_name"))
    if job.succeeded:
        metric = config.get("optimized_metric")
        result.return_value = job.summary.get(metric) if metric else None
        result.status = JobStatus.COMPLETED
    else:
        reason = job.summary.get("error") or "its output tells why"
        result.return_value = ConfigError(f"sweep job {job.number} ended with status {job.exit_status}: {reason}")
        result.status = JobStatus.FAILED
    return result


def _raise_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Ask the job to stop as Ctrl-C would, and give it a bounded time for it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        process.wait(_INTERRUPT_SECONDS)


def _end_stragglers(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a job's process group, so that it cannot disturb the next job."""
    deadline = time.monotonic() + _STRAGGLER_SECONDS
    with suppress(ProcessLookupError, PermissionError):
        while process.poll() is not None and time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def register() -> None:
    """Make `hydra/launcher=odb` known to Hydra; calling it again changes nothing."""
    plugins = Plugins.instance()  # looks through the real namespace before it is touched
    module = sys.modules.setdefault(PLUGIN_MODULE, ModuleType(PLUGIN_MODULE))
    setattr(module, ODBLauncher.__name__, ODBLauncher)
    try:
        import_module("hydra_plugins")
    except ModuleNotFoundError:
        sys.modules["hydra_plugins"] = namespace = ModuleType("hydra_plugins")
        namespace.__path__ = []
    setattr(sys.modules["hydra_plugins"], PLUGIN_MODULE.rpartition(".")[2], module)
    plugins.register(ODBLauncher)
    node = {"_target_": f"{PLUGIN_MODULE}.{ODBLauncher.__name__}"}
    ConfigStore.instance().store(group="hydra/launcher", name="odb", node=node, provider="odb_lightning")


register()
