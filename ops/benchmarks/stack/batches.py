"""Time to the first token of interactive calls, with a batch that fills the engine and without one.

python -m quire.ops.benchmarks.stack.batches                          four rounds on the small random checkpoint
python -m quire.ops.benchmarks.stack.batches --shape llama135m --rate 1 --seconds 60

`quire serve` with one worker. Interactive calls arrive at random times (Poisson); every second round runs next to a
batch whose lines would last far longer than the round. It is cancelled at the end of the round. The rounds alternate,
because the machine may be slower in one minute than in another. `--serve-args` passes flags to the server, such as
`--batch-lines-in-flight 4`: the fewer sequences of a batch run, the shorter is a step of the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from quire.ops.benchmarks.stack.__main__ import start_stack
from quire.ops.benchmarks.stack.checkpoint import SHAPES, make_checkpoint
from quire.ops.benchmarks.stack.pair import spread

MODEL, PATH = "bench", "/v1/completions"
PROMPT_TOKENS, ANSWER_TOKENS, LINE_TOKENS = 32, 16, 200
# Lines of a batch per second of a round: more than a worker on two cores computes of the smallest checkpoint.
LINES_PER_S = 400
# Seconds after the creation of a batch, until the engine is full.
WARM_UP_S = 3.0


@dataclass
class Round:
    """Times of interactive calls in one round, and the number of lines of the batch that ended meanwhile."""

    first_s: list[float] = field(default_factory=list)
    lines: int = 0


class Client:
    """A client of the server at `url`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, vocab_size: int, seed: int) -> None:
        self._session = session
        self._url = url
        self._vocab_size = vocab_size
        self._draw = random.Random(seed)

    def _prompt(self) -> list[int]:
        return [self._draw.randrange(2, self._vocab_size) for _ in range(PROMPT_TOKENS)]

    async def ask(self, found: Round) -> None:
        """Send one interactive call, and note its time to the first token."""
        body = {"model": MODEL, "prompt": self._prompt(), "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        body |= {"stream": True, "temperature": 0, "priority": "interactive"}
        began = time.perf_counter()
        first = 0.0
        async with self._session.post(self._url + PATH, json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not first and line.startswith(b"data: {"):
                    first = time.perf_counter() - began
        found.first_s.append(first)

    async def offer(self, rate: float, seconds: float, found: Round) -> None:
        """Send calls at random times, and wait for their ends."""
        start = at = time.monotonic()
        calls = []
        while (at := at + self._draw.expovariate(rate)) < start + seconds:
            await asyncio.sleep(at - time.monotonic())
            calls.append(asyncio.create_task(self.ask(found)))
        await asyncio.gather(*calls)

    async def _call(self, method: str, path: str, **options: Any) -> Any:
        async with self._session.request(method, self._url + path, **options) as response:
            response.raise_for_status()
            return await response.json()

    async def batch(self, count: int) -> str:
        """Create a batch of this many lines. Returns its id."""
        lines = []
        for number in range(count):
            body = {"model": MODEL, "prompt": self._prompt(), "max_tokens": LINE_TOKENS, "ignore_eos": True}
            lines.append({"custom_id": str(number), "method": "POST", "url": PATH, "body": body})
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "".join(json.dumps(line) + "\n" for line in lines), filename="lines.jsonl")
        file = await self._call("POST", "/v1/files", data=form)
        given = {"input_file_id": file["id"], "endpoint": PATH, "completion_window": "24h"}
        found: str = (await self._call("POST", "/v1/batches", json=given))["id"]
        return found

    async def lines(self, batch_id: str) -> int:
        """Return the lines of a batch that have ended."""
        counts = (await self._call("GET", f"/v1/batches/{batch_id}"))["request_counts"]
        return int(counts["completed"])

    async def cancel(self, batch_id: str) -> None:
        """Cancel a batch, and wait for its end. Raises ValueError if all its lines have ended already."""
        batch = await self._call("POST", f"/v1/batches/{batch_id}/cancel")
        while batch["status"] != "cancelled":
            await asyncio.sleep(0.2)
            batch = await self._call("GET", f"/v1/batches/{batch_id}")
            if batch["status"] == "completed":
                raise ValueError("the batch ended before its round did: raise LINES_PER_S")


async def measure(args: argparse.Namespace, url: str, vocab_size: int) -> None:
    """Measure rounds in turn, and print each and the comparison."""
    alone, beside = Round(), Round()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        client = Client(session, url, vocab_size, args.seed)
        await client.offer(args.rate, 5, Round())
        for _ in range(args.rounds):
            await client.offer(args.rate, args.seconds, alone)
            batch_id = await client.batch(int(LINES_PER_S * (WARM_UP_S + args.seconds)))
            await asyncio.sleep(WARM_UP_S)
            before = await client.lines(batch_id)
            await client.offer(args.rate, args.seconds, beside)
            beside.lines += await client.lines(batch_id) - before
            await client.cancel(batch_id)
    rate = beside.lines / (args.rounds * args.seconds)
    print(f"alone             first token of {len(alone.first_s)} calls: {spread(alone.first_s)}")
    print(f"next to a batch   first token of {len(beside.first_s)} calls: {spread(beside.first_s)}; {rate:.1f} lines/s")
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        one, other = (sorted(found.first_s) for found in (alone, beside))
        ratio = other[int(share * (len(other) - 1))] / one[int(share * (len(one) - 1))]
        print(f"{name} of the time to the first token: {ratio:.2f} times that without a batch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--rate", type=float, default=4.0, help="interactive calls per second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=2, help="with a batch, and as many without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve-args", default="", help="further arguments of `quire serve`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        model = make_checkpoint(Path(folder) / args.shape, args.shape)
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        process, url, _ = start_stack(model, Path(folder), args.serve_args.split())
        try:
            asyncio.run(measure(args, url, vocab_size))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


if __name__ == "__main__":
    main()
