"""The parts of `make gpu-check`. Each runs in a process of its own, and saves its results on the way."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from quire.ops.benchmarks.gpu import packages, process

# Stores the results of a part that has not ended yet.
Save = Callable[[dict[str, Any]], None]


class GpuParts:
    """The parts of the check on the current CUDA device.

    graphs: with CUDA graphs. The modules of a part are imported in its own process.
    """

    # The module of the command, and the status of a part that passes.
    module = "quire.ops.benchmarks.gpu"
    passed = "passed"
    # Said at the start of the output and of the report; empty: nothing.
    notice = ""
    # The factor of all time limits.
    patience = 1

    def __init__(self, graphs: bool = True) -> None:
        self.graphs = graphs

    def missing_device(self) -> str:
        """Return why no part can run here; empty if they can."""
        import torch

        return "" if torch.cuda.is_available() else "torch finds no CUDA device here"

    def outdated_triton(self) -> str | None:
        """Return the reason why results with this Triton are unreliable, or None."""
        from quire import kernels

        return kernels.outdated_triton()

    def environment(self) -> AbstractContextManager[None]:
        """Return the context in which a part runs."""
        return nullcontext()

    def table(self, report: dict[str, Any]) -> str:
        """Return the text at the end of the check."""
        from quire.ops.benchmarks.gpu.table import table

        return table(report)

    def device(self) -> Any:
        import torch

        return torch.device("cuda", torch.cuda.current_device())

    def run_tests(self, *arguments: str, parallel: bool = True) -> dict[str, Any]:
        """Run tests and return pytest's summary."""
        passed, summary = process.run_tests(packages.ROOT, arguments, parallel)
        return {"status": "passed" if passed else "failed", "tests": summary}

    def self_test(self, save: Save) -> dict[str, Any]:
        from quire.kernels.self_test.inputs import FULL
        from quire.ops.benchmarks.gpu import self_test

        return self_test.run(self.device(), self_test.MODELS, FULL, save)

    def kernels(self, save: Save) -> dict[str, Any]:
        # All cases in every dtype. Tests that only compile show nothing new on a card, and take a minute.
        return self.run_tests(
            "tests/kernels",
            "tests/ops/benchmarks/gpu/test_kernels.py",
            "--ignore=tests/kernels/static",
            *("-k", "(triton or gpu) and not test_every_kernel_compiles", "-m", "not soak"),
        )

    def parity(self, save: Save) -> dict[str, Any]:
        return self.run_tests("tests/gpu", "-m", "not soak")

    def small(self, save: Save) -> dict[str, Any]:
        from quire.ops.benchmarks.gpu import engine

        return self.speed(engine.SMALL, save)

    def large(self, save: Save) -> dict[str, Any]:
        from quire.ops.benchmarks.gpu import engine

        return self.speed(engine.LARGE, save)

    def speed(self, model: str, save: Save) -> dict[str, Any]:
        from quire.ops.benchmarks.gpu import engine

        loads = [load for load in engine.LOADS if load.model == model]
        return engine.measure(model, self.device(), 4096, loads, ((1, 1024), (8, 1024), (256, 512)), self.graphs, save)

    def bandwidth(self, save: Save) -> dict[str, Any]:
        import torch

        from quire.ops.benchmarks.gpu import kernels

        return kernels.run(torch.bfloat16, 30, save)

    def invariance(self, save: Save) -> dict[str, Any]:
        from quire.ops.benchmarks.gpu import engine, invariance

        load = engine.Load("16 prompts of 1,000 tokens", engine.SMALL, ((1000, 2),) * 16, "tok/s", 0, 0, 0)
        return invariance.measure(load.model, self.device(), 2048, (256, 1024), load, save)

    def peers(self, save: Save) -> dict[str, Any]:
        from quire.ops.benchmarks.gpu import peers

        return peers.measure(self.device(), peers.LOADS, save)

    def stack(self, save: Save) -> dict[str, Any]:
        if lacking := packages.missing_for_stack():
            print(f"elsewhere, then carried here: {packages.REMEDY} {' '.join(lacking)}")
            return {"status": "skipped", "why": f"missing here: {', '.join(lacking)}"}
        if fault := self.outdated_triton():
            return {"status": "skipped", "why": f"workers refuse this Triton: {fault}"}
        with tempfile.TemporaryDirectory(prefix="quire-gpu-check-") as folder:
            return self.measure_stack(Path(folder), save)

    def measure_stack(self, folder: Path, save: Save) -> dict[str, Any]:
        from quire.ops.benchmarks.gpu import stack

        return stack.run(folder, "llama-3.1-8b", self.device(), stack.CASES, save)


class CheckPart(NamedTuple):
    """A part of the check. Each part runs in a process of its own, so that a crash does not affect other parts.

    seconds: time limit. least: the part is skipped if fewer seconds are left. has_graphs: run the part once more
    without CUDA graphs if it fails, in a new process, because a process cannot use the device after an error.
    """

    seconds: int
    least: int
    run: Callable[[GpuParts, Save], dict[str, Any]]
    has_graphs: bool = False


# The most important parts come first, in case time runs out. A part that is stopped counts as failed, a skipped part
# does not: `least` is the time in which a part usually ends on an H200.
PARTS = {
    "self-test": CheckPart(60, 15, lambda parts, save: parts.self_test(save)),
    "kernels": CheckPart(170, 20, lambda parts, save: parts.kernels(save)),
    "parity": CheckPart(120, 30, lambda parts, save: parts.parity(save)),
    "small": CheckPart(90, 30, lambda parts, save: parts.small(save), has_graphs=True),
    "large": CheckPart(120, 45, lambda parts, save: parts.large(save), has_graphs=True),
    "bandwidth": CheckPart(80, 20, lambda parts, save: parts.bandwidth(save)),
    "stack": CheckPart(140, 90, lambda parts, save: parts.stack(save)),
    "peers": CheckPart(90, 45, lambda parts, save: parts.peers(save)),
    "invariance": CheckPart(60, 25, lambda parts, save: parts.invariance(save)),
}
