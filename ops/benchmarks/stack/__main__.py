"""`make bench`: start the whole stack on a random checkpoint, measure it, and print one table.

python -m quire.ops.benchmarks.stack                                  the stack, all cases
python -m quire.ops.benchmarks.stack --cases c1,c32 --repeat 3
python -m quire.ops.benchmarks.stack --against http://127.0.0.1:8101  the same load on another server, afterwards
python -m quire.ops.benchmarks.stack --peer llamacpp --peer vllm      other servers by name, in alternating rounds
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from quire.ops.benchmarks.peers.command import add_arguments, compare
from quire.ops.benchmarks.stack.checkpoint import SHAPES, make_checkpoint
from quire.ops.benchmarks.stack.load import CASES, LoadCase, LoadResult, run_case

RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m quire.ops.benchmarks.stack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="checkpoint folder; by default one with random weights is made")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama135m", help="shape of the random checkpoint")
    parser.add_argument("--cases", default="c1,c32,long", help=f"comma-separated, of {', '.join(CASES)}")
    parser.add_argument("--repeat", type=int, default=1, help="times that each case runs; the table shows every run")
    parser.add_argument("--against", metavar="URL", help="another OpenAI-compatible server to run the same cases on")
    parser.add_argument("--against-model", default="m", help="name of the model there")
    parser.add_argument("--serve-args", default="", help="further arguments of `quire serve`")
    add_arguments(parser)
    args = parser.parse_args()
    if args.peer or args.quire_args:
        return compare(args, RESULTS / "peers.json")
    cases = [CASES[name] for name in args.cases.split(",")]
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        state = Path(folder)
        model = Path(args.model) if args.model else make_checkpoint(state / args.shape, args.shape)
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        process, url, ready_s = start_stack(model, state, args.serve_args.split())
        try:
            print(f"quire: ready after {ready_s:.1f} s", flush=True)
            rows = measure("quire", url, "bench", vocab_size, cases, args.repeat)
            memory = resident_memory(process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
    if args.against:
        rows += measure("other", args.against, args.against_model, vocab_size, cases, args.repeat)
    print_table(rows)
    for name, mib in memory.items():
        print(f"resident memory of {name}: {mib:.0f} MiB")
    RESULTS.mkdir(exist_ok=True)
    report = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "ready_s": ready_s,
        "memory_mib": memory,
        "rows": [{"server": server, **asdict(result)} for server, result in rows],
    }
    (RESULTS / "serve.json").write_text(json.dumps(report, indent=2) + "\n")
    return 0


def start_stack(model: Path, state: Path, extra: list[str]) -> tuple[subprocess.Popen[str], str, float]:
    """Start `quire serve` on a free port. Returns its process, its URL, and the seconds until it was ready."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "quire", "serve", str(model), "--port", "0", "--served-model-name", "bench"]
    process = subprocess.Popen(
        [*command, "--state-dir", str(state / "state"), *extra], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready: "):
            return process, line.split()[1], time.perf_counter() - started
    raise SystemExit(f"quire serve ended with code {process.wait()} before it was ready")


def measure(
    server: str, url: str, model: str, vocab_size: int, cases: list[LoadCase], repeat: int
) -> list[tuple[str, LoadResult]]:
    """Run each case `repeat` times, with new prompts each time."""
    rows = []
    for case in cases:
        for seed in range(repeat):
            result = asyncio.run(run_case(url, model, vocab_size, case, seed))
            rows.append((server, result))
            print(f"{server} {case.name}: {result.output_tokens_per_s:.0f} tok/s", flush=True)
    return rows


def resident_memory(launcher: int) -> dict[str, float]:
    """Resident memory of the launcher's children in MiB, by name (Linux)."""
    memory = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines() if ":" in line)
            if int(status["PPid"]) == launcher:
                words = (entry / "cmdline").read_text().split("\0")
                name = next((word for word in words if word in ("worker", "gateway")), "redis")
                memory[name] = int(status["VmRSS"].split()[0]) / 1024
        except (OSError, ValueError, KeyError):
            continue
    return memory


def print_table(rows: list[tuple[str, LoadResult]]) -> None:
    """One row per run."""
    print(f"{'server':<8}{'case':<8}{'out tok/s':>10}{'TTFT ms':>10}{'TPOT ms':>10}{'ITL ms':>10}{'ITL p99':>10}")
    for server, r in rows:
        print(
            f"{server:<8}{r.case:<8}{r.output_tokens_per_s:>10.1f}{r.ttft_ms:>10.1f}{r.tpot_ms:>10.1f}"
            f"{r.itl_ms:>10.1f}{r.itl_p99_ms:>10.1f}"
        )


if __name__ == "__main__":
    sys.exit(main())
