"""Compares two addresses that serve chats: calls per second, and the time to the first token.

    python -m quire.ops.benchmarks.stack.proxy http://127.0.0.1:8000/v1 http://127.0.0.1:4000/v1 --keys KEY_A,KEY_B \\
        --models demo,demo

For example a gateway, and a proxy such as LiteLLM in front of the same gateway. In each round each address gets calls
of one token for some seconds from concurrent clients, and then streamed calls one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import count
from statistics import median

import aiohttp

from quire.ops.loadgen.client import clock


@dataclass
class ComparedServer:
    """One of the compared addresses, and its result of each round."""

    url: str  # ends in /v1
    key: str
    model: str
    rates: list[float] = field(default_factory=list)  # calls per second
    firsts: list[float] = field(default_factory=list)  # median seconds to the first token

    def call(
        self, session: aiohttp.ClientSession, text: str, is_streamed: bool
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        messages = [{"role": "user", "content": text}]
        body = {"model": self.model, "messages": messages, "max_tokens": 1, "temperature": 0, "stream": is_streamed}
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return session.post(f"{self.url}/chat/completions", json=body, headers=headers)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m quire.ops.benchmarks.stack.proxy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("urls", nargs=2, metavar="URL", help="base addresses, which end in /v1")
    parser.add_argument("--keys", default=",", help="API key of each address, separated by a comma")
    parser.add_argument("--models", default="demo,demo", help="name of the model at each address")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a round of concurrent calls")
    parser.add_argument("--concurrency", type=int, default=32, help="concurrent calls")
    parser.add_argument("--calls", type=int, default=40, help="streamed calls of a round")
    args = parser.parse_args(argv)
    keys, models = args.keys.split(","), args.models.split(",")
    if len(keys) != 2 or len(models) != 2:
        parser.error("--keys and --models take one value for each address")
    addresses = [ComparedServer(*one) for one in zip(args.urls, keys, models, strict=True)]
    try:
        asyncio.run(measure(addresses, args.rounds, args.seconds, args.concurrency, args.calls))
    except (ValueError, aiohttp.ClientError) as error:
        print(f"proxy: {error}", file=sys.stderr)
        return 1
    for address in addresses:
        print(f"{address.url}: {spread(address.rates, 1)} calls/s, first token {spread(address.firsts, 1e3)} ms")
    first, second = addresses
    print(f"calls/s, first / second: {spread([a / b for a, b in zip(first.rates, second.rates, strict=True)], 1, 2)}")
    later = [b - a for a, b in zip(first.firsts, second.firsts, strict=True)]
    print(f"first token, second - first: {spread(later, 1e3)} ms")
    return 0


def spread(values: Sequence[float], factor: float, digits: int = 1) -> str:
    """Return median, least and greatest value as text."""
    shown = (f"{value * factor:.{digits}f}" for value in (median(values), min(values), max(values)))
    return "{} ({} to {})".format(*shown)


async def measure(
    addresses: Sequence[ComparedServer], rounds: int, seconds: float, concurrency: int, calls: int
) -> None:
    """Measure in alternating rounds, after one that is not counted. Raises ValueError if a call fails."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        for address in addresses:
            await rate(session, address, min(seconds, 2.0), concurrency)
        for _ in range(rounds):
            for address in addresses:
                address.rates.append(await rate(session, address, seconds, concurrency))
                found = [await first_token(session, address, f"Hello {number}") for number in range(calls)]
                address.firsts.append(median(found))


async def rate(session: aiohttp.ClientSession, address: ComparedServer, seconds: float, concurrency: int) -> float:
    """Return the calls per second of concurrent clients."""
    numbers, began, done = count(), clock(), 0

    async def one_client() -> None:
        nonlocal done
        while clock() < began + seconds:
            async with address.call(session, f"Hello {next(numbers)}", False) as response:
                text = await response.text()
                if response.status != 200:
                    raise ValueError(f"{address.url}: a call failed: {text[:300]}")
                done += 1

    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    return done / (clock() - began)


async def first_token(session: aiohttp.ClientSession, address: ComparedServer, text: str) -> float:
    """Return the seconds to the first event with text, or to the end of an answer without text."""
    began = clock()
    first = 0.0
    async with address.call(session, text, True) as response:
        if response.status != 200:
            raise ValueError(f"{address.url}: a call failed: {(await response.text())[:300]}")
        async for line in response.content:
            empty = (b'"content":""', b'"content": ""', b'"content":null', b'"content": null')
            if not first and b'"content"' in line and not any(one in line for one in empty):
                first = clock() - began
    return first or clock() - began


if __name__ == "__main__":
    sys.exit(main())
