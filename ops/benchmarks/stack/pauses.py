"""Pauses of streams whose worker is killed or stopped.

python -m quire.ops.benchmarks.stack.pauses          ten kills and ten clean stops, 32 streams each, leases of 3 s
python -m quire.ops.benchmarks.stack.pauses --rounds 3 --streams 8

The benchmark runs Redis, a gateway and two workers with a tiny random model. In each round one of the workers ends
while all streams run, and is restarted afterwards. The pause of a stream is the longest time between two of its events.
Streams of the other worker are not counted, because they do not pause.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from redis import Redis

from quire.ops.benchmarks.soak.chaos import RestartedProcess, answers
from quire.ops.benchmarks.stack.checkpoint import make_checkpoint
from quire.ops.local.embedded_redis import EmbeddedRedis
from quire.ops.local.ports import free_port
from quire.shared.keys import LaneKeys

MODEL = "pauses"
KEYS = LaneKeys(MODEL)
# Time until all streams run, and until the streams of the ended worker continue on the other one.
BEFORE_S, AFTER_S = 1.0, 6.0


async def follow(session: aiohttp.ClientSession, url: str, index: int, stop: asyncio.Event) -> tuple[str, list[float]]:
    """Read a long stream until told to stop. Returns the id of its request, and the arrival times of its events."""
    body: dict[str, Any] = {"model": MODEL, "prompt": [2 + index, 3, 4], "max_tokens": 4000, "ignore_eos": True}
    times: list[float] = []
    request_id = ""
    async with session.post(f"{url}/v1/completions", json=body | {"stream": True, "temperature": 0}) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                request_id = request_id or json.loads(line[6:])["id"].removeprefix("cmpl-")
            if stop.is_set():
                break
    return request_id, times


async def one_round(
    url: str, workers: list[RestartedProcess], redis: Redis, streams: int, number: signal.Signals
) -> list[float]:
    """The pauses of the streams whose worker ended."""
    stop = asyncio.Event()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        tasks = [asyncio.create_task(follow(session, url, index, stop)) for index in range(streams)]
        await asyncio.sleep(BEFORE_S)
        victim = workers[0]
        owned = {
            key.decode().rpartition(":")[2]
            for key in redis.scan_iter(KEYS.prefix + "req:*")
            if redis.hget(key, "owner") == victim.name.encode() and redis.hget(key, "state") == b"running"
        }
        victim.send(number)
        await asyncio.sleep(AFTER_S)
        stop.set()
        followed = await asyncio.gather(*tasks)
    pauses = []
    for request_id, times in followed:
        if request_id in owned:
            pauses.append(max(b - a for a, b in pairwise(times)))
    return pauses


async def wait_ready(services: list[RestartedProcess]) -> None:
    for _ in range(600):
        for service in services:
            if not service.is_running:
                service.start()
        if all(service.is_ready for service in services):
            return
        await asyncio.sleep(0.1)
    raise TimeoutError("not everything came up")


async def measure(rounds: int, streams: int, folder: Path) -> None:
    model = make_checkpoint(folder / "model", "tiny")
    redis_server = EmbeddedRedis(folder)
    redis_server.start()
    common = [str(model), "--redis-url", redis_server.url, "--served-model-name", MODEL]
    services = []
    for name in ("a", "b"):
        port = free_port()
        command = ["worker", *common, "--worker-id", name, "--internal-port", str(port), "--threads", "1"]
        command += ["--drain-s", "0.2", "--dtype", "float32"]
        services.append(RestartedProcess(name, command, partial(answers, port, "/health"), folder / "log"))
    port = free_port()
    gateway = RestartedProcess(
        "g", ["gateway", *common, "--port", str(port)], lambda: answers(port, "/healthz"), folder / "log"
    )
    try:
        with Redis.from_url(redis_server.url) as redis:
            for name, number in (("killed", signal.SIGKILL), ("told to stop", signal.SIGTERM)):
                pauses: list[float] = []
                for _ in range(rounds):
                    await wait_ready([*services, gateway])
                    pauses += await one_round(f"http://127.0.0.1:{port}", services, redis, streams, number)
                pauses.sort()
                print(
                    f"worker {name}: {len(pauses)} streams, pause p50 {pauses[len(pauses) // 2]:.2f} s, "
                    f"p99 {pauses[int(0.99 * (len(pauses) - 1))]:.2f} s, longest {pauses[-1]:.2f} s",
                    flush=True,
                )
    finally:
        for service in (*services, gateway):
            service.end()
        redis_server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-pauses-") as folder:
        asyncio.run(measure(args.rounds, args.streams, Path(folder)))


if __name__ == "__main__":
    main()
