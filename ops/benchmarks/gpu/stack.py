"""Measures the whole stack on a random checkpoint of 8B shape: Redis, worker, gateway, and a client on loopback."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from quire.ops.benchmarks.stack.checkpoint import write_tokenizer
from quire.ops.benchmarks.stack.load import LoadCase, run_case
from quire.ops.benchmarks.stack.random_model import CONFIGS, RandomWeights, config_json, shapes_of
from quire.worker.models.native.config import read_config

CASES = (
    LoadCase("c1", 1024, 128, requests=4, concurrency=1),
    LoadCase("c256", 128, 128, requests=512, concurrency=256),
)


def write_checkpoint(folder: Path, name: str, device: torch.device) -> float:
    """Write a checkpoint with random weights in several shards, as published checkpoints have. Return the seconds."""
    from safetensors.torch import save_file

    started = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config_json(name))
    shapes = shapes_of(read_config(folder))
    weights, names = RandomWeights(shapes, torch.bfloat16), list(shapes)
    per_shard = -(-len(names) // 4)
    weight_map: dict[str, str] = {}
    for index, first in enumerate(range(0, len(names), per_shard)):
        shard = f"model-{index + 1:05}-of-00004.safetensors"
        shard_names = names[first : first + per_shard]
        part = {weight_name: weights.read([weight_name], torch.bfloat16, device).cpu() for weight_name in shard_names}
        save_file(part, str(folder / shard), {"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    write_tokenizer(folder, CONFIGS[name]["vocab_size"])
    return time.perf_counter() - started


def start_stack(model: Path, state: Path, extra: list[str]) -> tuple[subprocess.Popen[str], str, float]:
    """Start `quire serve` on a free port. Return its process, its URL, and the seconds until it was ready."""
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


def run(
    folder: Path,
    name: str,
    device: torch.device,
    cases: tuple[LoadCase, ...],
    save: Callable[[dict[str, Any]], None],
    arguments: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Write the checkpoint, start the stack, measure the cases and stop the stack. Return the results.

    arguments: further arguments of `quire serve`.
    """
    results: dict[str, Any] = {"written_s": write_checkpoint(folder / name, name, device)}
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the worker takes the memory that the card reports as free
    print(f"checkpoint written after {results['written_s']:.1f} s", flush=True)
    extra = ["--device", device.type, "--max-model-len", "4096", *arguments]
    process, url, results["ready_s"] = start_stack(folder / name, folder, extra)
    results["cases"] = []
    try:
        for case in cases:
            results["cases"].append(asdict(asyncio.run(run_case(url, "bench", CONFIGS[name]["vocab_size"], case))))
            print(results["cases"][-1], flush=True)
            save(results)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    return results
