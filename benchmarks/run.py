"""All speed figures, from one command, on a page with its date: about 15 minutes on two cores, which should have nothing else
to do.

    python benchmarks/run.py --peers peers/bin/python       # --quick: two minutes, to see whether everything runs

writes `page.md`, the raw figures as JSON and, where there is matplotlib, plots into benchmarks/results/<date>. Each part can be
run alone: the page says its command. Other packages need an environment of their own; without --peers they are left out:

    python -m venv peers
    peers/bin/pip install torch==2.13.0 online-dynamic-batching==0.1.2 lhotse urllib3 transformers matplotlib
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from measuring import end_all

_HERE = Path(__file__).resolve().parent
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_PACKAGES = ("odb-lightning", "torch", "numpy", "lightning")
_PEER_PACKAGES = ("torch", "online-dynamic-batching", "lhotse", "transformers")
_VERSIONS = "import importlib.metadata as m, sys; print(*(f'{name} {m.version(name)}' for name in sys.argv[1:]), sep=', ')"


@dataclass(frozen=True)
class Part:
    """A script with its arguments, run in a process of its own (two ranks: under torchrun)."""

    name: str
    script: str
    ranks: int = 1
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    """Instead, for a quick run."""
    takes_peers: bool = False
    seconds: float = 900.0
    """Limit."""


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    parts: tuple[Part, ...]
    plot: str | None = None


SECTIONS = {
    "rate": Section(
        "The loader alone",
        """\
20,000 samples of three int64 tensors, mean length 500; lengths lognormal with the CV given, or (bi0.8) of two kinds, CV
about 0.8. L_max 8192, window 1024; other loaders have batches of 16 where they have a fixed batch. images: 2,000 float32
images of 1 MB, stacked. objects: lists, strings and dictionaries. `plain` is a torch `DataLoader` with the same samples,
collate and workers; `arrays` is the same with a collate that gives numpy arrays. Of other packages, `odb-0.1.2` is the
authors' (its collate process counts as a worker; fewer samples); `bucketing` (lhotse's `DynamicBucketingSampler`) and
`group-by-length` (transformers) are given all lengths beforehand.""",
        (
            Part(
                "rate-1-rank",
                "loader_rate.py",
                quick=("--laws", "0.5", "--workers", "1", "--turns", "1", "--num-samples", "4000"),
            ),
            Part(
                "rate-2-ranks",
                "loader_rate.py",
                ranks=2,
                quick=("--laws", "0.5", "--workers", "1", "--turns", "1", "--num-samples", "4000"),
            ),
            Part(
                "rate-other-samples",
                "loader_rate.py",
                arguments=("--kinds", "images", "objects", "--workers", "1"),
                quick=("--turns", "1", "--num-samples", "600"),
            ),
            Part(
                "rate-peers-1-rank",
                "loader_rate.py",
                arguments=("--laws", "0.5", "bi0.8", "--workers", "1", "--peer-samples", "4000"),
                quick=("--laws", "0.5", "--turns", "1", "--num-samples", "2000", "--peer-samples", "1000"),
                takes_peers=True,
            ),
            Part(
                "rate-peers-2-ranks",
                "loader_rate.py",
                ranks=2,
                arguments=("--laws", "0.5", "--workers", "1", "--peer-samples", "4000"),
                quick=("--turns", "1", "--num-samples", "2000", "--peer-samples", "1000", "--peer-names", "odb-0.1.2"),
                takes_peers=True,
            ),
        ),
        "ratios.png",
    ),
    "stalls": Section(
        "Start, waits and memory",
        """\
CV 0.5, L_max 8192, window 1024. The loop sleeps for the time of a step at each batch. Waiting is measured from outside,
after the first batch. `first window`: samples that the collate process had observed when the first batch came (it may look
one ahead); `first batch reaches` to this place of the sampler's order. In flight: samples fetched by the workers that the
loop has not got, the most at any batch; the formula is that in the docstring of `ODBDataLoader`, each of its 16 + 8 batches
taken to be as large as the largest. Several numbers: of the ranks. `odb-0.1.2` runs over fewer samples.""",
        (
            Part(
                "stalls-1-rank",
                "stalls.py",
                arguments=("--peer-samples", "2000"),
                quick=("--num-samples", "1200", "--step-ms", "10", "--workers", "1", "--peer-samples", "600"),
                takes_peers=True,
            ),
            Part(
                "stalls-2-ranks",
                "stalls.py",
                ranks=2,
                arguments=("--step-ms", "50", "--workers", "1"),
                quick=("--num-samples", "2000", "--step-ms", "10"),
            ),
        ),
    ),
    "schedule": Section(
        "Schedules",
        """\
