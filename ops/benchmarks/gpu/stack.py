"""Measures the whole stack on a random checkpoint of 8B shape: Redis, worker, gateway, and a client on loopback."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from quire.ops.benchmarks.stack.__main__ import start_stack
from quire.ops.benchmarks.stack.load import LoadCase, run_case
from quire.ops.benchmarks.stack.random_model import CONFIGS, RandomWeights, config_json, shapes_of
from quire.worker.models.native.config import read_config

CASES = (
    LoadCase("c1", 1024, 128, requests=4, concurrency=1),
    LoadCase("c256", 128, 128, requests=512, concurrency=256),
)
REHEARSAL = (LoadCase("c1", 16, 4, requests=1, concurrency=1), LoadCase("c2", 16, 4, requests=2, concurrency=2))


def write_checkpoint(folder: Path, name: str, device: torch.device) -> float:
    """Write a checkpoint with random weights in several shards, as published checkpoints have. Returns the seconds."""
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

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
        part = {one: weights.read([one], torch.bfloat16, device).cpu() for one in shard_names}
        save_file(part, str(folder / shard), {"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    words = {"<s>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, CONFIGS[name]["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return time.perf_counter() - started


def run(
    folder: Path,
    name: str,
    device: torch.device,
    cases: tuple[LoadCase, ...],
    save: Callable[[dict[str, Any]], None],
    arguments: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Write the checkpoint, start the stack, measure the cases and stop the stack. Returns the results.

    arguments: further ones of `quire serve`.
    """
    found: dict[str, Any] = {"written_s": write_checkpoint(folder / name, name, device)}
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the worker takes the memory that the card reports as free
    print(f"checkpoint written after {found['written_s']:.1f} s", flush=True)
    extra = ["--device", device.type, "--max-model-len", "4096", *arguments]
    process, url, found["ready_s"] = start_stack(folder / name, folder, extra)
    found["cases"] = []
    try:
        for case in cases:
            found["cases"].append(asdict(asyncio.run(run_case(url, "bench", CONFIGS[name]["vocab_size"], case))))
            print(found["cases"][-1], flush=True)
            save(found)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    return found
