"""Servers with and without speculation, on texts that repeat much of their prompts and on others.

python -m quire.ops.benchmarks.peers.speculation --make FOLDER [--tokenizer FOLDER]        write the checkpoint
python -m quire.ops.benchmarks.peers.speculation --pair quire=URL,URL --pair vllm=URL,URL  measure, in turns

Each pair is one program that serves the checkpoint at two URLs, without speculation and with it; each serves the model
under the name `m`. Prints the tokens per second of both, the median of their ratio over rounds, and how many texts
changed. `story` prompts are text, for any other checkpoint. The prompts of `edit` and `prose` are those of
`ops/benchmarks/stack/speculation.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp

from quire.ops.benchmarks.stack.checkpoint import SHAPES, followers_of, make_following
from quire.ops.benchmarks.stack.speculation import EditPrompts

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
NOUNS = ("fox", "lighthouse", "boat", "frog", "clock", "bear", "garden", "kite", "owl", "snail", "bridge", "drum")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m quire.ops.benchmarks.peers.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="write the checkpoint, and measure nothing")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="tokenizer of the checkpoint, of another one")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama135m")
    parser.add_argument("--pair", action="append", default=[], metavar="NAME=URL,URL", help="URLs without /v1")
    parser.add_argument("--kinds", default="edit,prose", help="of edit, prose, story")
    parser.add_argument("--streams", default="1,8", help="answers that are computed at once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    if args.make:
        make_following(args.make, args.shape)
        for name in TOKENIZER if args.tokenizer else ():
            shutil.copy(args.tokenizer / name, args.make / name)
        return
    pairs = {name: urls.split(",") for name, _, urls in (given.partition("=") for given in args.pair)}
    asyncio.run(_measure(pairs, args))


async def _measure(pairs: dict[str, list[str]], args: argparse.Namespace) -> None:
    prompts = EditPrompts(followers_of(args.shape), random.Random(7))
    sampling = {"model": "m", "max_tokens": args.tokens, "temperature": args.temperature, "ignore_eos": True, "seed": 1}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        for kind in args.kinds.split(","):
            for streams in map(int, args.streams.split(",")):
                rates: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
                changed = dict.fromkeys(pairs, 0)
                for number in range(args.rounds):
                    bodies = [{**sampling, "prompt": _prompt(prompts, kind)} for _ in range(streams)]
                    for name, urls in pairs.items():
                        found = {}
                        for url in sorted(urls, reverse=bool(number % 2)):
                            found[url] = await _run(session, url, bodies)
                        (plain, texts), (rate, drafted) = (found[url] for url in urls)
                        rates[name].append((plain, rate))
                        changed[name] += sum(one != other for one, other in zip(texts, drafted, strict=True))
                for name, measured in rates.items():
                    ratios = [rate / plain for plain, rate in measured]
                    off, on = (statistics.median(side) for side in zip(*measured, strict=True))
                    print(
                        f"{kind:6} {streams:3} streams, {name}: {off:.0f} and {on:.0f} tokens/s, "
                        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), "
                        f"{changed[name]} of {args.rounds * streams} texts changed",
                        flush=True,
                    )


def _prompt(prompts: EditPrompts, kind: str) -> str | list[int]:
    if kind != "story":
        return list(prompts.prompt(kind))
    return f"Once upon a time, a {prompts.draw.choice(NOUNS)} met a {prompts.draw.choice(NOUNS)}."


async def _run(session: aiohttp.ClientSession, url: str, bodies: list[dict[str, Any]]) -> tuple[float, list[str]]:
    """Send all calls at once. Returns the tokens per second, and the texts."""
    started = time.perf_counter()
    answers = await asyncio.gather(*(_call(session, url, body) for body in bodies))
    return sum(count for _, count in answers) / (time.perf_counter() - started), [text for text, _ in answers]


async def _call(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[str, int]:
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        if response.status != 200:
            raise SystemExit(f"{url}: {answer}")
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


if __name__ == "__main__":
    main()
