"""Measures Transformers with the requests of a load, beside Quire on the same card.

Transformers computes one padded batch (`generate`), and its own continuous batching over a paged cache
(`generate_batch`). Both have the shapes of Quire's model, with random weights.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch

from quire.ops.benchmarks.gpu import engine
from quire.ops.benchmarks.gpu.engine import SMALL, Load, requests
from quire.ops.benchmarks.stack.random_model import config_json

# Each side serves each load once, after a short one that compiles its kernels.
LOADS = (
    Load("batch 1, 128 in, 128 out", SMALL, ((128, 128),), "tok/s", 3_282, 0, 0),
    Load("64 requests, 128 in, 128 out", SMALL, ((128, 128),) * 64, "tok/s", 0, 0, 0),
)


def measure(
    device: torch.device,
    loads: SequenceOf[Load],
    save: Callable[[dict[str, Any]], None],
    longest: int = 1024,
    step: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """Serve each load by Quire, `generate` and `generate_batch`. Return "peers": rows of output tokens per second.

    longest, step: as of `engine.make_engine`. A side that fails has its error in place of a rate.
    """
    rows: list[dict[str, Any]] = []
    results = {"peers": rows}
    for load in loads:
        quire = engine.make_engine(load.model, device, longest, step=step)
        while quire.prepare():
            pass
        rows.append({"what": load.what, "model": load.model, "quire": engine.run(quire, load)["rate"]})
        del quire
        _release(device)
        model = _make_model(load.model, device)
        for name, serve in (("generate", _generate), ("generate_batch", _generate_batch)):
            try:
                rows[-1][name] = serve(model, load, device)
            except Exception as error:
                rows[-1][name] = f"{type(error).__name__}: {error}"[:200]
            save(results)
        print(rows[-1], flush=True)
        del model
        _release(device)
    return results


def _make_model(name: str, device: torch.device) -> Any:
    """Make a Transformers model with the shapes of a random model of Quire."""
    import transformers

    fields = json.loads(config_json(name))
    fields.pop("architectures")
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        return model.eval()


def _generate(model: Any, load: Load, device: torch.device) -> float:
    """Return output tokens per second of one padded batch, which runs until its longest output ends."""
    asked = list(requests(load, model.config.vocab_size))
    longest = max(len(request.prompt) for request in asked)
    padding = [longest - len(request.prompt) for request in asked]
    ids = [[0] * count + list(request.prompt) for count, request in zip(padding, asked, strict=True)]
    mask = torch.tensor([[0] * count + [1] * (longest - count) for count in padding], device=device)
    most = max(request.sampling.max_tokens for request in asked)

    def run(tokens: int) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                torch.tensor(ids, device=device), attention_mask=mask, do_sample=False, pad_token_id=0,
                max_new_tokens=tokens, min_new_tokens=tokens,
            )  # fmt: skip
        _wait(device)
        return time.perf_counter() - started

    run(2)
    return sum(request.sampling.max_tokens for request in asked) / run(most)


def _generate_batch(model: Any, load: Load, device: torch.device) -> float:
    """Return output tokens per second of continuous batching. All requests of the load have outputs of one length."""
    import transformers

    asked = list(requests(load, model.config.vocab_size))
    (count,) = {request.sampling.max_tokens for request in asked}
    prompts = [list(request.prompt) for request in asked]
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    config = transformers.GenerationConfig(**options)  # type: ignore[no-untyped-call]
    with torch.no_grad():  # not inference mode: generate_batch changes tensors in place later
        model.generate_batch(inputs=prompts[:2], generation_config=config)
        _wait(device)
        started = time.perf_counter()
        outputs = model.generate_batch(inputs=prompts, generation_config=config)
        _wait(device)
    seconds = time.perf_counter() - started
    tokens = sum(len(output.generated_tokens) for output in outputs.values())
    if tokens < count * len(asked):
        raise RuntimeError(f"generate_batch gave {tokens} of {count * len(asked)} tokens")
    return tokens / seconds


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
