"""`make gpu-check`: prove and measure on a GPU what cannot be on a CPU. One call, nothing to download, under 9 minutes.

make gpu-check                                   all parts
make gpu-check ARGS="--only kernels,parity"      some of them
make gpu-check ARGS="--rehearse"                 all parts on the CPU with tiny shapes: does the script itself run?

Parts: kernels (every kernel against float64 references), parity (the engine against Hugging Face), bandwidth (each
kernel against the card's own rates), speed (the engine at published shapes), peers (Hugging Face on the same card),
stack (Redis, worker, gateway, client). A part that lacks something says so and the rest goes on. Logs and results.json
go into the folder named by OUT, or ops/bench/results/gpu. Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "ops" / "bench" / "results" / "gpu"
# Packages that a bare machine lacks may be unpacked here; it is not part of the project.
EXTRA = ROOT / ".gpu-check"


class Part(NamedTuple):
    """`seconds` is the most that it may take, 540 for all; a process of its own runs it, so that none takes the others
    down."""

    seconds: int
    run: Callable[[argparse.Namespace], dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ops.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="PARTS", default=",".join(PARTS), help="parts, comma-separated")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny shapes")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS))
    args = parser.parse_args()
    if args.part:
        return child(args)
    chosen = args.only.split(",")
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"--only: {', '.join(unknown)} is not one of {', '.join(PARTS)}")
    if not args.rehearse and not has_cuda():
        print("gpu-check: torch finds no CUDA device here; --rehearse runs all parts on the CPU", file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"environment": environment(), "parts": {}}
    print("\n".join(f"{name}: {value}" for name, value in report["environment"].items()), flush=True)
    started = time.monotonic()
    for name in chosen:
        report["parts"][name] = run_part(name, args)
        (args.out / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{time.monotonic() - started:.0f} s in all; logs in {args.out}\n")
    print(table(report))
    return 1 if any(part["status"] == "failed" for part in report["parts"].values()) else 0


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def environment() -> dict[str, str]:
    import torch

    found = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = "missing"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["GPU"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        found["CUDA"] = str(torch.version.cuda)
    return found


def run_part(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a part in a process of its own, its output in a log; and what it found."""
    command = [sys.executable, "-m", "ops.gpu_check", "--part", name, "--out", str(args.out)]
    command += ["--rehearse"] * args.rehearse
    paths = [str(ROOT), *([str(EXTRA)] if EXTRA.is_dir() else []), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    log = args.out / f"{name}.log"
    result_file = args.out / f"{name}.json"
    result_file.unlink(missing_ok=True)
    started = time.monotonic()
    with log.open("w") as output:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT, timeout=PARTS[name].seconds
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
            output.write(f"\ngpu-check: stopped after {PARTS[name].seconds} s\n")
    result = json.loads(result_file.read_text()) if result_file.exists() else {}
    status = result.pop("status", "failed") if code == 0 else "failed"
    seconds = time.monotonic() - started
    print(f"{name}: {status} after {seconds:.0f} s", flush=True)
    if status == "failed":
        print("  " + "\n  ".join(log.read_text(errors="replace").splitlines()[-12:]), flush=True)
    return {"status": status, "seconds": seconds, **result}


def child(args: argparse.Namespace) -> int:
    result = {"status": "passed"} | PARTS[args.part].run(args)
    (args.out / f"{args.part}.json").write_text(json.dumps(result) + "\n")
    return 0


# --- the parts, each in its own process -------------------------------------------------------------------------------


def device_of(args: argparse.Namespace) -> Any:
    import torch

    return torch.device("cpu") if args.rehearse else torch.device("cuda", torch.cuda.current_device())


def pytest(args: argparse.Namespace, *arguments: str) -> dict[str, Any]:
    """Run tests; what pytest counted."""
    # Its own configuration: that of the project names plugins which a bare machine lacks.
    ini = Path(__file__).with_name("pytest.ini")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-c", str(ini), f"--rootdir={ROOT}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-6000:], done.stderr[-2000:])
    summary = next((line for line in reversed(done.stdout.splitlines()) if " passed" in line or " failed" in line), "")
    if done.returncode:
        raise SystemExit(1)
    return {"tests": summary.strip("= ")}


def check_kernels(args: argparse.Namespace) -> dict[str, Any]:
    # On a card all cases in every type; in a rehearsal those that are quick enough for Triton's interpreter.
    return pytest(args, "tests/kernels", "-k", "triton or gpu", "-m", "not soak")


def check_parity(args: argparse.Namespace) -> dict[str, Any]:
    return pytest(args, "tests/gpu")


def measure_bandwidth(args: argparse.Namespace) -> dict[str, Any]:
    if args.rehearse:
        return {"status": "skipped", "why": "needs a CUDA device"}
    path = args.out / "bandwidth.kernels.json"
    command = [sys.executable, "-m", "kernels.bench", "--ops", "triton", "--json", str(path)]
    subprocess.run(command, cwd=ROOT, check=True)
    return {"kernels": json.loads(path.read_text())}


