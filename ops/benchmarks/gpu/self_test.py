"""The self-test of workers at its full level, with the shapes of published models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire import kernels
from quire.kernels.self_test.cases import WrongKernel, run_cases
from quire.kernels.self_test.registry import cases_of
from quire.ops.benchmarks.stack.random_model import random_decoder
from quire.worker.device.cuda.graphs import record_on_cuda
from quire.worker.device.devices import has_fp8

MODELS = ("llama-3.1-8b", "qwen3-0.6b")
LONGEST, BLOCK_SIZE = 8192, 16


def run(
    device: torch.device, models: Sequence[str], level: str, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run the self-test for each model, with a KV cache in the type of activations and in FP8.

    Return a row for each, with the number of cases and the lines of wrong kernels.
    """
    is_cuda = device.type == "cuda"
    caches = (False, True) if is_cuda and has_fp8(device) else (False,)
    results: dict[str, Any] = {"self_test": []}
    for name in models:
        for fp8 in caches:
            results["self_test"].append(_of_model(name, device, fp8, level))
            print(results["self_test"][-1], flush=True)
            save(results)
    faults = sum(len(row["faults"]) for row in results["self_test"])
    cases = sum(row["cases"] for row in results["self_test"])
    return results | {"status": "failed" if faults else "passed", "tests": f"{cases} cases, {faults} wrong kernels"}


def _of_model(name: str, device: torch.device, fp8: bool, level: str) -> dict[str, Any]:
    is_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    ops = kernels.triton_ops(device, dtype, fp8) if is_cuda else kernels.select_ops("cpu", dtype)
    uses = random_decoder(name, ops, dtype, LONGEST, num_layers=1).kernel_uses(BLOCK_SIZE)
    started = time.perf_counter()
    row: dict[str, Any] = {"model": name, "cache": "fp8" if fp8 else str(dtype)[6:]}
    try:
        report = run_cases(ops, cases_of(ops, uses, level, record_on_cuda if is_cuda else None))
    except WrongKernel as error:
        return row | {"cases": 0, "faults": [str(error)], "seconds": time.perf_counter() - started}
    faults = [fault.line for fault in report.faults]
    return row | {"cases": report.num_cases, "faults": faults, "seconds": time.perf_counter() - started}