The share of real tokens in what ranks compute or wait for, by `odb-simulate`; it counts only beside the budget fill.
`bound`: no schedule of these shards passes it, as the rank with most tokens has to work off its own. `gmt` deals out
batches made of all lengths, sorted, which no online loader has; `standard` has the largest fixed batch that keeps within
L_max. The last two columns are correlations, of a sample's length with its step and of mean lengths of neighbouring steps:
0 after a shuffle. CV 0.29: mean 600; CV 0.48: mean 1200; bimodal: half each around 120 and 1000; heavy: mean 1800, CV
0.94, cut at L_max.""",
        (Part("schedule", "schedule.py", quick=("--num-samples", "8000", "--seeds", "0")),),
        "schedule.png",
    ),
    "exchange": Section(
        "The exchange",
        """\
Ranks make one reduction a round for the report, and one for the sums of each 16 steps. The times are from call to result,
with waiting for the others: where there are more ranks than cores, they are the scheduler's.""",
        (Part("exchange", "exchange.py", quick=("--rounds", "50", "--simulated-ranks", "2", "8")),),
    ),
    "stages": Section(
        "Where the time goes",
        """\
Each stage on a sample's way in one process, without waiting: what processes cost besides, the table of processor time
above has. CV 0.5 for tokens.

What can't go, of a sample's time (tokens): the data set's own work and the user's collate, which every loader has; seeding
three generators, without which random transforms would depend on the number of workers (most of it is the generators' own
initialisation); planning and counting targets, which are what the loader is for. These are more than half of all stages. The
rest is transport over two hops (worker, collate process, training process), where a fixed batch has one: a window can only
be sorted where all of it can be seen. It is copied once into shared memory per hop, and once out of it, so that nothing in
the user's hands can be overwritten. A plain loader passes a file descriptor per tensor, which costs more than both hops. The
arrays control pickles each batch through one pipe: it costs less than two hops do, and more the more padding there is.

So, where cores are idle, the loader is about twice as fast as the plain one; where two ranks share two cores (four busy
processes and more), what counts is the sum over all processes, and the ratio falls to the ratio of these sums. Images of a
megabyte cost what copying a megabyte costs, per hop.""",
        (Part("stages", "stages.py", quick=("--repeats", "1", "--num-samples", "256")),),
    ),
}

HOW_TO_READ = """\
* Ratios count, single rates say little: the loaders take turns in one run, and a ratio is of two passes next to each other.
* Processor time per sample varies less than time. Where all cores are busy (two ranks with workers on two cores) it is what
  decides.
* A rate of the loader alone matters where it is near what training takes. Otherwise the share of time waited and the schedule
  efficiency do.
"""


def arguments_of(part: Part, is_quick: bool) -> list[str]:
    """Those of a quick run take the place of others for the same option."""
    words = dict[str, list[str]]()
    for word in (*part.arguments, *(part.quick if is_quick else ())):
        if word.startswith("--"):
            values = words[word] = list[str]()
        else:
            values.append(word)
    return [word for option, values in words.items() for word in (option, *values)]


def command_of(part: Part, options: argparse.Namespace, folder: Path) -> list[str]:
    command = [sys.executable, *(_TORCHRUN if part.ranks == 2 else ()), str(_HERE / part.script)]
    command += arguments_of(part, options.quick)
    if part.takes_peers and options.peers:
        command += ["--peers", options.peers]
    return [*command, "--json", str(folder / f"{part.name}.json")]


def shown(part: Part, options: argparse.Namespace) -> str:
    """The command as a reader would type it."""
    words = ["torchrun", *_TORCHRUN[2:]] if part.ranks == 2 else ["python"]
    words += [f"benchmarks/{part.script}", *arguments_of(part, options.quick)]
    if part.takes_peers and options.peers:
        words += ["--peers", "peers/bin/python"]
    return shlex.join(words)


@dataclass
class Result:
    part: Part
    output: str = ""
    fault: str = ""
    seconds: float = field(default=0.0)


