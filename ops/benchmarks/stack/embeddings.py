"""The rate of /v1/embeddings: calls of several inputs of random token ids, one call after the other.

python -m quire.ops.benchmarks.stack.embeddings                                  the stack, 32 inputs of 512 tokens
python -m quire.ops.benchmarks.stack.embeddings --pooling mean --repeat 5
python -m quire.ops.benchmarks.stack.embeddings --against http://127.0.0.1:8101  another server, call by call in turn

The first call of each server is not counted. Each call has new inputs, so no prefix cache helps. Two servers get the
same inputs, one server after the other, and the one that goes first alternates. With `--only-against` no stack is
started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from quire.ops.benchmarks.stack.__main__ import start_stack
from quire.ops.benchmarks.stack.checkpoint import SHAPES, make_checkpoint
from quire.ops.loadgen.client import clock

CALL_TIMEOUT = aiohttp.ClientTimeout(total=600)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m quire.ops.benchmarks.stack.embeddings",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="checkpoint folder; by default one with random weights is made")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama135m", help="shape of the random checkpoint")
    parser.add_argument("--inputs", type=int, default=32, help="inputs of each call")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each input")
    parser.add_argument("--repeat", type=int, default=3, help="calls that are counted")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs; a server may have cached those of a seed")
    parser.add_argument("--pooling", choices=("last", "mean"), help="by default the server's, and not in the call")
    parser.add_argument("--against", metavar="URL", help="another OpenAI-compatible server for the same calls")
    parser.add_argument("--against-model", default="m", help="name of the model there")
    parser.add_argument("--only-against", action="store_true", help="start no stack; needs --against and --model")
    parser.add_argument("--serve-args", default="", help="further arguments of `quire serve`")
    args = parser.parse_args()
    if args.only_against and not (args.against and args.model):
        parser.error("--only-against needs --against and --model")
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        state = Path(folder)
        model = Path(args.model) if args.model else make_checkpoint(state / args.shape, args.shape)
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        servers = [Server("other", args.against, args.against_model, {})] if args.against else []
        shape = args.inputs, args.tokens, args.repeat, vocab_size, args.seed
        if args.only_against:
            found = asyncio.run(measure(servers, *shape))
        else:
            process, url, _ = start_stack(model, state, args.serve_args.split())
            extra = {"pooling": args.pooling} if args.pooling else {}
            servers.insert(0, Server("quire", url, "bench", extra))
            try:
                found = asyncio.run(measure(servers, *shape))
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(30)
        for server, times in zip(servers, found, strict=True):
            report(server.name, args, times)
        if len(found) == 2:
            ratios = [other / quire for quire, other in zip(*found, strict=True)]
            print(
                f"quire / other: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), rates of single rounds"
            )
    return 0


@dataclass(frozen=True)
class Server:
    """A server to call. extra: further parameters of its calls."""

    name: str
    url: str
    model: str
    extra: dict[str, Any]


async def measure(
    servers: Sequence[Server], inputs: int, tokens: int, repeat: int, vocab_size: int, seed: int
) -> list[list[float]]:
    """Return the seconds of each of `repeat` calls, by server, after one that is not counted.

    Raises RuntimeError for a refusal.
    """
    draw = random.Random(seed)
    times: list[list[float]] = [[] for _ in servers]
    async with aiohttp.ClientSession(timeout=CALL_TIMEOUT) as session:
        for index in range(repeat + 1):
            prompts = [draw.choices(range(2, vocab_size), k=tokens) for _ in range(inputs)]
            order = list(enumerate(servers))
            for at, server in order if index % 2 == 0 else order[::-1]:
                times[at].append(await _call(session, server, prompts))
    return [seconds[1:] for seconds in times]


async def _call(session: aiohttp.ClientSession, server: Server, prompts: list[list[int]]) -> float:
    """Return the seconds of one call."""
    body = json.dumps({"model": server.model, "input": prompts, "encoding_format": "base64", **server.extra})
    start = clock()
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{server.url}/v1/embeddings", data=body, headers=headers) as response:
        answer = await response.json()
    seconds = clock() - start
    if response.status != 200 or len(answer["data"]) != len(prompts):
        raise RuntimeError(f"{server.url}: {response.status}: {str(answer)[:300]}")
    return seconds


def report(server: str, args: argparse.Namespace, times: list[float]) -> None:
    """Print the median rate, with the slowest and the fastest call."""
    tokens = args.inputs * args.tokens
    rates = [tokens / seconds for seconds in times]
    print(
        f"{server}: {args.inputs} inputs of {args.tokens} tokens: {median(rates):.0f} tokens/s "
        f"({min(rates):.0f} to {max(rates):.0f}), {median(times):.2f} s per call, "
        f"{args.inputs / median(times):.2f} inputs/s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
