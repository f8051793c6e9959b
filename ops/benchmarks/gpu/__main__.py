"""`make gpu-check`: tests and measurements that need a GPU. One call, nothing to download, under 9 minutes.

make gpu-check                                   run all parts
make gpu-check ARGS="--only kernels,parity"      run some parts

Parts: self-test (that of workers, at its full level), kernels (every kernel against float64 references), parity (the
engine against Hugging Face), small and large (the speed of the engine at published shapes; again without CUDA graphs
after a failure), bandwidth (each kernel against the card's measured rates), stack (Redis, worker, gateway, client),
invariance (the cost of --batch-invariant). If a part fails, takes too long or lacks a package, the check reports it,
keeps the results of the part so far, and continues with the next part. Results are marked as unreliable if the
machine's Triton is older than workers accept. Logs and results.json are written to the folder named by OUT, or to
ops/benchmarks/results/gpu. The exit code is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any

from quire.ops.benchmarks.gpu import packages, process
from quire.ops.benchmarks.gpu.parts import PARTS, GpuParts

RESULTS = packages.ROOT / "ops" / "benchmarks" / "results" / "gpu"
# Limit of all parts together. The rest of the nine minutes is for the start and the report.
LIMIT_S = 525.0
# Lines of a failed part's log that are printed.
SHOWN = 30


def main(kind: type[GpuParts] = GpuParts, about: str | None = __doc__) -> int:
    """Run the chosen parts of `kind`, each in its own process."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {kind.module}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="PARTS", default=",".join(PARTS), help="parts to run, comma-separated")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--without-graphs", action="store_true", help="small and large: launch kernels one by one")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS))
    args = parser.parse_args()
    parts = kind(not args.without_graphs)
    if args.part:
        return child(parts, args.part, args.out)
    chosen = args.only.split(",")
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"--only: {', '.join(unknown)} is not one of {', '.join(PARTS)}")
    if missing := parts.missing_device():
        print(f"gpu-check: {missing}; run it on a machine with a GPU of NVIDIA", file=sys.stderr)
        return 1
    # SIGTERM raises SystemExit, so that `process.run` also ends the running part: a part has a session of its own, and
    # does not get the signal.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"environment": environment(), "parts": {}}
    if parts.notice:
        report["notice"] = parts.notice
        print(parts.notice, flush=True)
    if fault := parts.outdated_triton():
        report["unreliable"] = fault
        print(f"unreliable: {fault}", flush=True)
    print("\n".join(f"{name}: {value}" for name, value in report["environment"].items()), flush=True)
    started = time.monotonic()
    limit_s = parts.patience * LIMIT_S
    runs = [(name, parts.graphs) for name in chosen]
    while runs:
        name, graphs = runs.pop(0)
        part, called = PARTS[name], name if graphs else f"{name}, no graphs"
        left = limit_s - (time.monotonic() - started)
        if left < part.least:
            result = {"status": "skipped", "why": f"{left:.0f} s are left, it needs {part.least}"}
        else:
            result = run_part(kind(graphs), name, args.out, min(left, parts.patience * part.seconds))
        if fault:
            result["unreliable"] = fault
        report["parts"][called] = result
        if part.has_graphs and result["status"] == "failed" and graphs:
            runs.insert(0, (name, False))
        (args.out / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{time.monotonic() - started:.0f} s in all; logs in {args.out}\n")
    print(parts.table(report))
    return 1 if any(part["status"] == "failed" for part in report["parts"].values()) else 0


def environment() -> dict[str, str]:
    import torch

    facts = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers"):
        try:
            facts[name] = __import__(name).__version__
        except ImportError:
            facts[name] = "missing"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["GPU"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        facts["CUDA"] = str(torch.version.cuda)
    facts["packages that are missing"] = ", ".join(packages.missing())
    return facts


def run_part(parts: GpuParts, name: str, out: Path, seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own, with its output in a log. Return its results."""
    command = [sys.executable, "-m", parts.module, "--part", name, "--out", str(out)]
    command += [] if parts.graphs else ["--without-graphs"]
    extra = [str(packages.EXTRA)] if packages.EXTRA.is_dir() else []
    paths = [str(packages.ROOT / "src"), *extra, os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONUNBUFFERED": "1"}
    log = out / f"{name}.log"
    result_file = out / f"{name}.json"
    result_file.unlink(missing_ok=True)
    started = time.monotonic()
    with log.open("w") as output:
        code = process.run(command, packages.ROOT, environ, output, seconds)
    result = json.loads(result_file.read_text()) if result_file.exists() else {}
    result_file.unlink(missing_ok=True)
    status = result.pop("status", "failed") if code == 0 else "failed"
    taken = time.monotonic() - started
    if status == "passed":
        status = parts.passed
    print(f"{name}: {status} after {taken:.0f} s", flush=True)
    if status == "failed":
        said = [text for text in log.read_text(errors="replace").splitlines() if text.strip()][-SHOWN:]
        print("  " + "\n  ".join(said), flush=True)
        result |= {"why": said[-1].strip()[:110] if said else f"exit code {code}"}
    return result | {"status": status, "seconds": taken}


def child(parts: GpuParts, name: str, out: Path) -> int:
    """Run a part in this process."""
    file = out / f"{name}.json"

    def save(result: dict[str, Any]) -> None:
        # The file is replaced as a whole, because a part may be killed at any time.
        beside = file.with_suffix(".part")
        beside.write_text(json.dumps(result) + "\n")
        beside.replace(file)

    with parts.environment():
        save({"status": "passed"} | PARTS[name].run(parts, save))
    return 0


if __name__ == "__main__":
    sys.exit(main())
