"""Step times of 32 sequences with LoRA adapters against those without, without HTTP and Redis.

python -m quire.ops.benchmarks.stack.adapters                         on a random checkpoint of SmolLM2-135M's shape
python -m quire.ops.benchmarks.stack.adapters --quantization int8 --rank 16

Prints medians over rounds with their spread, for no adapter, one adapter for all sequences and one for each sequence.
The kinds alternate in every round. Adapters are random and change all projections.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from quire.kernels.lora import LoraLayer, LoraPart
from quire.ops.benchmarks.stack.checkpoint import SHAPES, make_checkpoint
from quire.shared.messages import GenerationRequest, SamplingParams
from quire.worker.build import build_engine
from quire.worker.engine.adapters import Adapter
from quire.worker.engine.engine import Engine
from quire.worker.models.native.config import ModelConfig
from quire.worker.settings import WorkerSettings

SEQUENCES = 32
STEPS = 24


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m quire.ops.benchmarks.stack.adapters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama135m", help="shape of the random checkpoint")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="type of the factors")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        model = make_checkpoint(Path(folder) / args.shape, args.shape)
        settings = WorkerSettings(model=str(model), quantization=args.quantization, prefix_caching=False)
        engine = build_engine(settings, "bench")
    ops = engine.runner.model.ops
    print(f"{os.cpu_count()} cores, {ops.dtype}, kernels {ops.name}, rank {args.rank}, factors in {args.dtype}")
    engine.adapters.limit = SEQUENCES
    for number in range(SEQUENCES):
        engine.adapters.add(random_adapter(engine, str(number), args.rank, getattr(torch, args.dtype)))
    print(f"{engine.adapters.nbytes / 2**20 / SEQUENCES:.1f} MiB per adapter")
    kinds = {
        "none": [""] * SEQUENCES,
        "one": ["0"] * SEQUENCES,
        "each its own": [str(at) for at in range(SEQUENCES)],
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    step_time(engine, kinds["each its own"])
    for _ in range(args.rounds):
        for kind, names in kinds.items():
            times[kind].append(step_time(engine, names))
    for kind, seconds in times.items():
        ratios = [one / none for one, none in zip(seconds, times["none"], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f}) of none"
        print(f"{kind:14} {1000 * statistics.median(seconds):8.2f} ms    {spread}")


def random_adapter(engine: Engine, name: str, rank: int, dtype: torch.dtype) -> Adapter:
    """Make an adapter of all projections with small random factors."""
    model = engine.runner.model
    config = model.config
    assert isinstance(config, ModelConfig)
    hidden, inner, q, kv = config.hidden_size, config.intermediate_size, config.q_size(0), config.kv_size(0)

    def part(width: int, inputs: int, offset: int = 0) -> LoraPart:
        a, b = torch.randn(rank, inputs) / inputs, torch.randn(width, rank) / rank
        return LoraPart(a.to(dtype), b.to(dtype), 1.0, offset)

    layers: list[LoraLayer] = [
        {
            "qkv": [part(q, hidden), part(kv, hidden, q), part(kv, hidden, q + kv)],
            "o": [part(hidden, q)],
            "gate_up": [part(inner, hidden), part(inner, hidden, inner)],
            "down": [part(hidden, inner)],
        }
        for _ in range(config.num_layers)
    ]
    return Adapter(name, name, model.ops.pack_adapter(layers, inner), rank)


def step_time(engine: Engine, adapters: list[str]) -> float:
    """Return the median seconds of a decode step of one sequence per adapter, with prompts of 32 tokens."""
    params = SamplingParams(max_tokens=STEPS + 64, temperature=0.0, ignore_eos=True)
    for number, adapter in enumerate(adapters):
        prompt = tuple((17 * i + number) % (engine.vocab_size - 8) + 4 for i in range(32))
        engine.add(GenerationRequest(str(number), "bench", prompt, params, adapter=adapter))
    while any(group.sequences[0].num_output_tokens < 2 for group in engine.requests.values()):
        engine.step()
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    for name in list(engine.requests):
        engine.finish(name, "cancelled")
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
