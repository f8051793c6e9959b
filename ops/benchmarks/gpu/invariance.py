"""What the batch-invariant mode costs: the same steps with it and without, one engine after the other."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from quire.ops.benchmarks.gpu.engine import Load, decode_steps, make_engine, run
from quire.worker.device import graph_capture
from quire.worker.device.graphs import GREEDY, GraphBucket


def measure(
    name: str,
    device: torch.device,
    longest: int,
    shape: tuple[int, int],
    prompts: Load,
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Milliseconds of a decode step of `shape` (sequences, context) and of computing `prompts`, in both modes."""
    sequences, context = shape
    found: dict[str, Any] = {"modes": []}
    for invariant in (False, True):
        engine = make_engine(
            name, device, longest, invariant=invariant, buckets=[GraphBucket(GREEDY, sequences, sequences)]
        )
        while engine.prepare():
            pass
        run(engine, prompts)  # compiles, and warms up
        prompts_ms = 1e3 * statistics.median(run(engine, prompts)["seconds"] for _ in range(5))
        step_ms = decode_steps(engine, sequences, context)["step_ms"]
        found["modes"].append({"model": name, "invariant": invariant, "step_ms": step_ms, "prompts_ms": prompts_ms})
        print(found["modes"][-1], flush=True)
        save(found)
        del engine
        if device.type == "cuda":
            graph_capture.release()  # the next one takes what the card says is free
    plain, strict = found["modes"]
    what = f"{name}, {sequences} x {context}", prompts.what
    ratios = strict["step_ms"] / plain["step_ms"], strict["prompts_ms"] / plain["prompts_ms"]
    return found | {"invariance": [{"what": one, "ratio": ratio} for one, ratio in zip(what, ratios, strict=True)]}
