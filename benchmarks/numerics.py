"""What gradients and losses come to, on a page with its date: about 15 minutes on two cores.

    python benchmarks/numerics.py --peers peers/bin/python       # --quick: two minutes, to see whether everything runs

writes `numerics.md`, the raw figures as JSON and, where there is matplotlib, plots into benchmarks/results/<date>. Without
--peers the authors' package is left out. Where ODB_TEST_DATA names a folder with `lf_alpaca_en_demo.json` (LLaMA-Factory), that
file is used besides the standard library.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measuring import table
from numerics_fits import BUFFER_SIZE, L_MAX, reference_curve, shards_of
from numerics_reference import Samples, with_a_small_vocabulary
from rank_processes import run_ranks
from run import load_line, machine, plot

from odb_lightning.data import sft_chat_datasets, stdlib_chat_datasets
from odb_lightning.plan import group_window

_HERE = Path(__file__).resolve().parent
_VERSIONS = (
    "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in ('torch', 'online-dynamic-batching')), sep=', ')"
)
_SFT_FILE = "lf_alpaca_en_demo.json"
_FIT_SECONDS, _PEER_SECONDS = 900.0, 240.0
RANKS, PER_UPDATE = 2, 4
SHARDS, ACCUMULATE, PEER_MODES = ("equal", "unequal"), (1, 4), ("exact", "approx")
COLUMNS = {
    "ours": ("odb_lightning", "token", "32-true"),
    "ours, float64": ("odb_lightning", "token", "64-true"),
    "0.1.2, exact": ("odb-0.1.2", "exact", "32-true"),
    "0.1.2, approx": ("odb-0.1.2", "approx", "32-true"),
    "ours, no scaling": ("odb_lightning", "none", "32-true"),
}

GRADIENTS = """\
The gradient of each update of an epoch on two ranks, against that of the mean over all its targets, computed in float64 by one
process, a sample at a time and without padding, at the same weights: the norm of the difference over the norm. Mean over the
updates, and the worst. `ours` is a fit under Lightning's trainer with `ODBDDPStrategy`. `0.1.2` is the authors' package
(`online-dynamic-batching`) with its two token modes, used as documented, in a loop of its own; its gradients are averaged over
the ranks by hand, since it would leave ranks of unequal shards waiting for each other, and divided by the micro-batches that a
window really has. Each loader forms its own batches: L_max {l_max}, window {window}. `no scaling` is ours with
`loss_scaling="none"`, plain DDP's mean of means.

A causal transformer of one block, SGD with momentum; samples of at most {cutoff} tokens. `targets`: the share of tokens that
are; the prompts are masked but in the last rows. `unequal`: one rank has three quarters of the samples, and the other is idle
for many steps, first for some of a window, then for whole windows. Left out are updates without any target on any rank:
{left_out}.

0.1.2 weighs ranks by input tokens, not by targets, and micro-batches of a window alike. That is nearly right where every token
is a target and an update has one micro-batch; and, as anything is, in an update of one batch on one rank, of which unequal
shards make many."""

CURVES = """\
The same updates on one, two and four ranks, so the same training. {groups} groups of {samples} samples, formed by
`group_window` within L_max {l_max}, are given to the loader one a step, {per_update} an update: to one rank in {per_update}
micro-batches, to two in {half}, to four in one. The last update of an epoch has two groups, so that its window is short, or two
of four ranks are idle. `one batch` takes the whole update as one padded batch. {epochs} epochs with AdamW, masked prompts, the
standard library. Which samples each update had was compared between the fits{same}.

