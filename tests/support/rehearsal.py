"""The rehearsal of `make gpu-check`: every part on a simulated device in host memory, with tiny shapes.

python -m tests.support.rehearsal                        all parts, no GPU needed
python -m tests.support.rehearsal --only small,stack     some of them

A rehearsal measures nothing. It shows that the check and the host's part of the GPU code run to their end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from quire.ops.benchmarks.gpu import packages
from quire.ops.benchmarks.gpu.__main__ import main
from quire.ops.benchmarks.gpu.parts import GpuParts, Save

DEVICE_BYTES = 400 << 20
# A worker that computes in Triton's interpreter can only do small steps in reasonable time.
SEQUENCES, TOKENS, STEPS = 4, 32, 3
# Nor is the self-test for it: the simulated device lacks some of torch's operations that the cases use.
WORKER_ARGUMENTS = (
    *("--max-num-seqs", f"{SEQUENCES}", "--max-num-batched-tokens", f"{TOKENS}", "--block-size", "16"),
    *("--self-test", "off"),
)
SIMULATION = packages.ROOT / "tests" / "support" / "simulated_cuda" / "site"  # has a sitecustomize.py
LONGEST = 512


class RehearsedParts(GpuParts):
    """The parts of the check on the simulated device. Their times mean nothing."""

    module = "tests.support.rehearsal"
    passed = "rehearsed"
    notice = (
        "rehearsal: on a simulated device in host memory, with tiny shapes. No figure is a measurement, and no result "
        "says anything about a card."
    )
    # A rehearsal shares its machine with other work.
    patience = 6

    def missing_device(self) -> str:
        return ""

    def outdated_triton(self) -> str | None:
        """A rehearsal compiles nothing."""
        return None

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Replace torch.cuda in this process."""
        from tests.support.simulated_cuda.driver import simulated_cuda

        with simulated_cuda(total=DEVICE_BYTES):
            yield

    def table(self, report: dict[str, Any]) -> str:
        """Return the status of each part, without figures."""
        found = report["parts"].items()
        return "\n".join(
            [self.notice, *(f"{name:<18}{part['status']:<11}{part.get('why', '')}" for name, part in found)]
        )

    def self_test(self, save: Save) -> dict[str, Any]:
        import torch

        from quire.kernels.self_test.inputs import QUICK
        from quire.ops.benchmarks.gpu import self_test

        # The simulated device lacks some of the operations that the cases use: the kernels of the CPU are tested.
        return self_test.run(torch.device("cpu"), ["small"], QUICK, save)

    def parity(self, save: Save) -> dict[str, Any]:
        found = super().parity(save)  # on the CPU
        if found["status"] == "failed":
            return found
        # The comparison on the simulated device has few and short texts.
        return self.run_tests("tests/worker/device/test_on_simulated_cuda.py", "-m", "", "-k", "texts_of_a_cpu")

    def speed(self, model: str, save: Save) -> dict[str, Any]:
        from quire.ops.benchmarks.gpu import engine

        loads = [rehearsed(load) for load in engine.LOADS if load.model == model]
        shapes = ((1, 32), (4, 32))  # of which both are few rows
        device, step = self.device(), (SEQUENCES, TOKENS)
        return engine.measure("small", device, LONGEST, loads, shapes, self.graphs, save, step, STEPS)

    def bandwidth(self, save: Save) -> dict[str, Any]:
        import torch

        from quire.ops.benchmarks.gpu import kernels

        return kernels.run(torch.bfloat16, 1, save, kernel_cases(), kernels.CardProbe(1 << 20, 64, 1 << 20))

    def invariance(self, save: Save) -> dict[str, Any]:
        from quire.ops.benchmarks.gpu import engine, invariance

        load = engine.Load("prompts", "small", ((16, 2),) * 4, "tok/s", 0, 0, 0)
        return invariance.measure("small", self.device(), LONGEST, (4, 32), load, save, (SEQUENCES, TOKENS), STEPS)

    def peers(self, save: Save) -> dict[str, Any]:
        from quire.ops.benchmarks.gpu import peers

        loads = [replace(load, model="small", pairs=((8, 2),) * min(len(load.pairs), 2)) for load in peers.LOADS]
        return peers.measure(self.device(), loads, save, LONGEST, (SEQUENCES, TOKENS))

    def measure_stack(self, folder: Path, save: Save) -> dict[str, Any]:
        from quire.ops.benchmarks.gpu import stack
        from quire.ops.benchmarks.stack.load import LoadCase

        cases = (LoadCase("c1", 16, 4, requests=1, concurrency=1), LoadCase("c2", 16, 4, requests=2, concurrency=2))
        with simulated_device_of_children():
            return stack.run(folder, "small", self.device(), cases, save, WORKER_ARGUMENTS)


@contextmanager
def simulated_device_of_children() -> Iterator[None]:
    """Replace torch.cuda in the processes that this one starts."""
    paths = [str(SIMULATION), str(packages.ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "SIMULATED_CUDA_BYTES": str(DEVICE_BYTES)}
    with mock.patch.dict(os.environ, variables):
        yield


def rehearsed(load: Any) -> Any:
    """Return the load with a model and lengths that are small enough for Triton's interpreter."""
    pairs = tuple((1 + prompt // 64, 2 + output // 256) for prompt, output in load.pairs[:4])
    return replace(load, model="small", pairs=pairs)


def kernel_cases() -> list[Any]:
    """Return the cases of the kernel benchmark with tiny shapes."""
    from quire.ops.benchmarks.gpu import kernels

    heads = kernels.Heads(4, 2, 16, 16)
    found: list[Any] = []
    for case in kernels.CASES:
        if isinstance(case, kernels.AttentionCase):
            queries = case.queries and min(case.queries, 4)
            found.append(replace(case, lengths=(12, 5), queries=queries, heads=heads))
        elif isinstance(case, kernels.Moves):
            found.append(replace(case, blocks=2, layers=2, heads=heads))
        elif isinstance(case, kernels.Logits):
            found.append(replace(case, rows=2, vocabulary=64))
        elif isinstance(case, kernels.RopeAndCache):
            found.append(replace(case, tokens=3, heads=heads))
        elif isinstance(case, kernels.AddRmsNorm):
            found.append(replace(case, tokens=3, hidden=64))
        elif isinstance(case, kernels.Product):
            how = case.how.removesuffix("lt")  # torch for CPUs has no cuBLASLt
            found.append(replace(case, tokens=3, features=(32, 64), how=how))
        else:
            assert isinstance(case, kernels.SiluMul)
            found.append(replace(case, tokens=3, inner=64))
    return found


if __name__ == "__main__":
    sys.exit(main(RehearsedParts, __doc__))
