"""Measures sampling over a large vocabulary against reading the logits once.

    python -m quire.ops.benchmarks.kernels.sampling --vocabulary 151936 --rows 1

Each round reads the logits with a plain loop on the same threads, and then runs every case. The printed times are
medians of the rounds in microseconds per row. KERNELS_CPU_ISA selects the level.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from quire import kernels
from quire.kernels import CpuOps
from quire.kernels.cpu import library

# Name: temperature, top_k, top_p, min_p.
PARAMETERS = {
    "temperature": (1.0, 0, 1.0, 0.0),
    "top-k 50": (0.8, 50, 1.0, 0.0),
    "top-p 0.95": (0.8, 0, 0.95, 0.0),
    "top-k 50, top-p 0.9": (0.8, 50, 0.9, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05),
}


def cases(ops: CpuOps, logits: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return the calls to measure, by name."""
    rows = len(logits)
    uniform = torch.rand(rows, dtype=torch.float64)
    found: dict[str, Callable[[], object]] = {
        "read": lambda: library.load().common.read_memory(logits.data_ptr(), logits.nbytes),
        "argmax": lambda: ops.argmax(logits),
        "top 20 logprobs": lambda: ops.top_logprobs(logits, 20),
    }
    for name, (temperature, top_k, top_p, min_p) in PARAMETERS.items():
        given = (
            torch.full((rows,), temperature),
            torch.full((rows,), top_k, dtype=torch.int32),
            torch.full((rows,), top_p),
            torch.full((rows,), min_p),
            uniform,
        )
        found[name] = lambda given=given: ops.sample(logits, *given)  # type: ignore[misc]
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m quire.ops.benchmarks.kernels.sampling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--vocabulary", type=int, default=151_936, help="default 151936")
    parser.add_argument("--rows", type=int, default=1, help="default 1")
    parser.add_argument("--spread", type=float, default=2.5, help="standard deviation of the logits, default 2.5")
    parser.add_argument("--rounds", type=int, default=50, help="default 50")
    parser.add_argument("--threads", type=int, default=None, help="default: every processor")
    args = parser.parse_args(argv)
    if args.threads:
        kernels.set_num_threads(args.threads)
    ops = CpuOps(torch.float32)
    logits = torch.randn(args.rows, args.vocabulary, generator=torch.Generator().manual_seed(0)) * args.spread
    calls = cases(ops, logits)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e6 / args.rows)
    read = statistics.median(times["read"])
    print(f"{ops.level.name}: {args.rows} rows of {args.vocabulary} logits\n{'':<22}{'us/row':>8}{'reads':>8}")
    for name, found in times.items():
        print(f"{name:<22}{statistics.median(found):>8.1f}{statistics.median(found) / read:>8.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
