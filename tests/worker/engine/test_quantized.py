"""Quantised weights give the same text on every instruction-set level, and whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire import kernels
from quire.kernels.cpu.levels import LEVELS
from quire.ops.paths import PROJECT_ROOT
from quire.shared.messages import SamplingParams
from quire.worker.build import build_engine
from quire.worker.engine.engine import Engine
from quire.worker.engine.offline import complete
from quire.worker.inspect.fingerprint import of_results
from quire.worker.settings import WorkerSettings

DEMO = PROJECT_ROOT / "models" / "demo"
PROMPTS = [(5, 9, 200, 31), (7,), tuple(range(40, 100)), (300, 4, 4, 4, 8)]
LEVEL_NAMES = [level.name for level in LEVELS[torch.float32]]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore the thread counts, which build_engine sets for the process."""
    before = torch.get_num_threads(), kernels.num_threads()
    yield
    torch.set_num_threads(before[0])
    kernels.set_num_threads(before[1])


def demo_engine(level: str, quantization: str, monkeypatch: pytest.MonkeyPatch, **settings: object) -> Engine:
    monkeypatch.setenv("KERNELS_CPU_ISA", level)
    settings = {"dtype": "float32"} | settings  # fp8 goes with bfloat16, too
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