The loss of an update is the mean over its targets on all ranks. Differences are the largest of any update from one rank's fit
in the same precision, and from the float64 reference, a loop without loader, trainer, ranks or padding; of the weights, the
largest of any in the end (AdamW takes rounding for a gradient where a weight has hardly any, so in float32 it is larger)."""


@dataclass
class Findings:
    """What there is to tell so far."""

    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    gradients: list[dict[str, Any]] = field(default_factory=list)
    curves: list[dict[str, Any]] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def data_sets(is_quick: bool) -> tuple[dict[str, Samples], int]:
    """By name; and the cutoff."""
    cutoff, limit = (96, 100) if is_quick else (256, 360)
    found = {"stdlib": stdlib_chat_datasets(cutoff=cutoff, limit=limit)[0]}
    file = Path(os.environ.get("ODB_TEST_DATA", "")) / _SFT_FILE
    if file.is_file():
        found[_SFT_FILE] = sft_chat_datasets(file, val_fraction=0, cutoff=cutoff, limit=limit)[0]
    samples = {name: with_a_small_vocabulary(data[i] for i in range(len(data))) for name, data in found.items()}
    return samples | {"stdlib, all targets": samples["stdlib"].unmasked()}, cutoff


def fit_cells(name: str, is_quick: bool) -> list[dict[str, Any]]:
    """The fits of ours on a data set. Those that are not masked are a control."""
    is_control = name.endswith("all targets")
    kinds = [("32-true", "token")]
    if not is_control and not is_quick:
        kinds += [("64-true", "token"), ("32-true", "none")]
    return [
        {"shards": shards, "accumulate": accumulate, "precision": precision, "loss_scaling": scaling}
        for shards in (SHARDS[:1] if is_control else SHARDS)
        for accumulate in ACCUMULATE
        for precision, scaling in kinds
    ]


def measure_gradients(found: Findings, sets: dict[str, Samples], options: argparse.Namespace, folder: Path) -> None:
    for name, samples in sets.items():
        file = folder / "samples.pt"
        samples.save(file)
        found.data[name] = {"samples": len(samples), "targets": samples.supervised_share}
        cells = fit_cells(name, options.quick)
        command = [sys.executable, str(_HERE / "numerics_fits.py"), "gradients", "--samples", str(file)]
        results = run(found, f"ours, {name}", [*command, "--cells", json.dumps(cells)], RANKS, _FIT_SECONDS, folder)
        found.gradients += [{"data": name, **cell} for cell in results or []]
        if not options.peers:
            continue
        for shards, accumulate in dict.fromkeys((cell["shards"], cell["accumulate"]) for cell in cells):
            torch.save(shards_of(shards, len(samples), RANKS), folder / "shards.pt")
            for mode in PEER_MODES[: 1 if options.quick else None]:
                command = [options.peers, str(_HERE / "numerics_peer.py"), "--samples", str(file)]
                command += ["--shards", str(folder / "shards.pt"), "--mode", mode, "--accumulate", str(accumulate)]
                command += ["--l-max", str(L_MAX), "--window", str(BUFFER_SIZE)]
                what = f"0.1.2, {mode}, {name}, {shards} shards, k = {accumulate}"
                result = run(found, what, command, RANKS, _PEER_SECONDS, folder)
                found.gradients += [{"data": name, "shards": shards, **result}] if result else []


def run(found: Findings, what: str, command: Sequence[str], world_size: int, seconds: float, folder: Path) -> Any:
    """What rank 0 saved, or None with a fault."""
    begin, out = time.monotonic(), folder / "found.pt"
    out.unlink(missing_ok=True)
    fault = run_ranks([*command, "--out", str(out)], world_size, seconds)
    print(f"== {what}: {time.monotonic() - begin:.0f} s {fault}", file=sys.stderr, flush=True)
    if fault:
        found.faults.append(f"{what}: {fault}")
        return None
    return torch.load(out)


def groups_of(samples: Samples) -> list[list[int]]:
    """Groups within the budget, of neighbours in a shuffled order; two are left for the last update."""
    order = shards_of("equal", len(samples), 1)[0]
    groups = []
    for begin in range(0, len(order), BUFFER_SIZE):
        window = order[begin : begin + BUFFER_SIZE]
        groups += [[window[i] for i in group] for group in group_window([samples.lengths[i] for i in window], L_MAX)]
    random.Random(0).shuffle(groups)
    return groups[: len(groups) - (len(groups) - PER_UPDATE // 2) % PER_UPDATE]


def measure_curves(found: Findings, samples: Samples, options: argparse.Namespace, folder: Path) -> None:
    groups, epochs = groups_of(samples), 1 if options.quick else 5
    updates = [groups[begin : begin + PER_UPDATE] for begin in range(0, len(groups), PER_UPDATE)]
    whole = [[index for group in update for index in group] for update in updates]
    found.plan = {"groups": len(groups), "samples": sum(map(len, groups)), "epochs": epochs}
    samples.save(folder / "samples.pt")
    arrangements = [(f"W = {ranks}", ranks, groups, PER_UPDATE) for ranks in (1, 2, 4)] + [("W = 1, one batch", 1, whole, 1)]
    for label, world_size, given, per_update in arrangements:
        cells = [
            {"groups": given, "per_update": per_update, "max_epochs": epochs, "precision": precision}
            for precision in ("32-true", "64-true")
        ]
        command = [sys.executable, str(_HERE / "numerics_fits.py"), "curves", "--samples", str(folder / "samples.pt")]
        results = run(found, f"curves, {label}", [*command, "--cells", json.dumps(cells)], world_size, _FIT_SECONDS, folder)
        found.curves += [{"label": label, **cell} for cell in results or []]
    reference = {"label": "reference", "precision": "64-true", **reference_curve(samples, groups, PER_UPDATE, epochs)}
    compare(found, [*found.curves, reference])


def compare(found: Findings, curves: list[dict[str, Any]]) -> None:
    """Adds the differences from one rank's fit and from the reference to each curve, and takes the weights out."""
    reference = curves[-1]
    alone = {curve["precision"]: curve for curve in curves if curve["label"] == "W = 1"}
    for curve in curves[:-1]:
        for name, other in (("alone", alone.get(curve["precision"])), ("reference", reference)):
            if other is not None:
                steps = zip(curve["losses"], other["losses"], strict=True)
                curve[f"loss_{name}"] = max(abs(mine - theirs) for mine, theirs in steps)
                curve[f"weights_{name}"] = float((curve["weights"] - other["weights"]).abs().max())
    found.plan["same"] = len({json.dumps(curve["samples"]) for curve in curves[:-1]}) == 1
    if not found.plan["same"]:
        found.faults.append("curves: the fits had different samples in their updates")
    for curve in curves:
        del curve["weights"]
        curve.pop("samples", None)
    found.curves = curves


