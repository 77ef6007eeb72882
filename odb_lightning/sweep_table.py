"""The table that a sweep ends with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from odb_lightning.launcher import SweepJob

_FILE_WIDTH = 160
_COLUMNS = (
    ("world", "world_size", "{}"),
    ("l_max", "l_max", "{}"),
    ("steps", "steps", "{}"),
    ("missing", "identities_missing", "{}"),
    ("padding", "padding", "{:.2%}"),
    ("fill", "budget_fill", "{:.1%}"),
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("waiting", "loader_wait_share", "{:.1%}"),
    ("val_loss", "val_loss", "{:.4f}"),
)


def changed_overrides(jobs: Sequence[SweepJob]) -> list[str]:
    """For each job, those of its overrides that not all jobs share."""
    shared = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    return [" ".join(text for text in job.overrides if text not in shared) for job in jobs]


def sweep_table(jobs: Sequence[SweepJob]) -> Table:
    """A row a job, in the order in which they ran."""
    table = Table(title="sweep", title_justify="left")
    for heading in ("#", "overrides", "status", *(name for name, _, _ in _COLUMNS)):
        table.add_column(heading, overflow="fold")
    for job, overrides in zip(jobs, changed_overrides(jobs), strict=True):
        summary = job.summary
        table.add_row(
            str(job.number), overrides, job_status(job), *(_cell(summary.get(key), form) for _, key, form in _COLUMNS)
        )
    return table


def job_status(job: SweepJob) -> str:
    """What its summary says, unless the job ended otherwise after it was written."""
    status = str(job.summary.get("status", "not run" if job.exit_status is None else "failed"))
    return "failed" if status == "ok" and not job.succeeded else status


def print_sweep_table(jobs: Sequence[SweepJob]) -> None:
    """Print the table and where the jobs' files are."""
    if jobs:
        console = wide_console()
        console.print(sweep_table(jobs))
        console.print(f"runs: {jobs[0].directory.parent}", soft_wrap=True, highlight=False)


def wide_console() -> Console:
    """A console as wide as the terminal, or wide enough for tables where the output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)
