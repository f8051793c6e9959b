"""Redis, a gateway and a worker that computes nothing (`clockwork.py`), with their processor times."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgpack
from redis import Redis

from quire.ops.benchmarks.peers.processes import answers
from quire.ops.benchmarks.stack.checkpoint import make_checkpoint
from quire.ops.benchmarks.stack.stream_client import MODEL
from quire.ops.local.embedded_redis import EmbeddedRedis
from quire.ops.local.ports import free_port
from quire.shared.process.processes import dying_with_parent

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# [start, end, {request id: tokens so far}] of each step, on the monotonic clock.
Steps = list[tuple[float, float, dict[str, int]]]


@dataclass
class Pair:
    """Redis, a gateway and a worker. The worker's processor time is that of the thread that commits."""

    folder: Path
    port: int
    redis: EmbeddedRedis
    gateway: subprocess.Popen[bytes]
    # Runs the steps and writes their times into `folder`.
    worker: subprocess.Popen[bytes]
    # By name: the source of the processor time, and the process whose main thread can wait for a core.
    clocks: dict[str, Path]
    pids: dict[str, int]

    def steps(self) -> Steps:
        """End the worker, and return its steps."""
        self.worker.send_signal(signal.SIGTERM)
        self.worker.wait(30)
        steps: Steps = msgpack.unpackb((self.folder / "steps").read_bytes())
        return steps

    def cpu_s(self) -> dict[str, float]:
        """Return the processor seconds that were used so far."""
        return {name: _cpu_s(stat) for name, stat in self.clocks.items()}

    def waited_s(self) -> dict[str, float]:
        """Return the seconds so far in which the main thread of a process was runnable but had no core."""
        return {name: _waited_s(pid) for name, pid in {**self.pids, "client": os.getpid()}.items()}

    async def ready(self) -> None:
        for _ in range(300):
            if answers(f"http://127.0.0.1:{self.port}/readyz"):
                return
            await asyncio.sleep(0.1)
        raise TimeoutError("the server is not ready")


def _cpu_s(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _waited_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9


def resident_kib(pid: int) -> int:
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match
    return int(match[1])


def start(folder: Path, step_ms: float, sequences: int) -> Pair:
    """Start all processes, without waiting until they are ready."""
    model = make_checkpoint(folder / "model", "tiny")
    redis = EmbeddedRedis(folder)
    redis.start()
    port = free_port()
    flags = ["--redis-url", redis.url, "--served-model-name", MODEL, "--port", str(port), "--log-level", "warning"]
    gateway = _start("quire", "gateway", str(model), *flags)
    flags = ["--redis-url", redis.url, "--step-ms", str(step_ms), "--sequences", str(sequences)]
    worker = _start("quire.ops.benchmarks.stack.clockwork", *flags, "--log", str(folder / "steps"))
    with Redis.from_url(redis.url) as client:
        redis_pid = client.info("server")["process_id"]
    clocks = {
        "gateway": Path(f"/proc/{gateway.pid}/stat"),
        "commit": Path(f"/proc/{worker.pid}/task/{worker.pid}/stat"),
        "redis": Path(f"/proc/{redis_pid}/stat"),
    }
    pids = {"gateway": gateway.pid, "commit": worker.pid, "redis": redis_pid}
    return Pair(folder, port, redis, gateway, worker, clocks, pids)


def _start(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(dying_with_parent([sys.executable, "-m", module, *arguments]))


@asynccontextmanager
async def pair(step_ms: float, sequences: int = 256) -> AsyncIterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="quire-pair-") as folder:
        running = start(Path(folder), step_ms, sequences)
        try:
            await running.ready()
            yield running
        finally:
            for process in (running.gateway, running.worker):
                process.kill()
                process.wait()
            running.redis.stop()
