"""With a KV cache of fewer bits than the activations, a request has one text: alone, preempted, or from a prefix."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import kernels
from quire.shared.messages import SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import generate
from quire.worker.models.decoder import Decoder
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.usefixtures("cpu_kernels")]
KV_DTYPES = [torch.bfloat16, torch.int8, torch.float8_e4m3fn]
LIMITS: list[dict[str, Any]] = [
    {"num_blocks": 40, "num_host_blocks": 200, "preemption": "swap"},
    {"num_blocks": 40, "preemption": "recompute", "prefix_caching": True},
]


def prompts() -> list[tuple[int, ...]]:
    draw = random.Random(5)
    drawn = [tuple(draw.randrange(VOCAB_SIZE - 3) for _ in range(draw.randint(1, 70))) for _ in range(12)]
    return [*drawn, *(drawn[-1][:17] + one[:20] for one in drawn[:6])]  # some share a prefix


def load(path: Path, kv_dtype: torch.dtype) -> Decoder:
    return Decoder.load(path, kernels.CpuOps(torch.float32, kv_dtype), torch.float32, "cpu")


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("limits", LIMITS, ids=["swapped", "recomputed"])
def test_a_text_is_the_same_alone_and_preempted_in_a_crowd(
    kv_dtype: torch.dtype, limits: dict[str, Any], tmp_path: Path
) -> None:
    model = load(make_checkpoint(tmp_path / "llama", "llama", initializer_range=0.1), kv_dtype)
    sizes: dict[str, Any] = {
        "block_size": 8,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 32,
        "max_model_len": model.max_model_len,
    }
    params = [SamplingParams(max_tokens=16, temperature=1.0, seed=seed, n=2) for seed in range(len(prompts()))]
    crowd = Engine(model, EngineLimits(**(sizes | limits)), (), None)
    crowd.checks_itself = True
    together = generate(crowd, prompts(), params)
    counters = crowd.groups.counters
    assert (counters.swapped if limits["preemption"] == "swap" else counters.recomputed) > 0
    plenty = EngineLimits(**(sizes | {"num_blocks": 200, "prefix_caching": False}))
    alone = [
        generate(Engine(model, plenty, (), None), [one], two)[0] for one, two in zip(prompts(), params, strict=True)
    ]
    assert together == alone


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_a_block_takes_the_bytes_that_its_layers_hold(kv_dtype: torch.dtype, tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path / "llama", "llama"), kv_dtype)
    cache = model.alloc_kv_cache(3, 16)
    assert sum(part.nbytes for layer in cache.layers for part in layer) == 3 * model.kv_bytes_per_block(16)
