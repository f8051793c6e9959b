"""What gateway and Redis add to an engine: time, processor and memory.

python -m ops.bench.pair                            all of it, about two minutes
python -m ops.bench.pair --only tokens,gaps --seconds 5

first     the first token, with an idle engine: from sending a request to its first token, less the engine's step
gaps      256 streams, a step every 20 ms: how late a token is at the client, and by how much gaps between tokens grow;
          and how long each process waited for a core, which says how much of that is the machine's
tokens    256 streams, a step every 6.4 ms, 40,000 tokens/s: processor time of gateway, worker and Redis per token
cancel    steps in which a request still has a part after the broker took its cancellation
memory    resident memory of the gateway per open stream

Redis, a gateway and a worker that computes nothing (`ops.bench.clockwork`), one client process beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgpack
import uvloop

from ops.bench.checkpoint import make_checkpoint
from ops.embedded_redis import EmbeddedRedis
from ops.processes import dying_with_parent
from ops.soak.chaos import answers, free_port
from shared.broker import Broker
from shared.redis_clients import command_client

MODEL = "clockwork"
PARTS = ("first", "gaps", "tokens", "cancel", "memory")
_ID = re.compile(rb"id: (\d+)(?:\.\d+)?\n")
_REQUEST = re.compile(rb'"id":\s*"cmpl-([0-9a-f]+)"')
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Stream(asyncio.Protocol):
    """One request; keeps what came, and when. Reading the clock is all that it does while tokens come."""

    def __init__(self, port: int, max_tokens: int, index: int) -> None:
        body = {"model": MODEL, "prompt": [2 + index % 1000, 3, 4], "max_tokens": max_tokens, "ignore_eos": True}
        text = json.dumps(body | {"stream": True, "temperature": 0})
        self._head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nContent-Length: {len(text)}\r\n\r\n{text}"
        ).encode()
        self.chunks: list[tuple[float, bytes]] = []
        self.sent_at = 0.0
        self.first = asyncio.get_running_loop().create_future()
        self.ended = asyncio.get_running_loop().create_future()
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.sent_at = time.monotonic()
        transport.write(self._head)

    def data_received(self, data: bytes) -> None:
        self.chunks.append((time.monotonic(), data))
        if not self.first.done() and b"id: " in data:
            self.first.set_result(None)
        if data.endswith(b"0\r\n\r\n") or data.startswith(b"HTTP/1.1 429 "):
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        for future in (self.first, self.ended):
            if not future.done():
                future.set_result(None)

    @property
    def request_id(self) -> str:
        found = _REQUEST.search(b"".join(data for _, data in self.chunks[:4]))
        assert found, self.chunks[:2]
        return found[1].decode()

    def arrivals(self) -> dict[int, float]:
        """By token, counted from 1: when it came. An event brings all tokens between the one before it and its own."""
        times: dict[int, float] = {}
        reached, rest = 0, b""
        for at, data in self.chunks:
            data = rest + data
            end = data.rfind(b"\n\n") + 1
            for token in _ID.findall(data, 0, end):
                times |= dict.fromkeys(range(reached + 1, int(token) + 1), at)
                reached = int(token)
            rest = data[end:]
        return times


async def open_stream(port: int, max_tokens: int, index: int = 0) -> Stream:
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(lambda: Stream(port, max_tokens, index), "127.0.0.1", port)
    return stream


@dataclass
class Pair:
    """The processes, and how to read their clocks."""

    folder: Path
    redis: EmbeddedRedis
    port: int
    gateway: subprocess.Popen[bytes]
    worker: subprocess.Popen[bytes]

    def steps(self) -> list[tuple[float, float, dict[str, int]]]:
        """End the worker; its steps."""
        self.worker.send_signal(signal.SIGTERM)
        self.worker.wait(30)
        found: list[tuple[float, float, dict[str, int]]] = msgpack.unpackb((self.folder / "steps").read_bytes())
        return found

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds so far, by process; of the worker's the thread that commits."""
        return {
            "gateway": _cpu_s(Path(f"/proc/{self.gateway.pid}/stat")),
            "commit": _cpu_s(Path(f"/proc/{self.worker.pid}/task/{self.worker.pid}/stat")),
            "redis": _cpu_s(Path(f"/proc/{self.redis_pid}/stat")),
        }

    def waited_s(self) -> dict[str, float]:
        """Seconds so far in which the main thread of a process wanted to run, and others had the cores."""
        pids = {"gateway": self.gateway.pid, "commit": self.worker.pid, "redis": self.redis_pid, "client": os.getpid()}
        return {name: _waited_s(pid) for name, pid in pids.items()}

    @cached_property
    def redis_pid(self) -> int:
        return int(re.search(r"process_id:(\d+)", self.redis_info())[1])  # type: ignore[index]

    def redis_info(self) -> str:
        from redis import Redis

        with Redis.from_url(self.redis.url) as client:
            return "\n".join(f"{name}:{value}" for name, value in client.info("server").items())


def _cpu_s(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _waited_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9


def resident_kib(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1])