def gradient_table(gradients: Iterable[dict[str, Any]], data: dict[str, dict[str, Any]]) -> str:
    cells: dict[tuple[str, str, int], dict[tuple[str, str, str], dict[str, Any]]] = {}
    for cell in gradients:
        row = cells.setdefault((cell["data"], cell["shards"], cell["k"]), {})
        row[cell["loader"], cell["mode"], cell["precision"]] = cell
    shown = {name: key for name, key in COLUMNS.items() if any(key in row for row in cells.values())}
    rows = []
    for (name, shards, k), row in cells.items():
        ours, theirs = row.get(COLUMNS["ours"]), row.get(COLUMNS["0.1.2, exact"])
        rows.append([name, f"{data[name]['targets']:.0%}", shards, k])
        for figure in (_num_updates, lambda cell: cell["idle_steps"]):
            rows[-1].append(" / ".join(str(figure(cell)) for cell in (ours, theirs) if cell))
        rows[-1] += [_errors(row.get(key)) for key in shown.values()]
    counts = "ours / 0.1.2" if COLUMNS["0.1.2, exact"] in shown.values() else "ours"
    headings = ["data", "targets", "shards", "k", f"updates, {counts}", f"idle steps, {counts}"]
    return table([*headings, *(f"{name}: mean, worst" for name in shown)], rows)


def _num_updates(cell: dict[str, Any]) -> int:
    return sum(error is not None for error in cell["errors"])


