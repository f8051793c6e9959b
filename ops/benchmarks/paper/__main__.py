"""`make paper`: repeat the evaluation of the PagedAttention paper (Kwon et al., SOSP'23) on this engine.

make paper                                     all experiments; minutes
make paper ARGS="--quick"                      all experiments, runs too short for good numbers, no beams in figure 14
make paper ARGS="--only memory,sharing"        some experiments
python -m quire.ops.benchmarks.paper --only batch --jobs 4 --seed 1

Prints tables with the paper's values for comparison, and writes paper.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from quire.ops.benchmarks.paper import blocks, memory, recovery, sharing, throughput
from quire.ops.benchmarks.paper.context import Context
from quire.ops.benchmarks.peers.machine import machine
from quire.ops.local.progress import Progress

RESULTS = Path(__file__).parents[1] / "results" / "paper"
PACKAGES = ("quire", "torch", "numpy")


class Experiment(NamedTuple):
    """One experiment. `run` returns results for the JSON, of which `table` makes a text."""

    run: Callable[[Context], dict[str, Any]]
    table: Callable[[dict[str, Any]], str]
    about: str


EXPERIMENTS = {
    "memory": Experiment(memory.run_memory, memory.memory_table, "figure 2: what the cache holds"),
    "batch": Experiment(memory.run_batch, memory.batch_table, "figure 13: requests that run at once"),
    "sharing": Experiment(sharing.run_sharing, sharing.sharing_table, "figure 15: blocks saved"),
    "blocks": Experiment(blocks.run_blocks, blocks.blocks_table, "figure 18: block size"),
    "recovery": Experiment(recovery.run_recovery, recovery.recovery_table, "figure 19: swap or recompute"),
    "throughput": Experiment(
        throughput.run_throughput, throughput.throughput_table, "figures 12, 14, 16, 17: latency by rate"
    ),
}


def main(argv: list[str] | None = None) -> int:
    names = "\n".join(f"  {name:<11} {experiment.about}" for name, experiment in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m quire.ops.benchmarks.paper",
        description=f"{__doc__}\nExperiments:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="NAMES", default=",".join(EXPERIMENTS), help="experiments, comma-separated")
    parser.add_argument("--quick", action="store_true", help="short runs, to see that all works")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes for simulations")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for paper.json")
    args = parser.parse_args(argv)
    chosen = args.only.split(",")
    if unknown := [name for name in chosen if name not in EXPERIMENTS]:
        parser.error(f"--only: {', '.join(unknown)} is not one of {', '.join(EXPERIMENTS)}")
    if args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}: it must be at least 1")
    args.out.mkdir(parents=True, exist_ok=True)
    progress = Progress(sys.stderr)
    try:
        with tempfile.TemporaryDirectory(prefix="quire-paper-") as folder:
            context = Context(args.quick, args.seed, args.jobs, Path(folder), progress)
            run([name for name in EXPERIMENTS if name in chosen], context, args.out)
    except KeyboardInterrupt:
        progress.say("interrupted; the experiments that had ended are written")
        return 130
    print(f"Written: {os.path.relpath(args.out / 'paper.json')}")
    return 0


def run(names: list[str], context: Context, folder: Path) -> None:
    """Run experiments in order. Print the table of each, and add its results to the report."""
    for index, name in enumerate(names):
        experiment = EXPERIMENTS[name]
        context.name = name
        started = time.monotonic()
        result = experiment.run(context)
        seconds = time.monotonic() - started
        result = {**stamp(context), "seconds": seconds, **result}
        write(name, result, folder / "paper.json")
        context.progress.say(f"{index + 1} of {len(names)}: {name}, {experiment.about}: {seconds:.0f} s")
        print(f"\n{experiment.table(result)}\n", flush=True)


def write(name: str, result: dict[str, Any], path: Path) -> None:
    """Replace one experiment in the report and keep all other experiments."""
    report = json.loads(path.read_text()) if path.exists() else {"experiments": {}}
    report["experiments"][name] = result
    path.write_text(json.dumps(report, indent=1) + "\n")


def stamp(context: Context) -> dict[str, Any]:
    """Return the time, the machine and the seed of a run, so that results can be compared."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "quick": context.quick,
        "seed": context.seed,
        "machine": machine() | {"load": os.getloadavg()[0]},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    }


if __name__ == "__main__":
    sys.exit(main())
