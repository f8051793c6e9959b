"""The cost of gateway and Redis in addition to the engine: time, processor and memory.

python -m quire.ops.benchmarks.stack.pair                            all of it, about two minutes
python -m quire.ops.benchmarks.stack.pair --only tokens,gaps --seconds 5

first     the first token, with an idle engine: from sending a request to its first token, less the engine's step
gaps      256 streams, a step every 20 ms: the delay of tokens at the client, the growth of gaps between tokens, and the
          time that each process waited for a core (the part of the delay that the machine causes)
tokens    256 streams, a step every 6.4 ms, 40,000 tokens/s: processor time of gateway, worker and Redis per token
cancel    steps that a request still takes part in after the broker accepted its cancellation
memory    resident memory of the gateway per open stream

The benchmark runs Redis, a gateway, a worker that computes nothing (`clockwork.py`), and one client process.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import uvloop

from quire.ops.benchmarks.stack.pair_processes import Steps, pair, resident_kib
from quire.ops.benchmarks.stack.stream_client import MODEL, Stream, open_stream
from quire.shared.protocol.broker import Broker
from quire.shared.redis.clients import command_client

PARTS = ("first", "gaps", "tokens", "cancel", "memory")


def spread(values: list[float], unit: str = "ms", scale: float = 1000.0) -> str:
    ordered = sorted(values)
    p50, p99 = ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))]
    return f"p50 {scale * p50:.2f} {unit}, p99 {scale * p99:.2f} {unit}, longest {scale * ordered[-1]:.2f} {unit}"


def say(part: str, text: str) -> None:
    print(f"{part:8} {text}", flush=True)


async def first(requests: int) -> None:
    async with pair(step_ms=0) as running:
        streams = []
        before: dict[str, float] = {}
        for index in range(requests + 20):
            if index == 20:
                before = running.cpu_s()
            stream = await open_stream(running.port, 1, index)
            await stream.ended
            streams.append(stream)
            await asyncio.sleep(0.005)  # until all processes are idle again
        after = running.cpu_s()
        steps = running.steps()
    used = ", ".join(f"{name} {1000 * (after[name] - before[name]) / requests:.2f}" for name in after)
    say("first", f"processor time of a request, ms: {used}")
    took = {request_id: end - start for start, end, items in steps for request_id in items}
    added = [s.arrivals()[1] - s.sent_at - took[s.request_id] for s in streams[20:]]
    say("first", f"{requests} requests, added to the first token: {spread(added)}")


async def flow(step_ms: float, streams: int, seconds: float) -> tuple[list[Stream], Steps, dict[str, float]]:
    """Measure running streams: the events, the worker's steps, and processor seconds after the first half second."""
    async with pair(step_ms, streams) as running:
        tokens = round(1000 * seconds / step_ms)
        opened = [await open_stream(running.port, tokens, index) for index in range(streams)]
        await asyncio.gather(*(stream.first for stream in opened))
        await asyncio.sleep(0.5)
        if opened[0].ended.done():
            sys.exit("the first stream had ended before the last one began: give more --seconds")
        before, waited, start = running.cpu_s(), running.waited_s(), time.monotonic()
        await opened[0].ended
        after, waited_after, end = running.cpu_s(), running.waited_s(), time.monotonic()
        await asyncio.gather(*(stream.ended for stream in opened))
        used = {name: after[name] - before[name] for name in after}
        used |= {f"{name} waited": waited_after[name] - waited[name] for name in waited}
        used |= {"from": start, "to": end}
        return opened, running.steps(), used


