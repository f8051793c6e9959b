"""Measures Transformers with the requests of a load: one padded batch, and its continuous batching."""

from __future__ import annotations

import json
import time
from typing import Any

import torch

from quire.ops.benchmarks.gpu.engine import Load, requests
from quire.ops.benchmarks.stack.random_model import config_json


def make_model(name: str, device: torch.device) -> Any:
    """Make a Transformers model of a published shape with random weights."""
    import transformers

    fields = json.loads(config_json(name))
    fields.pop("architectures")
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        return model.eval()


def generate(model: Any, load: Load, device: torch.device) -> float:
    """Return requested output tokens per second of one padded batch. The batch runs until its longest output ends."""
    asked = list(requests(load, model.config.vocab_size))
    longest = max(len(one.prompt) for one in asked)
    ids = torch.tensor([[0] * (longest - len(one.prompt)) + list(one.prompt) for one in asked], device=device)
    mask = torch.tensor([[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in asked], device=device)
    most = max(one.sampling.max_tokens for one in asked)
    limits = {"do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=2, min_new_tokens=2, **limits)
        _wait(device)
        started = time.perf_counter()
        model.generate(ids, max_new_tokens=most, min_new_tokens=most, **limits)
        _wait(device)
    return sum(one.sampling.max_tokens for one in asked) / (time.perf_counter() - started)


def generate_continuously(model: Any, load: Load, device: torch.device) -> float:
    """Return output tokens per second of `generate_batch`. All requests have the mean output length of the load."""
    import transformers

    asked = list(requests(load, model.config.vocab_size))
    mean = round(sum(one.sampling.max_tokens for one in asked) / len(asked))
    options = {"max_new_tokens": mean, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    config = transformers.GenerationConfig(**options)  # type: ignore[no-untyped-call]
    prompts = [list(one.prompt) for one in asked]
    with torch.no_grad():  # not inference mode: generate_batch changes tensors in place later
        model.generate_batch(inputs=prompts[:2], generation_config=config)
        _wait(device)
        started = time.perf_counter()
        outputs = model.generate_batch(inputs=prompts, generation_config=config)
        _wait(device)
    seconds = time.perf_counter() - started
    tokens = sum(len(one.generated_tokens) for one in outputs.values())
    if tokens < mean * len(asked):
        raise RuntimeError(f"generate_batch gave {tokens} of {mean * len(asked)} tokens")
    return tokens / seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