def start(folder: Path, step_ms: float, sequences: int, gateway_flags: Sequence[str] = ()) -> Pair:
    """Start all processes; they may not be ready yet."""
    model = make_checkpoint(folder / "model", "tiny")
    redis = EmbeddedRedis(folder)
    redis.start()
    port = free_port()
    python = [sys.executable, "-m"]
    gateway = ["ops.cli", "gateway", str(model), "--redis-url", redis.url, "--served-model-name", MODEL]
    gateway += ["--port", str(port), "--log-level", "warning", *gateway_flags]
    worker = ["ops.bench.clockwork", "--redis-url", redis.url, "--step-ms", str(step_ms)]
    worker += ["--sequences", str(sequences), "--log", str(folder / "steps")]
    processes = [subprocess.Popen(dying_with_parent([*python, *command])) for command in (gateway, worker)]
    return Pair(folder, redis, port, *processes)


@asynccontextmanager
async def pair(step_ms: float, sequences: int = 256, gateway_flags: Sequence[str] = ()) -> AsyncIterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="quire-pair-") as folder:
        found = start(Path(folder), step_ms, sequences, gateway_flags)
        try:
            for _ in range(300):
                if answers(found.port, "/readyz"):
                    break
                await asyncio.sleep(0.1)
            else:
                raise TimeoutError("the gateway is not ready")
            yield found
        finally:
            for process in (found.gateway, found.worker):
                process.kill()
                process.wait()
            found.redis.stop()


def spread(values: list[float], unit: str = "ms", scale: float = 1000.0) -> str:
    ordered = sorted(values)
    p50, p99 = ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))]
    return f"p50 {scale * p50:.2f} {unit}, p99 {scale * p99:.2f} {unit}, longest {scale * ordered[-1]:.2f} {unit}"


def say(part: str, text: str) -> None:
    print(f"{part:8} {text}", flush=True)


async def first(requests: int) -> None:
    async with pair(step_ms=0) as found:
        streams = []
        before: dict[str, float] = {}
        for index in range(requests + 20):
            if index == 20:
                before = found.cpu_s()
            stream = await open_stream(found.port, 1, index)
            await stream.ended
            streams.append(stream)
            await asyncio.sleep(0.005)  # so that everything is idle again
        after = found.cpu_s()
        steps = found.steps()
    used = ", ".join(f"{name} {1000 * (after[name] - before[name]) / requests:.2f}" for name in after)
    say("first", f"processor time of a request, ms: {used}")
    took = {request_id: end - start for start, end, items in steps for request_id in items}
    added = [s.arrivals()[1] - s.sent_at - took[s.request_id] for s in streams[20:]]
    say("first", f"{requests} requests, added to the first token: {spread(added)}")


async def flow(
    step_ms: float, streams: int, seconds: float
) -> tuple[list[Stream], list[tuple[float, float, dict[str, int]]], dict[str, float]]:
    """Streams in full flow: what came, the worker's steps, and processor seconds between half a second and the end."""
    async with pair(step_ms, streams) as found:
        tokens = round(1000 * seconds / step_ms)
        opened = [await open_stream(found.port, tokens, index) for index in range(streams)]
        await asyncio.gather(*(stream.first for stream in opened))
        await asyncio.sleep(0.5)
        if opened[0].ended.done():
            sys.exit("the first stream had ended before the last one began: give more --seconds")
        before, waited, start = found.cpu_s(), found.waited_s(), time.monotonic()
        await opened[0].ended
        after, waited_after, end = found.cpu_s(), found.waited_s(), time.monotonic()
        await asyncio.gather(*(stream.ended for stream in opened))
        used = {name: after[name] - before[name] for name in after}
        used |= {f"{name} waited": waited_after[name] - waited[name] for name in waited}
        used |= {"from": start, "to": end}
        return opened, found.steps(), used


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
    waits = ", ".join(
        f"{name} {1000 * used[name + ' waited'] / taken:.1f}" for name in ("gateway", "commit", "redis", "client")
    )
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
    async with pair(step_ms=20, sequences=64) as found:
        client = command_client(found.redis.url, MODEL)
        broker = Broker(client, MODEL)
        cancelled: dict[str, float] = {}
        for index in range(requests):
            stream = await open_stream(found.port, 4000, index)
            await stream.first
            await asyncio.sleep(0.05 + index % 20 / 1000)
            request_id = stream.request_id
            await broker.cancel(request_id)
            cancelled[request_id] = time.monotonic()
            await stream.ended
        await client.aclose()
        steps = found.steps()
    after = [float(sum(start > at and name in items for start, _, items in steps)) for name, at in cancelled.items()]
    steps_after = spread(after, "steps", 1)
    say("cancel", f"{requests} requests, steps begun after it that still had a token of it: {steps_after}")


async def memory(streams: int) -> None:
    async with pair(step_ms=500, sequences=streams) as found:
        warm = [await open_stream(found.port, 3, index) for index in range(50)]
        await asyncio.gather(*(stream.ended for stream in warm))
        before = resident_kib(found.gateway.pid)
        opened = [await open_stream(found.port, 4000, index) for index in range(streams)]
        await asyncio.gather(*(stream.first for stream in opened))
        await asyncio.sleep(3)
        after = resident_kib(found.gateway.pid)
        say("memory", f"{streams} streams: {before} to {after} KiB, {(after - before) / streams:.1f} KiB each")
        for stream in opened:
            stream.transport.abort()


async def measure(args: argparse.Namespace) -> None:
    only = args.only.split(",") if args.only else PARTS
    if unknown := set(only) - set(PARTS):
        sys.exit(f"--only: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
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
    parser.add_argument("--gap-step-ms", type=float, default=20.0, help="from step to step in the part gaps")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(args))


if __name__ == "__main__":
    main()
