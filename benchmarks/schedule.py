"""Schedule efficiency of the plans that loaders make, on four laws of lengths: simulated ranks, no processes.

    python benchmarks/schedule.py

`odb-simulate` does the work; the definitions are those of the README.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from measuring import table
from samples import SCHEDULE_L_MAX, SCHEDULE_LAWS, schedule_lengths

from odb_lightning.simulate import simulate

ROWS = ("matched", "paper", "gmt", "standard")


def simulated_rows(overrides: list[str], lengths_file: Path | None = None) -> dict[str, dict[str, Any]]:
    """What `odb-simulate` finds for one l_max, by `ROWS`."""
    with initialize_config_module("odb_lightning.conf", version_base="1.3"):
        cfg = compose("simulate", overrides=overrides)
    if lengths_file is not None:
        cfg.lengths.path = str(lengths_file)
    return {row["alignment"] or row["loader"]: row for row in simulate(cfg).rows}


def measure(num_samples: int, seeds: list[int], world_size: int) -> list[dict[str, Any]]:
    """For each law and row, the figures of each seed."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for law in SCHEDULE_LAWS:
            by_row: dict[str, list[dict[str, Any]]] = {name: [] for name in ROWS}
            for seed in seeds:
                file = Path(folder) / "lengths.txt"
                file.write_text("\n".join(map(str, schedule_lengths(law, num_samples, seed).tolist())))
                overrides = ["lengths=file", f"l_max={SCHEDULE_L_MAX}", f"odb.l_max={SCHEDULE_L_MAX}"]
                overrides += [f"world_size={world_size}", f"odb.seed={seed}"]
                for name, row in simulated_rows(overrides, file).items():
                    by_row[name].append(row)
            found += [{"law": law, "row": name, "seeds": by_row[name]} for name in ROWS]
            print(f"{law}: done", file=sys.stderr, flush=True)
    return found


def _over_seeds(rows: list[dict[str, Any]], key: str, form: str, least: bool = False) -> str:
    values = [row[key] for row in rows]
    if None in values:
        return "-"
    text = format(statistics.mean(values), form)
    return f"{text} ({format(min(values), form)})" if least else text


def page(found: list[dict[str, Any]]) -> str:
    headings = ["lengths", "loader", "schedule efficiency", "bound", "budget fill", "steps", "samples a step", "padding"]
    headings += ["lock-step", "idle steps", "rounds", "length~step", "neighbours"]
    rows = []
    for cell in found:
        seeds = cell["seeds"]
        row = [cell["law"], f"ODB, {cell['row']}" if cell["row"] in ("matched", "paper") else cell["row"]]
        row.append(_over_seeds(seeds, "schedule_efficiency", ".4f", least=True))
        row.append(_over_seeds(seeds, "schedule_bound", ".4f"))
        row.append(_over_seeds(seeds, "budget_fill", ".4f", least=True))
        row += [_over_seeds(seeds, "steps", ",.0f"), _over_seeds(seeds, "samples_per_step", ".1f")]
        row += [_over_seeds(seeds, key, ".1%") for key in ("padding", "lockstep_efficiency")]
        row += [_over_seeds(seeds, key, ",.0f") for key in ("idle_steps", "rounds")]
        row += [_over_seeds(seeds, key, "+.3f") for key in ("length_step_correlation", "neighbour_correlation")]
        rows.append(row)
    return table(headings, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-samples", type=int, default=80_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--json", type=Path, help="a file for the raw figures")
    options = parser.parse_args()
    found = measure(options.num_samples, options.seeds, options.world_size)
    print(f"{options.num_samples:,} lengths, {options.world_size} ranks, buffer 1024, L_max {SCHEDULE_L_MAX:,}.", end=" ")
    print(f"Means over the seeds {', '.join(map(str, options.seeds))}; in brackets the least.\n")
    print(page(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