def _errors(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    errors = [error for error in cell["errors"] if error is not None]
    return f"{sum(errors) / len(errors):.2g}, **{max(errors):.2g}**"


def curve_table(curves: Iterable[dict[str, Any]]) -> str:
    rows = []
    for curve in curves:
        figures = [f"{curve[key]:.1e}" if key in curve else "-" for key in _DIFFERENCES]
        row = [curve["label"], curve.get("k", "-"), curve["precision"].replace("-true", ""), curve.get("idle_steps", "-")]
        rows.append([*row, len(curve["losses"]), f"{curve['losses'][0]:.6f}", f"{curve['losses'][-1]:.6f}", *figures])
    headings = ["fit", "k", "float", "idle steps", "updates", "first loss", "last loss"]
    return table([*headings, "loss from W = 1", "loss from reference", "weights from W = 1", "weights from reference"], rows)


_DIFFERENCES = ("loss_alone", "loss_reference", "weights_alone", "weights_reference")


def write_page(folder: Path, options: argparse.Namespace, lines: Sequence[str], found: Findings, cutoff: int) -> Path:
    """`numerics.md`, of what there is so far."""
    command = "python benchmarks/numerics.py" + " --peers peers/bin/python" * bool(options.peers) + " --quick" * options.quick
    text = [f"# Numerics of odb_lightning, {options.date}\n"]
    if options.quick:
        text.append("**A quick run, to see whether everything runs: its figures mean little.**\n")
    text += [*lines, "", f"    {command}", ""]
    text += [f"**{fault}.**\n" for fault in found.faults]
    left_out = sum(cell["errors"].count(None) for cell in found.gradients) or "none"
    text += ["## Gradients\n", GRADIENTS.format(l_max=L_MAX, window=BUFFER_SIZE, cutoff=cutoff, left_out=left_out), ""]
    if not options.peers:
        text.append("**Without --peers: the authors' package was left out.**\n")
    text += _picture(folder, "gradients.png", "Errors of the gradients")
    text += [gradient_table(found.gradients, found.data)]
    if found.plan:
        same = ": the same" if found.plan.get("same") else ""
        text += ["## Loss curves\n"]
        text += [CURVES.format(l_max=L_MAX, per_update=PER_UPDATE, half=PER_UPDATE // 2, **(found.plan | {"same": same})), ""]
        text += [*_picture(folder, "curves.png", "Loss curves and their differences"), curve_table(found.curves)]
    page = folder / "numerics.md"
    page.write_text("\n".join(text))
    return page


def _picture(folder: Path, name: str, title: str) -> list[str]:
    return [f"![{title}]({name})\n"] if (folder / name).exists() else []


def peer_versions(python: str) -> str:
    try:
        done = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder; by default benchmarks/results/<date>")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see whether everything runs")
    parser.add_argument("--peers", metavar="PYTHON", help="the interpreter of the environment with the authors' package")
    options = parser.parse_args(arguments)
    options.date = datetime.date.today().isoformat()
    if options.peers:
        options.peers = os.path.abspath(options.peers)  # not resolved: a link to the base interpreter is what makes it a venv's
        if not peer_versions(options.peers):
            parser.error(f"--peers {options.peers} does not have online-dynamic-batching: see benchmarks/README.md")
    return options


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that ranks end, too
    torch.set_num_threads(1)
    folder = (options.out or _HERE / "results" / options.date).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lines = [*machine(), load_line("at the beginning")]
    if options.peers:
        lines.insert(2, f"* Other packages: {peer_versions(options.peers)}")
    begin, found = time.monotonic(), Findings()
    sets, cutoff = data_sets(options.quick)
    with tempfile.TemporaryDirectory() as scratch:
        measure_gradients(found, sets, options, Path(scratch))
        measure_curves(found, sets["stdlib"], options, Path(scratch))
    figures = {"gradients": found.gradients, "curves": found.curves}
    (folder / "numerics.json").write_text(json.dumps(figures))
    plot(folder, options)
    lines.append(f"* {(time.monotonic() - begin) / 60:.1f} minutes")
    print(write_page(folder, options, lines, found, cutoff))
    return int(bool(found.faults))


if __name__ == "__main__":
    raise SystemExit(main())
