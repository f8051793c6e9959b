"""The cost of tools in a chat: the first token with 20 tools against none, and the step time under a grammar.

python -m quire.ops.benchmarks.stack.tools                      random weights in the shape of SmolLM2-135M
python -m quire.ops.benchmarks.stack.tools --shape demo         the demo model
python -m quire.ops.benchmarks.stack.tools --choice required    forced calls with long arguments; also `named`
python -m quire.ops.benchmarks.stack.tools --prompt tools       the template writes 20 described tools in the prompt

Calls with and without tools alternate, and have the same prompt: by default the template writes no tools, and with
`--prompt tools` the call without tools has their text in its message. So only schemas, grammar and parser differ. The
template of the demo model writes its tools. A schema is new to the gateway once: the first call is not counted. With
`--prompt tools` the first token is measured for prompts that are new to the prefix cache and for cached ones.
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
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from quire.ops.benchmarks.stack.__main__ import start_stack
from quire.ops.benchmarks.stack.checkpoint import SHAPES, make_checkpoint
from quire.ops.loadgen.client import clock
from quire.ops.paths import PROJECT_ROOT
from quire.shared.model_argument import DEFAULT_MODEL

TOOLS = 20
MAX_TOKEN_LENGTH = 10
SPACE = "\u0120"  # as a byte-level tokenizer writes it
# Calls of one kind in a round: one after the other for the first token, and at once for the step time.
FIRSTS = range(20)
# Calls of one kind in a round whose prompts are not in the prefix cache.
NEW_PROMPTS = range(5)
CONCURRENCY = 32
# Tokens of an answer whose step time is measured.
TOKENS = 200
# Asks for free text: the grammar of `auto` allows it, and a reasoning model writes it before a call.
QUESTION = "Tell me a long story about a fox."
NAMED = {"type": "function", "function": {"name": "edit_file_0"}}
# Beginnings of templates. One that takes no tools would make the gateway describe them in the message.
WRITES_NO_TOOLS = "{% if tools %}{% endif %}"
WRITES_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"


def tool(number: int) -> dict[str, Any]:
    """A tool with three short arguments."""
    properties = {
        "city": {"type": "string", "maxLength": 64},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "units": {"enum": ["metric", "imperial"]},
    }
    return _function(f"get_weather_{number}", "", properties, ["city"])


def long_tool(number: int) -> dict[str, Any]:
    """A tool whose arguments are longer than a measured answer: texts and numbers in an array."""
    edit = {
        "type": "object",
        "properties": {"line": {"type": "integer", "minimum": 1}, "text": {"type": "string", "maxLength": 80}},
        "required": ["line", "text"],
        "additionalProperties": False,
    }
    properties = {
        "path": {"type": "string", "maxLength": 128},
        "edits": {"type": "array", "items": edit, "minItems": TOKENS},
    }
    return _function(f"edit_file_{number}", "", properties, ["path", "edits"])


def described_tool(number: int) -> dict[str, Any]:
    """A tool with the descriptions that coding agents send, about 100 words."""
    properties = {
        "path": {"type": "string", "description": "The path of the file, relative to the root of the project."},
        "pattern": {"type": "string", "description": "A regular expression; without it all lines are returned."},
        "first": {"type": "integer", "minimum": 1, "description": "The number of the first line to return."},
        "last": {"type": "integer", "minimum": 1, "description": "The number of the last line, by default all."},
        "mode": {"enum": ["text", "binary"], "description": "How the file is read; text by default."},
    }
    description = (
        "Reads lines of a file in the project. Call it before a change, because changes must match the file. It fails "
        "if the file does not exist. Lines longer than 2,000 characters are cut. Read several files in parallel."
    )
    return _function(f"read_lines_{number}", description, properties, ["path"])


def _function(name: str, description: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m quire.ops.benchmarks.stack.tools",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=4, help="rounds of alternating calls")
    parser.add_argument("--shape", choices=["demo", *sorted(SHAPES)], default="llama135m", help="the model")
    parser.add_argument("--choice", choices=["auto", "required", "named"], default="auto", help="the tool_choice")
    parser.add_argument("--prompt", choices=["plain", "tools"], default="plain", help="what the template writes")
    args = parser.parse_args()
    if args.prompt == "tools" and (args.shape == "demo" or args.choice != "auto"):
        parser.error("--prompt tools needs a random model, whose template it sets, and --choice auto")
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        serve = ["--tool-call-format", "hermes"]
        model = PROJECT_ROOT / DEFAULT_MODEL
        if args.shape != "demo":
            model = make_checkpoint(Path(folder) / args.shape, args.shape)
            write_tokenizer(model, SHAPES[args.shape][-1])
            if args.prompt == "tools":
                write_described_tools(model, SHAPES[args.shape][-1])
        process, url, _ = start_stack(model, Path(folder), serve)
        try:
            chats = f"{url}/v1/chat/completions"
            if args.prompt == "tools":
                asyncio.run(measure_prompts(chats, args.rounds))
            else:
                asyncio.run(measure(chats, args.rounds, args.choice))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
    return 0


def write_described_tools(folder: Path, size: int) -> None:
    """Give a checkpoint of `size` tokens a template that writes tools, a tokenizer of English, and a longer context."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    trainer = trainers.BpeTrainer(
        vocab_size=min(size, 8192),
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train([str(page) for page in sorted((PROJECT_ROOT / "docs").glob("*.md"))], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, field, change in (
        ("tokenizer_config.json", "chat_template", lambda template: template.replace(WRITES_NO_TOOLS, WRITES_TOOLS)),
        ("config.json", "max_position_embeddings", lambda _: 16_384),
    ):
        config = json.loads((folder / name).read_text())
        config[field] = change(config[field])
        (folder / name).write_text(json.dumps(config))


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
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": WRITES_NO_TOOLS + "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


async def measure(url: str, rounds: int, choice: str) -> None:
    """Print the ratios of each round, and their median. choice: the mode of `tool_choice`."""
    made = tool if choice == "auto" else long_tool
    tools: dict[str, Any] = {"tools": [made(number) for number in range(TOOLS)]}
    tools |= {"tool_choice": NAMED if choice == "named" else choice}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        await stream(session, url, tools, 1)
        await stream(session, url, {}, 1)
        firsts, steps = [], []
        for number in range(rounds):
            kinds: Sequence[dict[str, Any]] = ({}, tools) if number % 2 else (tools, {})
            first: dict[bool, float] = {}
            for extra in kinds:
                # A forced call begins with tokens that are no part of its name: the first text comes after some.
                found = [await stream(session, url, extra, 1 if choice == "auto" else 32, seed) for seed in FIRSTS]
                first[bool(extra)] = median(one[0] for one in found)
            step: dict[bool, float] = {}
            for extra in kinds:
                calls = [stream(session, url, extra, TOKENS, seed) for seed in range(CONCURRENCY)]
                step[bool(extra)] = median(gap for _, gap in await asyncio.gather(*calls))
            firsts.append(first[True] / first[False])
            steps.append(step[True] / step[False])
            print(
                f"round {number}: first text {1e3 * first[True]:.2f} ms with {TOOLS} tools, "
                f"{1e3 * first[False]:.2f} ms without: {firsts[-1]:.2f}; between tokens of {CONCURRENCY} streams "
                f"{1e3 * step[True]:.2f} ms with, {1e3 * step[False]:.2f} ms without: {steps[-1]:.2f}"
            )
    # The first text of a forced call is the name of its tool, after several tokens: no first token.
    shown = (("first token", firsts), ("step time", steps))
    for name, ratios in shown if choice == "auto" else shown[1:]:
        show(name, ratios)


async def measure_prompts(url: str, rounds: int) -> None:
    """Print the ratios of the first tokens of prompts with tools, for new and for cached prompts."""
    tools = [described_tool(number) for number in range(TOOLS)]
    text = "".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in tools)
    kinds: list[tuple[dict[str, Any], str]] = [({"tools": tools}, QUESTION), ({}, text + QUESTION)]
    ratios: dict[str, list[float]] = {"new prompts": [], "cached prompts": []}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        for number in range(rounds):
            first: dict[tuple[str, bool], float] = {}
            for extra, question in kinds if number % 2 else kinds[::-1]:
                for cache in ratios:
                    # Prompts share memory under the same salt only.
                    salt = f"{number} {bool(extra)}"
                    is_new = cache == "new prompts"
                    if is_new:
                        salts = [f"{salt} {seed}" for seed in NEW_PROMPTS]
                    else:
                        salts = [salt for _ in FIRSTS]
                        await stream(session, url, {**extra, "cache_salt": salt}, 1, 0, question)
                    found = [
                        await stream(session, url, {**extra, "cache_salt": one}, 1, 0, question, is_new)
                        for one in salts
                    ]
                    first[cache, bool(extra)] = median(one[0] for one in found)
            for cache, all_ratios in ratios.items():
                all_ratios.append(first[cache, True] / first[cache, False])
                print(
                    f"round {number}: first token of {cache} {1e3 * first[cache, True]:.2f} ms with {TOOLS} tools, "
                    f"{1e3 * first[cache, False]:.2f} ms with their text: {all_ratios[-1]:.2f}"
                )
    for cache, all_ratios in ratios.items():
        show(f"first token, {cache}", all_ratios)


