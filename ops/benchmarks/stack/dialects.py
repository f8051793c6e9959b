"""The gateway's processor time per streamed token of each API: chat, chat with tools, completions, Responses, Messages.

python -m quire.ops.benchmarks.stack.dialects                     all of them, about 90 seconds
python -m quire.ops.benchmarks.stack.dialects --only chat,tools --rounds 6

The APIs alternate: in each round, each one streams for `--seconds` to `--streams` clients from a worker that computes
nothing (`clockwork.py`). Counted are the processor time of the gateway's thread, and the tokens that it says it has
written, while streams neither begin nor end. Prints microseconds per token, and the ratio to chat of the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from quire.ops.benchmarks.stack.pair_processes import Pair, pair
from quire.ops.benchmarks.stack.stream_client import MODEL
from quire.ops.local.ports import free_port

# Tools of a call with tools.
TOOLS = 4
LENGTH = 3500
SETTLE_S = 0.4
_TOKENS = re.compile(r"^quire_completion_tokens_total\S* (\S+)$", re.MULTILINE)
_MESSAGES = [{"role": "user", "content": "w3 w4 w5"}]


class Api(NamedTuple):
    """A way to ask for a stream: a path, and a body without the name of the model."""

    path: str
    body: dict[str, Any]


def _tool(number: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"name": f"weather_{number}", "description": "The weather of a city.", "parameters": schema}


def apis() -> dict[str, Api]:
    """The measured APIs. The first one is what the others are compared with."""
    length = {"max_tokens": LENGTH}
    tools = [{"type": "function", "function": _tool(number)} for number in range(TOOLS)]
    typed = [{"type": "function", **_tool(number)} for number in range(TOOLS)]
    return {
        "chat": Api("/v1/chat/completions", {"messages": _MESSAGES, **length}),
        "tools": Api("/v1/chat/completions", {"messages": _MESSAGES, "tools": tools, **length}),
        "completions": Api("/v1/completions", {"prompt": [3, 4, 5], **length}),
        "responses": Api("/v1/responses", {"input": "w3 w4 w5", "max_output_tokens": LENGTH}),
        "responses-tools": Api("/v1/responses", {"input": "w3 w4 w5", "max_output_tokens": LENGTH, "tools": typed}),
        "messages": Api("/v1/messages", {"messages": _MESSAGES, "max_tokens": LENGTH}),
    }


class Reader(asyncio.Protocol):
    """One streamed call, whose data is dropped."""

    def __init__(self, port: int, api: Api) -> None:
        body = json.dumps({"model": MODEL, "stream": True, "temperature": 0, **api.body})
        self._head = (
            f"POST {api.path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        ).encode()
        self.transport: Any = None
        self.first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self._head)

    def data_received(self, data: bytes) -> None:
        if not self.first.done():
            self.first.set_result(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.first.done():
            self.first.set_result(b"")


def written_tokens(port: int) -> float:
    """The tokens that the gateway has written so far, by its own count."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return sum(map(float, _TOKENS.findall(response.read().decode())))


def cpu_s(pid: int) -> float:
    """Processor seconds of the main thread of a process so far."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


async def measure(found: Pair, internal_port: int, api: Api, streams: int, seconds: float) -> float:
    """Microseconds of the gateway's thread per written token."""
    loop = asyncio.get_running_loop()
    readers = [Reader(found.port, api) for _ in range(streams)]
    for reader in readers:
        await loop.create_connection(lambda reader=reader: reader, "127.0.0.1", found.port)  # type: ignore[misc]
    heads = await asyncio.gather(*(reader.first for reader in readers))
    if any(not head.startswith(b"HTTP/1.1 200 ") for head in heads):
        sys.exit(f"{api.path} answers {next(head for head in heads if b' 200 ' not in head[:13])[:2000]!r}")
    await asyncio.sleep(SETTLE_S)
    pid = found.gateway.pid
    tokens, used = await asyncio.to_thread(written_tokens, internal_port), cpu_s(pid)
    await asyncio.sleep(seconds)
    used = cpu_s(pid) - used
    tokens = await asyncio.to_thread(written_tokens, internal_port) - tokens
    for reader in readers:
        reader.transport.abort()
    await asyncio.sleep(SETTLE_S)  # until the gateway has cancelled them
    return 1e6 * used / tokens


async def rounds(args: argparse.Namespace) -> None:
    known = apis()
    names = args.only.split(",") if args.only else list(known)
    if unknown := set(names) - set(known):
        sys.exit(f"--only: no API {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    internal_port = free_port()
    flags = ["--internal-port", str(internal_port), "--tool-call-format", "hermes"]
    taken: dict[str, list[float]] = {name: [] for name in names}
    async with pair(args.step_ms, args.streams, flags) as found:
        await measure(found, internal_port, known[names[0]], args.streams, 0.5)
        for number in range(args.rounds):
            turn = names[number % len(names) :] + names[: number % len(names)]
            for name in turn:
                taken[name].append(await measure(found, internal_port, known[name], args.streams, args.seconds))
            print(f"round {number}: " + ", ".join(f"{name} {taken[name][-1]:.1f} us" for name in names), flush=True)
    base = taken[names[0]]
    for name, values in taken.items():
        ratios = [value / plain for value, plain in zip(values, base, strict=True)]
        print(
            f"{name:<16} {statistics.median(values):5.1f} us per token; of {names[0]}: "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"APIs with commas between, of {', '.join(apis())}")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0, help="measured time of one API in one round")
    parser.add_argument("--step-ms", type=float, default=10.0)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(rounds(args))


if __name__ == "__main__":
    main()
