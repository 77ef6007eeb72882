"""What `odb-simulate` prints: the lengths in a line, a table of loaders, and what they come to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from odb_lightning.sweep_table import wide_console

if TYPE_CHECKING:
    from odb_lightning.simulate import Simulation

_COLUMNS = (
    ("steps", "steps", "{:,}"),
    ("samples", "samples_per_step", "{:.1f}"),
    ("padding", "padding", "{:.1%}"),
    ("fill", "budget_fill", "{:.1%}"),
    ("lock-step", "lockstep_efficiency", "{:.1%}"),
    ("schedule", "schedule_efficiency", "{:.1%}"),
    ("idle", "idle_steps", "{:,}"),
    ("rounds", "rounds", "{:,}"),
    ("B/round", "bytes_per_round", "{:,.0f}"),
    ("len~step", "length_step_correlation", "{:+.2f}"),
    ("next", "neighbour_correlation", "{:+.2f}"),
)


def print_simulation(found: Simulation, console: Console | None = None) -> None:
    """Print all of it to `console`, by default stdout."""
    console = console or wide_console()
    for text in (_lengths_line(found.lengths), simulation_table(found.rows), *map(_verdict, _by_l_max(found.rows))):
        console.print(text, highlight=False, soft_wrap=isinstance(text, str))


def simulation_table(rows: list[dict[str, Any]]) -> Table:
    """A row for each l_max and loader."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("l_max", justify="right")
    table.add_column("loader")
    for heading, _, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    for number, row in enumerate(rows):
        is_last = number + 1 == len(rows) or rows[number + 1]["l_max"] != row["l_max"]
        cells = ("-" if row[key] is None else form.format(row[key]) for _, key, form in _COLUMNS)
        table.add_row(f"{row['l_max']:,}", _name(row), *cells, end_section=is_last)
    return table


def _name(row: dict[str, Any]) -> str:
    if row["loader"] == "odb":
        return f"odb, {row['alignment']}" + (" *" if row["default"] else "")
    return f"standard, {row['batch_size']:,} each" if row["loader"] == "standard" else "gmt oracle"


def _lengths_line(lengths: dict[str, Any]) -> str:
    percentiles = " / ".join(f"{lengths[name]:,}" for name in ("min", "p5", "p50", "p95", "max"))
    variation = "-" if lengths["cv"] is None else f"{lengths['cv']:.2f}"
    return f"{lengths['n']:,} lengths: mean {lengths['mean']:,.1f}, CV {variation}, min / p5 / p50 / p95 / max {percentiles}"


def _by_l_max(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [[row for row in rows if row["l_max"] == l_max] for l_max in dict.fromkeys(row["l_max"] for row in rows)]


def _verdict(rows: list[dict[str, Any]]) -> str:
    """How the default ODB row compares with fixed batches."""
    (odb,) = (row for row in rows if row["default"])
    (standard,) = (row for row in rows if row["loader"] == "standard")
    steps = odb["steps"] / standard["steps"]
    work = standard["schedule_efficiency"] / odb["schedule_efficiency"]
    text = (
        f"l_max {odb['l_max']:,}: f_s {odb['f_s']:.1%}; against standard, odb * makes {steps:.2f}x the steps and {work:.2f}x "
        "the padded tokens that steps wait for"
    )
    if odb["schedule_bound"] is not None:
        text += f"; no schedule of these shards passes {odb['schedule_bound']:.1%}"
    if odb["over_budget"] or odb["dropped"]:
        text += f"; samples over the budget, each alone: {odb['over_budget']:,}, dropped: {odb['dropped']:,}"
    return text