def show(name: str, ratios: Sequence[float]) -> None:
    print(f"{name}: {median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f})")


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    extra: dict[str, Any],
    tokens: int,
    seed: int = 0,
    question: str = QUESTION,
    is_new: bool = False,
) -> tuple[float, float]:
    """Return the seconds to the first text or call of a chat, and the mean of those between its tokens after that.

    is_new: `extra` has a cache salt, and the prompt must not be in the prefix cache.
    """
    for attempt in range(10):  # an answer of a few tokens may have only parts of characters, and no text
        if is_new:
            extra = extra | {"cache_salt": f"{extra['cache_salt']}."}
        began, arrivals = await _arrivals(session, url, extra, tokens, seed + 1000 * attempt, question)
        if arrivals:
            (first, first_position), (last, last_position) = arrivals[0], arrivals[-1]
            return first - began, (last - first) / max(1, last_position - first_position)
    raise SystemExit("ten answers had no text")


async def _arrivals(
    session: aiohttp.ClientSession, url: str, extra: dict[str, Any], tokens: int, seed: int, question: str
) -> tuple[float, list[tuple[float, int]]]:
    """Return when a chat was sent, and for each event with text or a call when it came and the tokens so far."""
    messages = [{"role": "user", "content": question}]
    body = {"model": "bench", "messages": messages, "stream": True, "max_tokens": tokens, "seed": seed, **extra}
    began = clock()
    arrivals: list[tuple[float, int]] = []
    # The id of an event is the number of tokens so far; clients of this library get ids if they ask for events.
    async with session.post(url, json=body, headers={"Accept": "text/event-stream"}) as response:
        if response.status != 200:
            raise SystemExit(f"a chat failed: {await response.text()}")
        position = 0
        async for line in response.content:
            if line.startswith(b"id: "):
                position = int(line[4:].split(b".")[0])
            if not line.startswith(b"data: {"):
                continue
            data = json.loads(line[6:])
            if "error" in data:
                raise SystemExit(f"a chat failed: {data['error']['message']}")
            delta = data["choices"][0]["delta"]
            if delta.get("content") or delta.get("tool_calls"):
                arrivals.append((clock(), position))
    return began, arrivals


if __name__ == "__main__":
    sys.exit(main())
