"""`make gpu-check`: tests and measurements that need a GPU. One call, nothing to download, under 9 minutes.

make gpu-check                                   run all parts
make gpu-check ARGS="--only kernels,parity"      run some parts
make gpu-check ARGS="--rehearse"                 run all parts on a simulated device with tiny shapes: no GPU is needed,
                                                 and nothing is measured

Parts: self-test (that of workers, at its full level), kernels (every kernel against float64 references), parity (the
engine against Hugging Face), small and large (the speed of the engine at published shapes; again without CUDA graphs
after a failure), bandwidth (each kernel against the card's measured rates), stack (Redis, worker, gateway, client),
invariance (the cost of --batch-invariant), peers (Hugging Face on the same card), tiles (other tile sizes of the
attention kernels). If a part fails, takes too long or lacks a package, the check reports it, keeps the results of the
part so far, and continues with the next part. Results are marked as unreliable if the machine's Triton is older than
workers accept. Logs and results.json are written to the folder named by OUT, or to ops/benchmarks/results/gpu. The exit
code is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from quire.ops.benchmarks.gpu import packages, process, rehearsal
from quire.ops.benchmarks.gpu.table import table

RESULTS = packages.ROOT / "ops" / "benchmarks" / "results" / "gpu"
# Limit of all parts together. The rest of the nine minutes is for the start and the report.
LIMIT_S = 525.0
# Lines of a failed part's log that are printed.
SHOWN = 30

# Stores the results of a part that has not ended yet.
Save = Callable[[dict[str, Any]], None]


class CheckPart(NamedTuple):
    """A part of the check. Each part runs in a process of its own, so that a crash does not affect other parts.

    seconds: time limit. least: the part is skipped if fewer seconds are left. has_graphs: run the part once more
    without CUDA graphs if it fails, in a new process, because a process cannot use the device after an error.
    """

    seconds: int
    least: int
    run: Callable[[argparse.Namespace, Save], dict[str, Any]]
    has_graphs: bool = False


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m quire.ops.benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="PARTS", default=",".join(PARTS), help="parts to run, comma-separated")
    parser.add_argument("--rehearse", action="store_true", help="run on a simulated device, with tiny shapes")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--without-graphs", action="store_true", help="small and large: launch kernels one by one")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS))
    args = parser.parse_args()
    if args.part:
        return child(args)
    chosen = args.only.split(",")
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"--only: {', '.join(unknown)} is not one of {', '.join(PARTS)}")
    if not args.rehearse and not has_cuda():
        print("gpu-check: torch finds no CUDA device here; --rehearse runs all parts without one", file=sys.stderr)
        return 1
    # SIGTERM raises SystemExit, so that `process.run` also ends the running part: a part has a session of its own, and
    # does not get the signal.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"environment": environment(), "parts": {}}
    if args.rehearse:
        report["rehearsal"] = rehearsal.NOTICE
        print(rehearsal.NOTICE, flush=True)
    if fault := outdated_triton(args):
        report["unreliable"] = fault
        print(f"unreliable: {fault}", flush=True)
    print("\n".join(f"{name}: {value}" for name, value in report["environment"].items()), flush=True)
    started = time.monotonic()
    # A rehearsal shares its machine with other work and may take longer.
    limit_s = 6 * LIMIT_S if args.rehearse else LIMIT_S
    runs = [(name, args.without_graphs) for name in chosen]
    while runs:
        name, args.without_graphs = runs.pop(0)
        part, called = PARTS[name], f"{name}, no graphs" if args.without_graphs else name
        left = limit_s - (time.monotonic() - started)
        if left < part.least:
            found = {"status": "skipped", "why": f"{left:.0f} s are left, it needs {part.least}"}
        else:
            found = run_part(name, args, min(left, part.seconds * (6 if args.rehearse else 1)))
        if fault:
            found["unreliable"] = fault
        report["parts"][called] = found
        if part.has_graphs and found["status"] == "failed" and not args.without_graphs:
            runs.insert(0, (name, True))
        (args.out / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{time.monotonic() - started:.0f} s in all; logs in {args.out}\n")
    print(table(report))
    return 1 if any(part["status"] == "failed" for part in report["parts"].values()) else 0


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def outdated_triton(args: argparse.Namespace) -> str | None:
    """Return the reason why results with this Triton are unreliable, or None.

    A rehearsal compiles nothing, so its results get None.
    """
    from quire import kernels

    return None if args.rehearse else kernels.outdated_triton()


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
    found["packages that are missing"] = ", ".join(packages.missing())
    return found


def run_part(name: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own, with its output in a log. Returns its results."""
    command = [sys.executable, "-m", "quire.ops.benchmarks.gpu", "--part", name, "--out", str(args.out)]
    command += ["--rehearse"] * args.rehearse + ["--without-graphs"] * args.without_graphs
    extra = [str(packages.EXTRA)] if packages.EXTRA.is_dir() else []
    paths = [str(packages.ROOT / "src"), *extra, os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONUNBUFFERED": "1"}
    log = args.out / f"{name}.log"
    result_file = args.out / f"{name}.json"
    result_file.unlink(missing_ok=True)
    started = time.monotonic()
    with log.open("w") as output:
        code = process.run(command, packages.ROOT, environ, output, seconds)
    result = json.loads(result_file.read_text()) if result_file.exists() else {}
    result_file.unlink(missing_ok=True)
    status = result.pop("status", "failed") if code == 0 else "failed"
    taken = time.monotonic() - started
    if args.rehearse and status == "passed":
        status = rehearsal.STATUS
    print(f"{name}: {status} after {taken:.0f} s", flush=True)
    if status == "failed":
        said = [text for text in log.read_text(errors="replace").splitlines() if text.strip()][-SHOWN:]
        print("  " + "\n  ".join(said), flush=True)
        result |= {"why": said[-1].strip()[:110] if said else f"exit code {code}"}
    return result | {"status": status, "seconds": taken}


def child(args: argparse.Namespace) -> int:
    file = args.out / f"{args.part}.json"

    def save(found: dict[str, Any]) -> None:
        # The file is replaced as a whole, because a part may be killed at any time.
        beside = file.with_suffix(".part")
        beside.write_text(json.dumps(found) + "\n")
        beside.replace(file)

    with rehearsal.simulated_device() if args.rehearse else nullcontext():
        save({"status": "passed"} | PARTS[args.part].run(args, save))
    return 0


# --- the parts, each in its own process -------------------------------------------------------------------------------


def device_of(args: argparse.Namespace) -> Any:
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def step_of(args: argparse.Namespace) -> tuple[int, int]:
    """Return the most sequences and tokens of a step; 0: those of a worker."""
    return (rehearsal.SEQUENCES, rehearsal.TOKENS) if args.rehearse else (0, 0)


def pytest(args: argparse.Namespace, *arguments: str) -> dict[str, Any]:
    """Run tests and return pytest's summary."""
    passed, summary = process.run_tests(packages.ROOT, arguments, not args.rehearse)
    return {"status": "passed" if passed else "failed", "tests": summary}


def check_self_test(args: argparse.Namespace, save: Save) -> dict[str, Any]:
    import torch

    from quire.ops.benchmarks.gpu import self_test

    # The simulated device lacks some of the operations that the cases use: a rehearsal tests the kernels of the CPU.
    return self_test.run(torch.device("cpu") if args.rehearse else device_of(args), args.rehearse, save)


def check_kernels(args: argparse.Namespace, save: Save) -> dict[str, Any]:
    # All cases in every dtype on a card; in a rehearsal, the cases that are fast enough for Triton's interpreter.
    # Tests that only compile show nothing new on a card, and take a minute.
    return pytest(
        args,
        "tests/kernels",
        "tests/ops/benchmarks/kernels",
        "--ignore=tests/kernels/static",
        *("-k", "(triton or gpu) and not test_every_kernel_compiles", "-m", "not soak"),
    )


def check_parity(args: argparse.Namespace, save: Save) -> dict[str, Any]:
    found = pytest(args, "tests/gpu", "-m", "not soak")  # in a rehearsal, on the CPU
    if not args.rehearse or found["status"] == "failed":
        return found
    # The comparison on the simulated device has few and short texts.
    return pytest(args, "tests/worker/device/test_on_simulated_cuda.py", "-m", "", "-k", "texts_of_a_cpu")


def measure_bandwidth(args: argparse.Namespace, save: Save) -> dict[str, Any]:
    import torch

    from quire.ops.benchmarks.kernels import gpu

    file = args.out / "bandwidth.json"
    if args.rehearse:
        code = gpu.run(torch.bfloat16, 1, file, rehearsal.kernel_cases(), gpu.CardProbe(1 << 20, 64, 1 << 20))
    else:
        code = gpu.run(torch.bfloat16, 30, file)
    found: dict[str, Any] = json.loads(file.read_text())
    return found | {"status": "failed" if code else "passed"}


def measure_speed(model: str, args: argparse.Namespace, save: Save) -> dict[str, Any]:
    from quire.ops.benchmarks.gpu import engine as check

    loads = [load for load in check.LOADS if load.model == model]
    if args.rehearse:
        loads, model = [check.rehearsal(load) for load in loads], "small"
    shapes = ((1, 32), (4, 32)) if args.rehearse else ((1, 1024), (256, 512))
    found: dict[str, Any] = {"rows": [], "steps": [], "graphs": []}
    longest, steps = (512, rehearsal.STEPS) if args.rehearse else (4096, 100)
    graphs, step = not args.without_graphs, step_of(args)
    check.measure(model, device_of(args), longest, loads, shapes, graphs, found, save, step, steps)
    return found


def measure_tiles(args: argparse.Namespace, save: Save) -> dict[str, Any]:
    from quire.ops.benchmarks.kernels import gpu, tile_sizes

    probe = gpu.CardProbe(1 << 20, 64, 1 << 20) if args.rehearse else gpu.CardProbe()
    timer = gpu.Timer(1 if args.rehearse else 20, probe.flush_bytes)
    card = gpu.measure_card(timer, probe)
    cases = [one for one in rehearsal.kernel_cases() if one.name in tile_sizes.NAMES] if args.rehearse else None
    rows = tile_sizes.measure(timer, card, lambda rows: save({"tiles": rows}), cases)
    return {"tiles": rows, "suggestions": tile_sizes.suggestions(rows)}


def measure_peers(args: argparse.Namespace, save: Save) -> dict[str, Any]:
    from dataclasses import replace

    import torch

    from quire.ops.benchmarks.gpu import engine as check
    from quire.ops.benchmarks.gpu import hugging_face
    from quire.ops.benchmarks.paper.workloads import SHAREGPT, lengths

    device = device_of(args)
    pairs = tuple((min(prompt, 1024), min(output, 768)) for prompt, output in lengths(SHAREGPT, 128, 0))
    load = replace(check.LOADS[0], what="128 requests, ShareGPT lengths", pairs=pairs)
    if args.rehearse:
        load = check.rehearsal(load)
    engine = check.make_engine(load.model, device, 512 if args.rehearse else 2048, step=step_of(args))
    while engine.prepare():
        pass
    found: dict[str, Any] = {"what": load.what, "quire": check.run(engine, load)["rate"]}
    save(found)
    del engine
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # generate_batch takes the memory that the card reports as free
    if args.rehearse:  # the code of Transformers is not rehearsed
        device = torch.device("cpu")
    model = hugging_face.make_model(load.model, device)
    found["generate"] = hugging_face.generate(model, load, device)
    save(found)
    if args.rehearse:  # generate_batch takes minutes on a CPU
        return found | {"generate_batch": None, "why": "generate_batch is for GPUs"}
    try:
        found["generate_batch"] = hugging_face.generate_continuously(model, load, device)
    except Exception as error:  # the interface of generate_batch changes between versions
        found["generate_batch"], found["why"] = None, f"{type(error).__name__}: {error}"
    print(found)
    return found


def measure_invariance(args: argparse.Namespace, save: Save) -> dict[str, Any]:
    from quire.ops.benchmarks.gpu import engine as check
    from quire.ops.benchmarks.gpu import invariance

    load = check.Load("16 prompts of 1,000 tokens", check.SMALL, ((1000, 2),) * 16, "tok/s", 0, 0, 0)
    if args.rehearse:
        load = check.rehearsal(load)
    longest, shape = (512, (4, 32)) if args.rehearse else (2048, (256, 1024))
    steps = rehearsal.STEPS if args.rehearse else 100
    return invariance.measure(load.model, device_of(args), longest, shape, load, save, step_of(args), steps)


def measure_stack(args: argparse.Namespace, save: Save) -> dict[str, Any]:
    if lacking := packages.missing_for_stack():
        print(f"elsewhere, then carried here: {packages.REMEDY} {' '.join(lacking)}")
        return {"status": "skipped", "why": f"missing here: {', '.join(lacking)}"}
    if fault := outdated_triton(args):
        return {"status": "skipped", "why": f"workers refuse this Triton: {fault}"}
    from quire.ops.benchmarks.gpu import stack

    name, cases = ("small", stack.REHEARSAL) if args.rehearse else ("llama-3.1-8b", stack.CASES)
    arguments = rehearsal.WORKER_ARGUMENTS if args.rehearse else ()
    children = rehearsal.simulated_device_of_children() if args.rehearse else nullcontext()
    with tempfile.TemporaryDirectory(prefix="quire-gpu-check-") as folder, children:
        return stack.run(Path(folder), name, device_of(args), cases, save, arguments)


# The most important parts come first, in case time runs out. A part that is stopped counts as failed, a skipped part
# does not: `least` is the time in which a part usually ends on an H200.
PARTS = {
    "self-test": CheckPart(60, 15, check_self_test),
    "kernels": CheckPart(170, 20, check_kernels),
    "parity": CheckPart(120, 30, check_parity),
    "small": CheckPart(90, 30, partial(measure_speed, "qwen3-0.6b"), has_graphs=True),
    "large": CheckPart(120, 45, partial(measure_speed, "llama-3.1-8b"), has_graphs=True),
    "bandwidth": CheckPart(80, 20, measure_bandwidth),
    "stack": CheckPart(140, 90, measure_stack),
    "invariance": CheckPart(60, 25, measure_invariance),
    "peers": CheckPart(130, 80, measure_peers),
    "tiles": CheckPart(100, 50, measure_tiles),
}


if __name__ == "__main__":
    sys.exit(main())
