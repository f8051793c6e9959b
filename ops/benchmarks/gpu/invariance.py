"""Measures the cost of the batch-invariant mode: the same steps with and without it, on two engines in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from quire.ops.benchmarks.gpu.engine import Load, decode_steps, make_engine, run
from quire.worker.device.cuda import graph_capture
from quire.worker.device.cuda.graphs import GREEDY, GraphBucket


def measure(
    name: str,
    device: torch.device,
    longest: int,
    shape: tuple[int, int],
    prompts: Load,
    save: Callable[[dict[str, Any]], None],
    step: tuple[int, int] = (0, 0),
    steps: int = 100,
) -> dict[str, Any]:
    """Measure a decode step of `shape` (sequences, context) and the computation of `prompts`, in both modes, in ms.

    step: see `make_engine`. steps: the number of decode steps.
    """
    sequences, context = shape
    results: dict[str, Any] = {"modes": []}
    for invariant in (False, True):
        buckets = [GraphBucket(GREEDY, sequences, sequences)]
        engine = make_engine(name, device, longest, invariant=invariant, buckets=buckets, step=step)
        while engine.prepare():
            pass
        run(engine, prompts)  # compiles, and warms up
        prompts_ms = 1e3 * statistics.median(run(engine, prompts)["seconds"] for _ in range(5))
        step_ms = decode_steps(engine, sequences, context, steps)["step_ms"]
        results["modes"].append({"model": name, "invariant": invariant, "step_ms": step_ms, "prompts_ms": prompts_ms})
        print(results["modes"][-1], flush=True)
        save(results)
        del engine
        if device.type == "cuda":
            graph_capture.release()  # the next engine takes the memory that the card reports as free
    plain, strict = results["modes"]
    what = f"{name}, {sequences} x {context}", prompts.what
    ratios = strict["step_ms"] / plain["step_ms"], strict["prompts_ms"] / plain["prompts_ms"]
    return results | {
        "invariance": [{"what": label, "ratio": ratio} for label, ratio in zip(what, ratios, strict=True)]
    }
