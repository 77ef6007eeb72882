"""What a run leaves for programs and people: `summary.json`, the resolved configuration, and a table."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from rich.table import Table
from rich.tree import Tree

from odb_lightning.callbacks.summary import RunSummary
from odb_lightning.run_stamp import global_rank
from odb_lightning.sweep_table import wide_console

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

SUMMARY_FILE = "summary.json"
_RANK_END_SECONDS = 60.0
_TABLE = (
    ("validation loss", "val_loss", "{:.4f}"),
    ("  before training", "val_loss_before", "{:.4f}"),
    ("training loss, last epoch", "train_loss", "{:.4f}"),
    ("epochs / steps / updates", ("epochs", "steps", "updates"), "{} / {} / {}"),
    ("idle steps, all ranks", "idle_steps", "{}"),
    ("samples: emitted / expected", ("samples_emitted", "samples_expected"), "{:,} / {:,}"),
    ("identities: missing / repeated", ("identities_missing", "identities_repeated"), "{} / {}"),
    ("padding", "padding", "{:.2%}"),
    ("budget fill", "budget_fill", "{:.1%}"),
    ("lock-step / schedule efficiency", ("lockstep_efficiency", "schedule_efficiency"), "{:.1%} / {:.1%}"),
    ("samples / tokens per second", ("samples_per_second", "tokens_per_second"), "{:,.0f} / {:,.0f}"),
    ("time waiting for batches", "loader_wait_share", "{:.1%}"),
    ("lengths: variation / short share", ("length_cv", "length_short_share"), "{:.2f} / {:.1%}"),
)


class RunReport:
    """Writes the files of a run. Only rank 0 does; on the others each method does nothing."""

    def __init__(self, output_dir: Path, labels: Mapping[str, Any]) -> None:
        self.output_dir = output_dir
        self.labels = dict(labels)
        self.summary = RunSummary()
        self.trainer: Trainer | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def watch(self, summary: RunSummary) -> None:
        """Take the figures from `summary`, and its word that the fit has failed."""
        self.summary = summary
        summary.on_failure = self.failed

    @property
    def is_writer(self) -> bool:
        """Whether this process is rank 0."""
        return global_rank() == 0 if self.trainer is None else self.trainer.global_rank == 0

    def begun(self, cfg: DictConfig, show: bool) -> None:
        """Print the resolved configuration if `show`, and save it beside the summary."""
        if not self.is_writer:
            return
        if show:
            wide_console().print(config_tree(cfg))
        self.output_dir.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(cfg, self.output_dir / "config.yaml", resolve=True)

    def failed(self, error: BaseException) -> None:
        """Write what is known of a run that ended early: "interrupted" by a signal, else "failed"."""
        # What ended the fit is the cause; what the Trainer raises afterwards follows from it.
        self._error = self._error or error
        if self.is_writer:
            stopped = isinstance(self._error, KeyboardInterrupt | SystemExit)
            message = f"{type(self._error).__name__}: {self._error}".rstrip(": ")
            message = "\n".join([message, *getattr(self._error, "__notes__", ())])
            self._write({"status": "interrupted" if stopped else "failed", "error": message, **self._partial()})

    def rank_failed(self, rank: int, exit_status: int) -> None:
        """Note that another rank is gone; a word of rank 0's own about it replaces this one."""
        if self._error is None and self.is_writer:
            message = f"rank {rank} ended with status {exit_status}; its own output tells why"
            self._write({"status": "failed", "error": message, **self._partial()})

    def finished(self) -> dict[str, Any]:
        """The summary of a run that came to its end on all ranks, written and shown on rank 0."""
        result = {"status": "ok", **self.labels, **self.summary.figures}
        if self.is_writer:
            self._write(result)
            console = wide_console()
            console.print(summary_table(result))
            console.print(f"files: {self.output_dir}", soft_wrap=True, highlight=False)
        return result

    def _partial(self) -> dict[str, Any]:
        try:
            figures = self.summary.partial_figures(self.trainer) if self.trainer is not None else {}
        except Exception as error:  # the run is failing: half-made state must not hide why
            figures = {"figures_error": str(error)}
        return {**self.labels, **figures, "figures_of": "rank 0 alone"}

    def _write(self, result: Mapping[str, Any]) -> None:
        with self._lock:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            target = self.output_dir / SUMMARY_FILE
            scratch = target.with_suffix(".tmp")
            scratch.write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")
            os.replace(scratch, target)


class RankWatch(threading.Thread):
    """Tells the report when a rank that this process started has failed, while this one may be stuck in a collective."""

    def __init__(self, trainer: Trainer, report: RunReport, seconds: float = 0.1) -> None:
        super().__init__(daemon=True, name="odb-rank-watch")
        self._trainer, self._report, self._seconds = trainer, report, seconds
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(self._seconds):
            for rank, process in enumerate(started_ranks(self._trainer), start=1):
                if process.poll():
                    self._report.rank_failed(rank, process.returncode)
                    return

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()


def started_ranks(trainer: Trainer) -> list[Any]:
    """The processes of the other ranks on this machine, where this one started them."""
    return list(getattr(trainer.strategy.launcher, "procs", None) or [])


def wait_for_ranks(trainer: Trainer, seconds: float = _RANK_END_SECONDS) -> None:
    """Return when the ranks that this process started have ended well; RuntimeError if one has not within `seconds`."""
    deadline = time.monotonic() + seconds
    for rank, process in enumerate(started_ranks(trainer), start=1):
        try:
            status = process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            raise RuntimeError(f"rank {rank} did not end within {seconds:.0f} s of rank 0 and was killed") from None
        if status:
            raise RuntimeError(f"rank {rank} ended with status {status}; its own output tells why")


def config_tree(cfg: DictConfig) -> Tree:
    """The resolved configuration as a tree to print."""
    tree = Tree("configuration")
    _grow(tree, OmegaConf.to_container(cfg, resolve=True))
    return tree


def _grow(tree: Tree, node: Any) -> None:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            _grow(tree.add(f"[bold]{key}"), value)
        else:
            tree.add(f"{key}: {value!r}".replace("[", "\\["))


def summary_table(result: Mapping[str, Any]) -> Table:
    """The figures that people look at first."""
    how = f"{result.get('loader')} loader, {result.get('strategy')}, {result.get('world_size')} ranks"
    table = Table("figure", f"{result.get('task_name', 'run')}: {how}")
    for label, keys, form in _TABLE:
        values = [result.get(key) for key in ((keys,) if isinstance(keys, str) else keys)]
        table.add_row(label, "-" if any(value is None for value in values) else form.format(*values))
    return table
