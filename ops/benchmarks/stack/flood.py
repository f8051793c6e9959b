"""Time to the first token of accepted requests under increasing load: a bounded queue keeps it constant.

python -m quire.ops.benchmarks.stack.flood                           a minute and a half
python -m quire.ops.benchmarks.stack.flood --loads 1,10 --seconds 30

Redis, a gateway whose queue takes `--queued` requests, and a worker that computes nothing (`clockwork.py`) with 8 rows
and steps of 50 ms. An answer has 20 tokens, so 8 requests per second are served; `--loads` are multiples of that.
Requests arrive at random times (Poisson), independent of earlier ones.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import time

import uvloop

from quire.ops.benchmarks.stack.pair import spread
from quire.ops.benchmarks.stack.pair_processes import pair
from quire.ops.benchmarks.stack.stream_client import Stream, open_stream

ROWS, STEP_MS, TOKENS = 8, 50.0, 20
CAPACITY = 1000 * ROWS / (STEP_MS * TOKENS)  # requests per second
_RETRY = re.compile(rb"(?i)retry-after: (\d+)")


async def offer(port: int, rate: float, seconds: float, draw: random.Random) -> list[Stream]:
    """Send requests at `rate` per second for `seconds`. Returns all of them after they have ended."""
    sent: list[Stream] = []
    start = at = time.monotonic()
    while (at := at + draw.expovariate(rate)) < start + seconds:
        await asyncio.sleep(at - time.monotonic())
        sent.append(await open_stream(port, TOKENS, len(sent)))
    await asyncio.gather(*(stream.ended for stream in sent))
    return sent


def first_tokens(streams: list[Stream]) -> list[float]:
    """Seconds from each accepted request to its first token."""
    return [min(times.values()) - stream.sent_at for stream in streams if (times := stream.arrivals())]


def refusals(streams: list[Stream]) -> list[int]:
    """The values of Retry-After of the refused requests, in seconds."""
    heads = [b"".join(data for _, data in stream.chunks[:2]) for stream in streams]
    found = [_RETRY.search(head) for head in heads if head.startswith(b"HTTP/1.1 429 ")]
    return [int(retry[1]) for retry in found if retry]


async def measure(args: argparse.Namespace) -> None:
    draw = random.Random(args.seed)
    flags = ["--max-queued-requests", str(args.queued)]
    async with pair(STEP_MS, ROWS, flags) as found:
        await offer(found.port, CAPACITY / 2, 2, draw)
        print(f"{CAPACITY:g} requests/s are served, {args.queued} may wait; {args.seconds:g} s at each load")
        for load in map(float, args.loads.split(",")):
            streams = await offer(found.port, load * CAPACITY, args.seconds, draw)
            times, retries = first_tokens(streams), refusals(streams)
            assert len(times) + len(retries) == len(streams), "something was neither answered nor refused"
            again = f", to come again after {min(retries)} to {max(retries)} s" if retries else ""
            print(f"load {load:4g}  {len(streams)} sent, {len(retries)} refused{again}")
            print(f"{'':9}  first token of {len(times)} accepted: {spread(times)}", flush=True)
            alone = await offer_one(found.port)
            print(f"{'':9}  and of one right after the last of them: {1000 * alone:.1f} ms")


async def offer_one(port: int) -> float:
    stream = await open_stream(port, 1)
    await stream.ended
    return first_tokens([stream])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="0.5,1,2,10", help="multiples of what can be served, with commas between")
    parser.add_argument("--queued", type=int, default=8, help="requests that may wait")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
