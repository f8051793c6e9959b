"""Times of single engine steps on a checkpoint, without HTTP and Redis: beam search and the prefix cache.

python -m quire.ops.benchmarks.stack.steps                            on a random checkpoint of SmolLM2-135M's shape
python -m quire.ops.benchmarks.stack.steps --model FOLDER --rounds 9

Prints medians over rounds with their spread: the decode step of four plain sequences and of one search with four beams,
which alternate in every round; and the time to the first token of a new prompt and of a cached one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from quire.ops.benchmarks.stack.checkpoint import SHAPES, make_checkpoint
from quire.shared.messages import GenerationRequest, SamplingParams
from quire.worker.build import build_engine
from quire.worker.engine.engine import Engine
from quire.worker.settings import WorkerSettings

STEPS = 48


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m quire.ops.benchmarks.stack.steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="checkpoint folder; by default one with random weights is made")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama135m", help="shape of the random checkpoint")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        model = Path(args.model) if args.model else make_checkpoint(Path(folder) / args.shape, args.shape)
        engine = build_engine(WorkerSettings(model=str(model)), "bench")
        print(f"{os.cpu_count()} cores, {engine.runner.model.dtype}, kernels {engine.runner.model.ops.name}")
        beams(engine, args.rounds)
        prefix(engine, args.rounds)


def beams(engine: Engine, rounds: int) -> None:
    """Compare the decode step of one search with four beams with that of four plain sequences."""
    greedy = SamplingParams(max_tokens=STEPS + 8, temperature=0.0, ignore_eos=True)
    plain, search = replace(greedy, n=4), replace(greedy, beam_width=4)
    times: dict[str, list[float]] = {"plain": [], "beams": []}
    copies = []
    decode_time(engine, "warm", search)
    for index in range(rounds):
        times["plain"].append(decode_time(engine, f"plain{index}", plain))
        before = engine.scheduler.blocks.counters.copies
        times["beams"].append(decode_time(engine, f"beams{index}", search))
        copies.append((engine.scheduler.blocks.counters.copies - before) / STEPS)
    show("step, 4 plain sequences", times["plain"])
    show("step, 4 beams", times["beams"])
    ratios = [b / p for b, p in zip(times["beams"], times["plain"], strict=True)]
    print(f"{'4 beams / 4 plain':32} {statistics.median(ratios):8.2f}     ({min(ratios):.2f} .. {max(ratios):.2f})")
    print(f"{'copied blocks per beam step':32} {statistics.median(copies):8.2f}")


def decode_time(engine: Engine, name: str, params: SamplingParams) -> float:
    """Median seconds of a decode step of one request with a prompt of 128 tokens."""
    prompt = tuple((17 * i + 3) % (engine.vocab_size - 8) + 4 for i in range(128))
    engine.add(GenerationRequest(name, "bench", prompt, params))
    while engine.requests[name].sequences[0].num_output_tokens < 2:
        engine.step()
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    engine.finish(name, "cancelled")
    return statistics.median(seconds)


def prefix(engine: Engine, rounds: int) -> None:
    """The time to the first token of a prompt of 512 new tokens, and of the same prompt from the cache."""
    times: dict[str, list[float]] = {"new": [], "cached": []}
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    for index in range(rounds):
        prompt = tuple((index * 7919 + 31 * i) % (engine.vocab_size - 8) + 4 for i in range(512))
        for name in times:
            start = time.perf_counter()
            engine.add(GenerationRequest(name, "bench", prompt, params))
            while not engine.step():
                pass
            times[name].append(time.perf_counter() - start)
            engine.finish(name, "cancelled")
    show("first token, 512 new tokens", times["new"])
    show("first token, 512 cached tokens", times["cached"])


def show(what: str, seconds: list[float]) -> None:
    print(
        f"{what:32} {1e3 * statistics.median(seconds):8.2f} ms  ({1e3 * min(seconds):.2f} .. {1e3 * max(seconds):.2f})"
    )


if __name__ == "__main__":
    main()
