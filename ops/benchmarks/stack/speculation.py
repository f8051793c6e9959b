"""Times of engines with and without speculation, on answers that repeat most of their prompts and on others.

python -m quire.ops.benchmarks.stack.speculation                                   one stream and eight, seven rounds
python -m quire.ops.benchmarks.stack.speculation --streams 1 --kinds edit --rounds 3

The checkpoint has the shape and the cost of SmolLM2-135M, and weights that make each token follow a token of its own.
`edit`: the prompt is such a text with one wrong token in EDITED, and the answer is the text with these corrected.
`prose`: the prompt is random, and the answer occurs nowhere. Prints the median over rounds of the time per token
without speculation divided by that with it, after checking that both gave the same tokens.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from quire.ops.benchmarks.stack.checkpoint import SHAPES, make_following
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.worker.build import build_engine
from quire.worker.engine.engine import Engine
from quire.worker.settings import WorkerSettings

KINDS = ("edit", "prose")
EDITED = 20
PROMPT = 256  # tokens


@dataclass(frozen=True, slots=True)
class EditPrompts:
    """Draws prompts. followers: the token after each token."""

    followers: list[int]
    draw: random.Random

    def prompt(self, kind: str) -> tuple[int, ...]:
        first = self._any()
        if kind == "prose":
            return (*(self._any() for _ in range(PROMPT)), first)
        text = [first]
        while len(text) < PROMPT:
            text.append(self.followers[text[-1]])
        edited = [self._any() if self.draw.randrange(EDITED) == 0 else token for token in text]
        return (*edited, *(self._any() for _ in range(8)), first)

    def _any(self) -> int:
        return self.draw.randrange(2, len(self.followers))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m quire.ops.benchmarks.stack.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama135m")
    parser.add_argument("--streams", default="1,8", help="answers that are computed at once")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    sampling = SamplingParams(max_tokens=args.tokens, ignore_eos=True, temperature=args.temperature, seed=1)
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        path, followers = make_following(Path(folder) / args.shape, args.shape)
        engines = {mode: _engine(path, mode) for mode in ("off", "auto")}
        texts = EditPrompts(followers, random.Random(7))
        print(f"{args.shape}, {engines['off'].runner.model.dtype}, {os.cpu_count()} cores")
        for kind in args.kinds.split(","):
            for streams in map(int, args.streams.split(",")):
                print(_compare(engines, texts, kind, streams, args.rounds, sampling), flush=True)


def _engine(path: Path, mode: str) -> Engine:
    return build_engine(WorkerSettings(model=str(path), speculation=mode, kv_cache_gb=0.5), mode)


def _compare(
    engines: dict[str, Engine], texts: EditPrompts, kind: str, streams: int, rounds: int, sampling: SamplingParams
) -> str:
    """Return a line with the figures of one kind of text, over rounds in turns."""
    seconds: dict[str, list[float]] = {mode: [] for mode in engines}
    drafts = engines["auto"].drafts
    assert drafts is not None, "the machine's kernels do not speculate"
    drafted, accepted = drafts.counters.drafted.total(), drafts.counters.accepted.total()
    steps = engines["auto"].num_steps
    for number in range(rounds):
        prompts = [texts.prompt(kind) for _ in range(streams)]
        answers = {}
        for mode in sorted(engines, reverse=bool(number % 2)):
            answers[mode], taken = _run(engines[mode], prompts, sampling, f"{kind}{streams}-{number}")
            seconds[mode].append(taken)
        assert answers["off"] == answers["auto"], "speculation changed a text"
    ratios = [off / auto for off, auto in zip(seconds["off"], seconds["auto"], strict=True)]
    drafted, accepted = drafts.counters.drafted.total() - drafted, drafts.counters.accepted.total() - accepted
    steps = engines["auto"].num_steps - steps
    per_step = rounds * sampling.max_tokens / steps
    times = " / ".join(f"{1e3 * statistics.median(seconds[mode]):.2f}" for mode in ("off", "auto"))
    return (
        f"{kind:6} {streams:3} streams: {statistics.median(ratios):5.2f}  ({min(ratios):.2f} .. {max(ratios):.2f}), "
        f"{times} ms per token, {per_step:.2f} tokens of a stream per step, "
        f"{accepted} of {drafted} drafted tokens accepted"
    )


def _run(
    engine: Engine, prompts: list[tuple[int, ...]], sampling: SamplingParams, name: str
) -> tuple[dict[str, list[int]], float]:
    """Run all prompts together. Returns their answers, and seconds per token once all prompts are computed.

    Each has a scope of its own, so none finds another's text.
    """
    for index, prompt in enumerate(prompts):
        request = GenerationRequest(str(index), engine.name, prompt, sampling)
        engine.add(replace(request, cache_scope=f"{name}-{index}"))
    answers: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    began, count = 0.0, 0
    while engine.has_work:
        for item in engine.step():
            for delta in item.deltas:
                answers[item.request_id] += delta.token_ids
                count += len(delta.token_ids)
        if not began and all(answers.values()):
            began, count = time.perf_counter(), 0
    return answers, (time.perf_counter() - began) / count


if __name__ == "__main__":
    main()
