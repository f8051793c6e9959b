"""Weights and caches of fewer bits: a request has one text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import kernels
from quire.kernels.cpu.levels import LEVELS
from quire.ops.paths import PROJECT_ROOT
from quire.shared.protocol.messages import SamplingParams
from quire.worker.build import build_engine
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import complete, generate
from quire.worker.inspect.fingerprint import of_results
from quire.worker.models.native.decoder import Decoder
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint

DEMO = PROJECT_ROOT / "models" / "demo"

PROMPTS = [(5, 9, 200, 31), (7,), tuple(range(40, 100)), (300, 4, 4, 4, 8)]

LEVEL_NAMES = [level.name for level in LEVELS[torch.float32]]

pytestmark = pytest.mark.usefixtures("thread_counts")


def demo_engine(level: str, quantization: str, monkeypatch: pytest.MonkeyPatch, **settings: object) -> Engine:
    monkeypatch.setenv("KERNELS_CPU_ISA", level)
    settings = {"dtype": "float32", "threads": 1} | settings  # fp8 goes with bfloat16, too
    chosen = WorkerSettings(model=str(DEMO), device="cpu", num_blocks=64, quantization=quantization, **settings)  # type: ignore[arg-type]
    engine = build_engine(chosen, "test")
    ops = engine.runner.model.ops
    if not isinstance(ops, kernels.CpuOps) or ops.level.name != level:
        pytest.skip(f"this processor has no {level}")
    return engine


def text_of(engine: Engine) -> list[tuple[int, ...]]:
    params = SamplingParams(24, temperature=0.8, seed=3, ignore_eos=True)
    return [tuple(one.token_ids) for (one,) in complete(engine, PROMPTS, params)]


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("level", [name for name in LEVEL_NAMES if name != "avx2"])
def test_a_level_gives_the_text_and_the_bits_of_avx2(
    level: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowest = demo_engine("avx2", quantization, monkeypatch)
    highest = demo_engine(level, quantization, monkeypatch)
    assert text_of(highest) == text_of(lowest)
    assert of_results(highest) == of_results(lowest) != ""


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_a_request_alone_has_the_text_that_it_has_in_a_batch(
    quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = demo_engine(LEVEL_NAMES[-1], quantization, monkeypatch)
    params = SamplingParams(24, temperature=0.8, seed=3, ignore_eos=True)
    alone = [tuple(complete(engine, [prompt], params)[0][0].token_ids) for prompt in PROMPTS]
    assert alone == text_of(engine)


def test_quantisation_changes_the_digest_of_weights_but_not_their_text_by_much(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [
        demo_engine(LEVEL_NAMES[-1], quantization, monkeypatch) for quantization in ("none", "fp8", "int8", "int4")
    ]
    assert len({engine.runner.model.weights_digest for engine in engines}) == 4
    sizes = [engine.runner.model.weight_bytes for engine in engines]
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3]
    greedy = SamplingParams(1, temperature=0.0, ignore_eos=True)
    first = [[one.token_ids[0] for (one,) in complete(engine, PROMPTS, greedy)] for engine in engines]
    for rounded in first[1:3]:
        assert sum(a == b for a, b in zip(first[0], rounded, strict=True)) >= len(PROMPTS) - 1


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


@pytest.mark.usefixtures("cpu_kernels")
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


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_a_block_takes_the_bytes_that_its_layers_hold(kv_dtype: torch.dtype, tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path / "llama", "llama"), kv_dtype)
    cache = model.alloc_kv_cache(3, 16)
    assert sum(part.nbytes for layer in cache.layers for part in layer) == 3 * model.kv_bytes_per_block(16)
