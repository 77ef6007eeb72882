"""Plots of a results folder: python benchmarks/plots.py FOLDER. Needs matplotlib alone."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_COLOURS = {"matched": "#1b6ca8", "paper": "#e08e45", "gmt": "#8a8a8a", "standard": "#cfcfcf"}
_TICKS = (0.5, 1, 2, 5, 10, 20)
_OTHERS = ("plain", "arrays", "odb-0.1.2", "bucketing", "group-by-length")


def plot_ratios(cells: list[dict[str, Any]], file: Path) -> None:
    """A bar for the median, a dot for each turn; a logarithmic axis."""
    bars = []
    for cell in cells:
        what = f"CV {cell['law']}" if cell["kind"] == "tokens" else cell["kind"]
        for other in _OTHERS:
            turns = cell["turns"].get(other, [None])
            if None in turns:
                continue
            mine = [turn["samples_per_second"] for turn in cell["turns"]["odb"]]
            each = [one / turn["samples_per_second"] for one, turn in zip(mine, turns, strict=True)]
            bars.append((f"{what}, {cell['ranks']} x {cell['workers']}: {other}", each))
    figure, axes = plt.subplots(figsize=(8, 1 + 0.22 * len(bars)))
    for row, (_, each) in enumerate(bars):
        axes.barh(row, statistics.median(each) - 1, left=1, color="#1b6ca8", height=0.7)
        axes.plot(each, [row] * len(each), "k.", markersize=3)
    axes.axvline(1, color="k", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks(_TICKS, list(map(str, _TICKS)))
    axes.minorticks_off()
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("samples/s of ODB over that of the loader named (ranks x workers)")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def plot_schedules(cells: list[dict[str, Any]], file: Path) -> None:
    """Schedule efficiency by law, the mean over seeds."""
    laws = list(dict.fromkeys(cell["law"] for cell in cells))
    figure, axes = plt.subplots(figsize=(8, 3.5))
    for place, (name, colour) in enumerate(_COLOURS.items()):
        rows = {cell["law"]: cell["seeds"] for cell in cells if cell["row"] == name}
        heights = [statistics.mean(row["schedule_efficiency"] for row in rows[law]) for law in laws]
        bars = axes.bar([number + 0.2 * (place - 1.5) for number in range(len(laws))], heights, 0.19, label=name, color=colour)
        axes.bar_label(bars, [f"{height:.3f}" for height in heights], fontsize=6)
    axes.set_xticks(range(len(laws)), laws)
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("schedule efficiency")
    axes.legend(ncols=4, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


_LOADERS = {
    "ours": ("odb_lightning", "token", "32-true", "#1b6ca8"),
    "ours, float64": ("odb_lightning", "token", "64-true", "#7fb3d5"),
    "0.1.2, exact": ("odb-0.1.2", "exact", "32-true", "#c0392b"),
    "0.1.2, approx": ("odb-0.1.2", "approx", "32-true", "#e08e45"),
    "ours, no scaling": ("odb_lightning", "none", "32-true", "#8a8a8a"),
}


def plot_gradients(cells: list[dict[str, Any]], file: Path) -> None:
    """A dot for each update, on a logarithmic axis."""
    places = list(dict.fromkeys((cell["data"], cell["shards"], cell["k"]) for cell in cells))
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.45 * len(places)))
    for line, (name, (*key, colour)) in enumerate(_LOADERS.items()):
        points = [
            (error, places.index((cell["data"], cell["shards"], cell["k"])) + 0.15 * (line - 2))
            for cell in cells
            if [cell["loader"], cell["mode"], cell["precision"]] == key
            for error in cell["errors"]
            if error
        ]
        if points:
            axes.plot(*zip(*points, strict=True), ".", color=colour, markersize=4, label=name)
    axes.set_xscale("log")
    axes.set_yticks(range(len(places)), [f"{name}\n{shards} shards, k = {k}" for name, shards, k in places], fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", linewidth=0.3)
    axes.set_xlabel("relative error of an update's gradient")
    axes.legend(ncols=3, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def plot_curves(curves: list[dict[str, Any]], file: Path) -> None:
    """The losses of each fit above, their distances from the reference below."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True)
    reference = curves[-1]["losses"]
    above.plot(reference, "k", linewidth=3, alpha=0.3, label="reference")
    for curve in curves[:-1]:
        label, is_double = f"{curve['label']}, float{curve['precision'][:2]}", curve["precision"] == "64-true"
        above.plot(curve["losses"], linewidth=0.8, linestyle="--" if is_double else "-", label=label)
        apart = [abs(mine - theirs) or None for mine, theirs in zip(curve["losses"], reference, strict=True)]
        below.plot(apart, ".-", linewidth=0.6, markersize=3, label=label)
    above.set_ylabel("training loss of an update")
    above.legend(ncols=3, fontsize=7, frameon=False)
    below.set_yscale("log")
    below.set_ylabel("distance from the reference")
    below.set_xlabel("update")
    below.grid(axis="y", linewidth=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main(folder: Path) -> None:
    cells = [cell for file in sorted(folder.glob("rate*.json")) for cell in json.loads(file.read_text())]
    if cells:
        plot_ratios(cells, folder / "ratios.png")
    if (folder / "schedule.json").exists():
        plot_schedules(json.loads((folder / "schedule.json").read_text()), folder / "schedule.png")
    if (folder / "numerics.json").exists():
        figures = json.loads((folder / "numerics.json").read_text())
        plot_gradients(figures["gradients"], folder / "gradients.png")
        plot_curves(figures["curves"], folder / "curves.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