async def gaps(streams: int, step_ms: float, seconds: float) -> None:
    opened, steps, used = await flow(step_ms, streams, seconds)
    made: dict[str, dict[int, float]] = {}
    for _, end, items in steps:
        for request_id, token in items.items():
            made.setdefault(request_id, {})[token] = end
    late, grown = [], []
    for stream in opened:
        came, engine = stream.arrivals(), made[stream.request_id]
        for token, at in came.items():
            if used["from"] <= at <= used["to"]:
                late.append(at - engine[token])
                if token - 1 in came:
                    grown.append(at - came[token - 1] - engine[token] + engine[token - 1])
    say("gaps", f"{len(late)} tokens of {streams} streams, from the engine to the client: {spread(late)}")
    say("gaps", f"growth of the gaps between tokens: {spread(grown)}")
    taken = sum(used["from"] <= end <= used["to"] for _, end, _ in steps)
    say("gaps", f"the worker's thread that commits: {1000 * used['commit'] / taken:.2f} ms per step of {streams}")
    names = [name for name in used if name.endswith(" waited")]
    waits = ", ".join(f"{name.removesuffix(' waited')} {1000 * used[name] / taken:.1f}" for name in names)
    say("gaps", f"waiting for a core, ms of each step: {waits}")


async def tokens(streams: int, seconds: float) -> None:
    opened, steps, used = await flow(6.4, streams, seconds)
    took = used["to"] - used["from"]
    count = sum(used["from"] <= at <= used["to"] for stream in opened for at in stream.arrivals().values())
    say("tokens", f"{count / took:,.0f} tokens/s to {streams} streams for {took:.1f} s")
    for name in ("gateway", "commit", "redis"):
        micros = 1e6 * used[name] / count
        per_core = f"{1e6 / micros:,.0f} per core"
        say("tokens", f"{name:8} {used[name] / took:5.2f} cores, {micros:5.1f} us per token, {per_core}")
    taken = sum(used["from"] <= end <= used["to"] for _, end, _ in steps)
    say("tokens", f"{taken / took:.0f} steps/s, commit {1000 * used['commit'] / taken:.2f} ms per step")


async def cancel(requests: int) -> None:
    async with pair(step_ms=20, sequences=64) as running:
        client = command_client(running.redis.url, MODEL)
        broker = Broker(client, MODEL)
        cancelled: dict[str, float] = {}
        for index in range(requests):
            stream = await open_stream(running.port, 4000, index)
            await stream.first
            await asyncio.sleep(0.05 + index % 20 / 1000)
            request_id = stream.request_id
            await broker.cancel(request_id)
            cancelled[request_id] = time.monotonic()
            await stream.ended
        await client.aclose()
        steps = running.steps()
    after = [float(sum(start > at and name in items for start, _, items in steps)) for name, at in cancelled.items()]
    steps_after = spread(after, "steps", 1)
    say("cancel", f"{requests} requests, steps begun after it that still had a token of it: {steps_after}")


async def memory(streams: int) -> None:
    async with pair(step_ms=500, sequences=streams) as running:
        warm = [await open_stream(running.port, 3, index) for index in range(50)]
        await asyncio.gather(*(stream.ended for stream in warm))
        before = resident_kib(running.gateway.pid)
        opened = [await open_stream(running.port, 4000, index) for index in range(streams)]
        await asyncio.gather(*(stream.first for stream in opened))
        await asyncio.sleep(3)
        after = resident_kib(running.gateway.pid)
        say("memory", f"{streams} streams: {before} to {after} KiB, {(after - before) / streams:.1f} KiB each")
        for stream in opened:
            stream.transport.abort()


def counting_s() -> float:
    """Return the current speed of the machine: the time in which Python counts to a million."""
    began, total = time.perf_counter(), 0
    while total < 1_000_000:
        total += 1
    return time.perf_counter() - began


async def measure(args: argparse.Namespace) -> None:
    only = args.only.split(",") if args.only else PARTS
    if unknown := set(only) - set(PARTS):
        sys.exit(f"--only: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    say("machine", f"to count to a million in Python: {spread([counting_s() for _ in range(9)])}")
    if "first" in only:
        await first(args.requests)
    if "gaps" in only:
        await gaps(args.streams, args.gap_step_ms, args.seconds)
    if "tokens" in only:
        await tokens(args.streams, args.seconds)
    if "cancel" in only:
        await cancel(args.requests // 5)
    if "memory" in only:
        await memory(1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts, with commas between")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--gap-step-ms", type=float, default=20.0, help="from step to step in gaps")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(args))


if __name__ == "__main__":
    main()