def run_part(part: Part, command: Sequence[str]) -> Result:
    """Within its limit; all of its processes end with it."""
    begin = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=_HERE.parent, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        output = fault = ""
        try:
            output, _ = process.communicate(timeout=part.seconds)
            if process.returncode:
                fault = f"failed with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            end_all(process)
            fault = f"did not end within {part.seconds:g} seconds"
        except BaseException:
            end_all(process)
            raise
    return Result(part, output, fault, time.monotonic() - begin)


def _words(command: Sequence[str]) -> str:
    """What a command prints, or nothing."""
    try:
        return subprocess.run(command, cwd=_HERE.parent, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def peer_versions(python: str) -> str:
    return _words([python, "-c", _VERSIONS, *_PEER_PACKAGES])


def machine() -> list[str]:
    """Lines on the machine and the versions."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [
            line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    commit = _words(["git", "rev-parse", "--short", "HEAD"]) or "unknown"
    changed = " with changes" if _words(["git", "status", "--porcelain", "--untracked-files=no"]) else ""
    return [
        f"* Machine: {model}, {cores} cores, {memory:.0f} GB; {platform.system()} {platform.release()}",
        f"* Commit {commit}{changed}; Python {platform.python_version()}, {versions}",
    ]


def load_line(name: str) -> str:
    return f"* Load of the machine {name}: {', '.join(f'{load:.2f}' for load in os.getloadavg())} (1, 5, 15 minutes)"


def write_page(folder: Path, options: argparse.Namespace, lines: Sequence[str], results: dict[str, list[Result]]) -> Path:
    """`page.md`, of what there is so far."""
    text = [f"# Speed of odb_lightning, {options.date}\n", *lines, "", "## How to read\n", HOW_TO_READ]
    if options.quick:
        text.insert(1, "**A quick run, to see whether everything runs: its figures mean nothing.**\n")
    for name, found in results.items():
        section = SECTIONS[name]
        text += [f"## {section.title}\n", section.text, ""]
        if section.plot and (folder / section.plot).exists():
            text += [f"![{section.title}]({section.plot})\n"]
        for result in found:
            text += [f"    OMP_NUM_THREADS=1 {shown(result.part, options)}", ""]
            if result.fault:
                text += [f"**It {result.fault}.**\n"]
            text += [result.output.strip(), f"\n{result.seconds:.0f} seconds.\n"]
    page = folder / "page.md"
    page.write_text("\n".join(text))
    return page


def plot(folder: Path, options: argparse.Namespace) -> None:
    """With this interpreter's matplotlib, or the peers'."""
    for python in filter(None, (sys.executable, options.peers)):
        if _words([python, "-c", "import matplotlib; print('yes')"]):
            subprocess.run([python, str(_HERE / "plots.py"), str(folder)], timeout=120, check=False)
            return
    print("no plots: there is no matplotlib", file=sys.stderr)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder; by default benchmarks/results/<date>")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see whether everything runs")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--peers", metavar="PYTHON", help="the interpreter of the environment with the other packages")
    options = parser.parse_args(arguments)
    options.date = datetime.date.today().isoformat()
    if options.peers:
        options.peers = os.path.abspath(options.peers)  # not resolved: a link to the base interpreter is what makes it a venv's
        if not peer_versions(options.peers):
            parser.error(f"--peers {options.peers} does not have {', '.join(_PEER_PACKAGES)}: see --help")
    return options


def main() -> int:
    options = parse()
    folder = (options.out or _HERE / "results" / options.date).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lines = [*machine(), load_line("at the beginning")]
    if options.peers:
        lines.insert(2, f"* Other packages: {peer_versions(options.peers)}")
    begin, results = time.monotonic(), dict[str, list[Result]]()
    for name in options.only:
        results[name] = []
        for part in SECTIONS[name].parts:
            if part.name.startswith("rate-peers") and not options.peers:
                continue
            print(f"== {part.name}: {shown(part, options)}", file=sys.stderr, flush=True)
            result = run_part(part, command_of(part, options, folder))
            results[name].append(result)
            print(f"== {part.name}: {result.seconds:.0f} s {result.fault}", file=sys.stderr, flush=True)
            write_page(folder, options, lines, results)
    plot(folder, options)
    lines += [load_line("at the end"), f"* {(time.monotonic() - begin) / 60:.1f} minutes"]
    print(write_page(folder, options, lines, results))
    return int(any(result.fault for found in results.values() for result in found))


if __name__ == "__main__":
    raise SystemExit(main())
