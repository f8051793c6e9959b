"""Time to the first token of a prompt whose prefix is read back from a file, and of one that is computed.

python -m quire.ops.benchmarks.stack.kv_spill                         a prefix of 4,000 tokens, five rounds
python -m quire.ops.benchmarks.stack.kv_spill --tokens 1000 --rounds 3

Each round has a prefix of its own. Its prompt is computed, then evicted from the KV cache by another prompt, and
dropped from the system's memory; then a prompt with this prefix is asked for, whose blocks come from the disk. An
engine without a spill does the same in turns. Prints the medians over rounds, and the ratio, after checking that both
engines gave the same tokens. The checkpoint has the shape and the cost of SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from quire.ops.benchmarks.stack.checkpoint import SHAPES, make_following
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.worker.build import build_engine
from quire.worker.engine.engine import Engine
from quire.worker.settings import WorkerSettings

ANSWER = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
TAIL = 20  # tokens after the prefix
HOST_GB = 0.02  # less than a prefix takes, so that it comes from the disk


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m quire.ops.benchmarks.stack.kv_spill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama135m")
    parser.add_argument("--tokens", type=int, default=4000, help="tokens of a prefix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default="", help="folder of the file, on the disk to measure")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-bench-", dir=args.folder or None) as folder:
        path, followers = make_following(Path(folder) / args.shape, args.shape)
        spill = Path(folder) / "spill"
        engines = {"computed": _engine(path, args.tokens, ""), "read back": _engine(path, args.tokens, str(spill))}
        print(f"{args.shape}, {engines['computed'].runner.model.dtype}, {os.cpu_count()} cores, load {os.getloadavg()}")
        draw, seconds = random.Random(7), {name: list[float]() for name in engines}
        for number in range(args.rounds):
            vocabulary = range(2, len(followers))
            prefix, tail = (tuple(draw.choices(vocabulary, k=count)) for count in (args.tokens, TAIL))
            other = tuple(draw.choices(vocabulary, k=args.tokens + TAIL))
            answers = set()
            for name in sorted(engines, reverse=bool(number % 2)):
                engine = engines[name]
                for tokens in (prefix, other):
                    _ask(engine, tokens)
                    _settle(engine, spill)
                before = _num_read(engine)
                answer, taken, cached = _ask(engine, prefix + tail)
                if name == "read back":
                    assert 16 * (_num_read(engine) - before) > 0.9 * args.tokens, "blocks came from elsewhere"
                assert (cached > 0.9 * args.tokens) is (name == "read back"), f"{cached} tokens were cached"
                answers.add(answer)
                seconds[name].append(taken)
            assert len(answers) == 1, "the answers differ"
            line = ", ".join(f"{name} {times[-1]:.3f} s" for name, times in seconds.items())
            print(f"round {number + 1}: {line}; load {os.getloadavg()[0]:.1f}", flush=True)
        ratios = [back / computed for back, computed in zip(seconds["read back"], seconds["computed"], strict=True)]
        medians = ", ".join(f"{name} {statistics.median(times):.3f} s" for name, times in seconds.items())
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})"
        print(f"{args.tokens} tokens: {medians}; ratio {spread}")
        for engine in engines.values():
            engine.close()


def _engine(path: Path, tokens: int, folder: str) -> Engine:
    """Return an engine whose cache holds one prompt and a little more."""
    settings = WorkerSettings(
        model=str(path),
        max_model_len=tokens + 64,
        num_blocks=-(-(tokens + 64) // 16),
        kv_spill_dir=folder,
        kv_spill_gb=1.0,
        kv_host_gb=HOST_GB if folder else 0.0,
    )
    return build_engine(settings, "bench")


def _settle(engine: Engine, spill: Path) -> None:
    """Let an idle engine write all blocks, and drop them from the system's memory."""
    if engine.scheduler.spill is None:
        return
    written = -1
    while written < (now := engine.scheduler.spill.figures().kept["disk"]):
        written = now
        engine.prepare()
        time.sleep(0.1)
    for path in spill.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _num_read(engine: Engine) -> int:
    """Return how many blocks have come from the disk."""
    return engine.scheduler.spill.figures().read["disk"] if engine.scheduler.spill is not None else 0


def _ask(engine: Engine, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], float, int]:
    """Return the answer to a prompt, the seconds to its first token, and how many of its tokens were cached."""
    engine.add(GenerationRequest("one", engine.name, prompt, ANSWER))
    before = engine.groups.blocks.counters.prefix_hits
    tokens: list[int] = []
    began, taken = time.perf_counter(), 0.0
    while engine.has_work:
        for item in engine.step():
            taken = taken or time.perf_counter() - began
            tokens += [token for delta in item.deltas for token in delta.token_ids]
    return tuple(tokens), taken, engine.groups.blocks.counters.prefix_hits - before


if __name__ == "__main__":
    main()