def measure_speed(args: argparse.Namespace) -> dict[str, Any]:
    import gc

    import torch

    from ops.gpu_check import engine as check

    device = device_of(args)
    loads = [check.rehearsal(load) if args.rehearse else load for load in check.LOADS]
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for name in dict.fromkeys(load.model for load in loads):
        started = time.perf_counter()
        engine = check.make_engine(name, device, 512 if args.rehearse else 4096)
        while engine.prepare():
            pass
        print(f"{name}: engine and graphs ready after {time.perf_counter() - started:.1f} s", flush=True)
        for load in loads:
            if load.model == name:
                rows.append(check.run(engine, load))
                print(rows[-1], flush=True)
        for sequences, context in ((1, 32), (4, 32)) if args.rehearse else ((1, 1024), (256, 512)):
            steps.append({"model": name, **check.decode_steps(engine, sequences, context)})
            print(steps[-1], flush=True)
        del engine
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"rows": rows, "steps": steps}


def measure_peers(args: argparse.Namespace) -> dict[str, Any]:
    import gc
    from dataclasses import replace

    from ops.bench.paper.workloads import SHAREGPT, lengths
    from ops.gpu_check import engine as check
    from ops.gpu_check import hugging_face

    device = device_of(args)
    pairs = tuple((min(prompt, 1024), min(output, 768)) for prompt, output in lengths(SHAREGPT, 128, 0))
    load = replace(check.LOADS[0], what="128 requests, ShareGPT lengths", pairs=pairs)
    if args.rehearse:
        load = check.rehearsal(load)
    engine = check.make_engine(load.model, device, 512 if args.rehearse else 2048)
    while engine.prepare():
        pass
    ours = check.run(engine, load)["rate"]
    del engine
    gc.collect()
    model = hugging_face.make_model(load.model, device)
    found: dict[str, Any] = {"what": load.what, "quire": ours, "generate": hugging_face.generate(model, load, device)}
    if args.rehearse:  # on a CPU it takes minutes
        return found | {"generate_batch": None, "why": "generate_batch is for GPUs"}
    try:
        found["generate_batch"] = hugging_face.generate_continuously(model, load, device)
    except Exception as error:  # its interface changes between versions: the rest of the check does not depend on it
        found["generate_batch"], found["why"] = None, f"{type(error).__name__}: {error}"
    print(found)
    return found


def measure_stack(args: argparse.Namespace) -> dict[str, Any]:
    from ops.gpu_check import stack

    if lacking := stack.missing():
        return {"status": "skipped", "why": f"missing here: {', '.join(lacking)}"}
    name, cases = ("small", stack.REHEARSAL) if args.rehearse else ("llama-3.1-8b", stack.CASES)
    with tempfile.TemporaryDirectory(prefix="quire-gpu-check-") as folder:
        return stack.run(Path(folder), name, device_of(args), cases)


PARTS = {
    "kernels": Part(120, check_kernels),
    "parity": Part(60, check_parity),
    "bandwidth": Part(60, measure_bandwidth),
    "speed": Part(130, measure_speed),
    "peers": Part(70, measure_peers),
    "stack": Part(100, measure_stack),
}


# --- the table --------------------------------------------------------------------------------------------------------


def table(report: dict[str, Any]) -> str:
    """What was found, one line each, measured beside what is asked for."""
    lines = []
    for name, part in report["parts"].items():
        lines.append(f"{name:<11}{part['status']:<9}{part.get('tests') or part.get('why') or ''}")
        for row in part.get("kernels", {}).get("rows", ()):
            lines.append(f"  {row['what']:<48}{row['rate']:>10.1f} {row['unit']:<9}{100 * row['share']:>6.0f} %")
        for row in part.get("rows", ()):
            lines.append(
                f"  {row['model']} {row['what']:<40}{row['rate']:>10.1f} {row['unit']:<7} asked for {row['least']:g}, "
                f"floor {row['floor']:g} ({100 * row['rate'] / row['floor']:.0f} %)"
            )
        for row in part.get("steps", ()):
            lines.append(
                f"  {row['model']} decode step, {row['sequences']} x {row['context']}: {row['step_ms']:.2f} ms, device "
                f"{row['busy_ms']:.2f}, waits for the host {row['wait_ms']:.3f}"
            )
        if "generate" in part:
            lines.append(
                f"  {part['what']}: Quire {part['quire']:.0f} tok/s, generate {part['generate']:.0f}, generate_batch "
                f"{part['generate_batch'] and round(part['generate_batch'])}"
            )
        if "ready_s" in part:
            lines.append(f"  stack ready after {part['ready_s']:.1f} s (asked for: 45)")
            for case in part["cases"]:
                lines.append(
                    f"  stack {case['case']}: {case['output_tokens_per_s']:.0f} tok/s, TTFT {case['ttft_ms']:.0f} ms, "
                    f"ITL {case['itl_ms']:.1f} ms (p99 {case['itl_p99_ms']:.1f})"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
