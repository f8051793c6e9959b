"""The cost of tools in a chat: the first token with 20 tools against none, and the step time under a grammar.

python -m quire.ops.benchmarks.stack.tools                 random weights in the shape of SmolLM2-135M
python -m quire.ops.benchmarks.stack.tools --shape demo    the demo model

Calls with and without tools alternate. The format `hermes` leaves the prompt as it is, so both kinds of call have the
same prompt; only the grammar and the parser differ. A schema is new to the gateway once: the first call is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import string
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire.ops.benchmarks.stack.__main__ import start_stack
from quire.ops.benchmarks.stack.checkpoint import SHAPES, make_checkpoint
from quire.ops.loadgen.client import clock
from quire.ops.paths import PROJECT_ROOT
from quire.shared.model_argument import DEFAULT_MODEL

TOOLS = 20
MAX_TOKEN_LENGTH = 10
SPACE = "\u0120"  # as a byte-level tokenizer writes it
# Calls of one kind in a round: one after the other for the first token, and at once for the step time.
FIRST_TOKENS = 20
CONCURRENCY = 32
# Asks for free text: the grammar of `auto` allows it, and a reasoning model writes it before a call.
MESSAGES = [{"role": "user", "content": "Tell me a long story about a fox."}]


def tool(number: int) -> dict[str, Any]:
    """One of the tools: a function with three arguments."""
    properties = {
        "city": {"type": "string", "maxLength": 64},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "units": {"enum": ["metric", "imperial"]},
    }
    schema = {"type": "object", "properties": properties, "required": ["city"], "additionalProperties": False}
    return {"type": "function", "function": {"name": f"get_weather_{number}", "parameters": schema}}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m quire.ops.benchmarks.stack.tools",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=4, help="rounds of alternating calls")
    parser.add_argument("--shape", choices=["demo", *sorted(SHAPES)], default="llama135m", help="the model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        serve = ["--tool-call-format", "hermes"]
        model = PROJECT_ROOT / DEFAULT_MODEL
        if args.shape != "demo":
            model = make_checkpoint(Path(folder) / args.shape, args.shape)
            write_tokenizer(model, SHAPES[args.shape][-1])
        process, url, _ = start_stack(model, Path(folder), serve)
        try:
            asyncio.run(measure(f"{url}/v1/chat/completions", args.rounds))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
    return 0


def write_tokenizer(folder: Path, size: int) -> None:
    """Write a byte-level tokenizer of `size` tokens and a chat template: grammars need the bytes of each token.

    Like a trained vocabulary, nearly every token is valid UTF-8. Only tokens of one byte may be a part of a
    character.
    """
    draw = random.Random(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*string.ascii_letters, *string.digits, *string.punctuation, SPACE]
    known: set[str] = set(texts)
    merges: list[tuple[str, str]] = []
    while len(alphabet) + len(merges) < size - 2:
        pair = draw.choice(texts), draw.choice(texts)
        if len(merged := "".join(pair)) <= MAX_TOKEN_LENGTH and merged not in known:
            known.add(merged)
            texts.append(merged)
            merges.append(pair)
    words = [*alphabet, *map("".join, merges)]
    vocab = {text: index for index, text in enumerate(["<s>", "</s>", *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


async def measure(url: str, rounds: int) -> None:
    """Print the ratios of each round, and their median."""
    tools = {"tools": [tool(number) for number in range(TOOLS)]}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        await stream(session, url, tools, 1)
        await stream(session, url, {}, 1)
        firsts, steps = [], []
        for number in range(rounds):
            kinds: Sequence[dict[str, Any]] = ({}, tools) if number % 2 else (tools, {})
            first: dict[bool, float] = {}
            for extra in kinds:
                found = [await stream(session, url, extra, 1, seed) for seed in range(FIRST_TOKENS)]
                first[bool(extra)] = median(one[0] for one in found)
            step: dict[bool, float] = {}
            for extra in kinds:
                calls = [stream(session, url, extra, 200, seed) for seed in range(CONCURRENCY)]
                step[bool(extra)] = median(gap for _, gap in await asyncio.gather(*calls))
            firsts.append(first[True] / first[False])
            steps.append(step[True] / step[False])
            print(
                f"round {number}: first token {1e3 * first[True]:.2f} ms with {TOOLS} tools, "
                f"{1e3 * first[False]:.2f} ms without: {firsts[-1]:.2f}; between tokens of {CONCURRENCY} streams "
                f"{1e3 * step[True]:.2f} ms with, {1e3 * step[False]:.2f} ms without: {steps[-1]:.2f}"
            )
    for name, ratios in (("first token", firsts), ("step time", steps)):
        print(f"{name}: {median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f})")


async def stream(
    session: aiohttp.ClientSession, url: str, extra: dict[str, Any], tokens: int, seed: int = 0
) -> tuple[float, float]:
    """Return the seconds to the first text of a chat, and the mean of those between its texts."""
    body = {"model": "bench", "messages": MESSAGES, "stream": True, "max_tokens": tokens, "seed": seed, **extra}
    began, arrivals = clock(), []
    async with session.post(url, json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                arrivals.append(clock())
    return arrivals[0] - began, (arrivals[-1] - arrivals[0]) / max(1, len(arrivals) - 1)


if __name__ == "__main__":
    sys.exit(main())
