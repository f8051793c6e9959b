"""Times of engine steps of one checkpoint, computed by Quire's decoder and by Transformers, in alternating rounds.

python -m quire.ops.benchmarks.stack.backends                            a random checkpoint of SmolLM2-135M's shape
python -m quire.ops.benchmarks.stack.backends --rows 1 --model FOLDER --rounds 9

Prints the median over rounds of the median decode step of each backend, and the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from quire.ops.benchmarks.stack.checkpoint import SHAPES, make_checkpoint
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.worker.build import build_engine
from quire.worker.engine.engine import Engine
from quire.worker.settings import WorkerSettings

PROMPT = 64  # tokens
STEPS = 24


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m quire.ops.benchmarks.stack.backends",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="checkpoint folder; by default one with random weights is made")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama135m", help="shape of the random checkpoint")
    parser.add_argument("--rows", type=int, default=32, help="sequences of a step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        model = args.model or str(make_checkpoint(Path(folder) / args.shape, args.shape))
        engines = {
            name: build_engine(WorkerSettings(model=model, model_impl=name, dtype=args.dtype), name)
            for name in ("quire", "transformers")
        }
        for name, engine in engines.items():
            decode_time(engine, "warm", args.rows)
            print(f"{name}: {engine.runner.model.dtype}, {os.cpu_count()} cores, {type(engine.runner.model).__name__}")
        times: dict[str, list[float]] = {name: [] for name in engines}
        for index in range(args.rounds):
            for name, engine in engines.items():
                times[name].append(decode_time(engine, f"round{index}", args.rows))
        for name, seconds in times.items():
            spread = f"{1e3 * min(seconds):.2f} .. {1e3 * max(seconds):.2f}"
            print(f"{name:16} {1e3 * statistics.median(seconds):8.2f} ms per step of {args.rows}  ({spread})")
        ratios = [quire / other for quire, other in zip(times["quire"], times["transformers"], strict=True)]
        print(f"{'speed ratio':16} {statistics.median(ratios):8.2f}  ({min(ratios):.2f} .. {max(ratios):.2f})")


def decode_time(engine: Engine, name: str, rows: int) -> float:
    """Return the median seconds of a decode step of `rows` sequences, each with a prompt of its own."""
    params = SamplingParams(max_tokens=STEPS + 8, temperature=0.0, ignore_eos=True)
    names = [f"{name}-{row}" for row in range(rows)]
    for row, request in enumerate(names):
        prompt = tuple((17 * i + 31 * row + 3) % (engine.vocab_size - 8) + 4 for i in range(PROMPT))
        engine.add(GenerationRequest(request, "bench", prompt, params))
    while min(engine.requests[request_id].sequences[0].num_output_tokens for request_id in names) < 2:
        engine.step()
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    for request in names:
        engine.finish(request, "cancelled")
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
