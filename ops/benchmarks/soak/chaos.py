"""Faults for a running stack: a seeded schedule of kills, stops and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.ops.local.embedded_redis import EmbeddedRedis
from quire.shared.process.processes import dying_with_parent

# Relative frequency of each fault.
FAULTS = {
    "kill worker": 6,
    "kill gateway": 3,
    "stop worker": 3,
    "drain worker": 3,
    "drain gateway": 2,
    "kill redis": 1,
}
# Faults of workers that consist of several ranks.
OF_RANKS = {"kill rank": 4, "stop rank": 2}
# A worker that is stopped for longer than its lease no longer owns its requests when it continues.
STOPPED_S = (0.5, 5.0)
START_TIMEOUT_S = 120.0


@dataclass(slots=True)
class ChaosFault:
    """A fault that was carried out; times are in seconds since the start."""

    at: float
    what: str
    whom: str


class RestartedProcess:
    """A process that is restarted whenever it has ended."""

    def __init__(self, name: str, command: list[str], ready: Callable[[], bool], log: Path) -> None:
        self.name = name
        self._command = command
        self._ready = ready
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            command = dying_with_parent([sys.executable, "-m", "quire", *self._command])
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def is_ready(self) -> bool:
        return self.is_running and self._ready()

    def send(self, number: signal.Signals) -> None:
        if self.is_running:
            assert self.process is not None
            self.process.send_signal(number)

    def other_ranks(self) -> list[int]:
        """Return the pids of the other ranks of a ready worker."""
        assert self.process is not None
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for task in tasks for pid in task.read_text().split()]

    def end(self) -> None:
        if self.process is not None:
            self.send(signal.SIGCONT)
            self.process.kill()
            self.process.wait()


class Chaos:
    """Carries out the schedule. The last ready worker and the last ready gateway are never stopped."""

    def __init__(
        self,
        workers: list[RestartedProcess],
        gateways: list[RestartedProcess],
        redis: EmbeddedRedis,
        seed: int,
        pause_s: float,
        ranks: int = 1,
    ) -> None:
        self._groups = {"worker": workers, "gateway": gateways}
        self._kinds = FAULTS | (OF_RANKS if ranks > 1 else {})
        self._redis = redis
        self._random = random.Random(seed)
        self._pause_s = pause_s
        self._started = time.monotonic()
        self.faults: list[ChaosFault] = []

    async def run(self, until: asyncio.Event) -> None:
        """Carry out faults one by one, with a mean pause of `pause_s`, until told to stop."""
        while not until.is_set():
            await asyncio.sleep(self._random.uniform(0.3, 1.7) * self._pause_s)
            self._mend()
            (what,) = self._random.choices(list(self._kinds), list(self._kinds.values()))
            await self._do(what)

    def _mend(self) -> None:
        for group in self._groups.values():
            for service in group:
                if not service.is_running:
                    service.start()

    async def _do(self, what: str) -> None:
        verb, kind = what.split()
        if kind == "redis":
            self._note(what, "redis")
            process = self._redis.process
            assert process is not None
            process.kill()
            process.wait()
            await asyncio.sleep(self._random.uniform(0.1, 1.0))
            self._redis.start()
            return
        ready = [service for service in self._groups["worker" if kind == "rank" else kind] if service.is_ready]
        if len(ready) < 2:
            return
        service = self._random.choice(ready)
        self._note(what, service.name)
        if kind == "rank":
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # the worker may end meanwhile
                await self._do_to_rank(verb, self._random.choice(service.other_ranks()))
            return
        if verb == "kill":
            service.send(signal.SIGKILL)
        elif verb == "drain":
            service.send(signal.SIGTERM)
        else:
            service.send(signal.SIGSTOP)
            await asyncio.sleep(self._random.uniform(*STOPPED_S))
            service.send(signal.SIGCONT)

    async def _do_to_rank(self, verb: str, pid: int) -> None:
        os.kill(pid, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
        if verb == "stop":
            await asyncio.sleep(self._random.uniform(*STOPPED_S))
            os.kill(pid, signal.SIGCONT)

    def _note(self, what: str, whom: str) -> None:
        self.faults.append(ChaosFault(time.monotonic() - self._started, what, whom))

    async def mend_all(self) -> None:
        """Restart all processes and wait until they are ready."""
        deadline = time.monotonic() + START_TIMEOUT_S
        services = [service for group in self._groups.values() for service in group]
        for service in services:
            service.send(signal.SIGCONT)
        while not all(service.is_ready for service in services):
            self._mend()
            if time.monotonic() > deadline:
                raise TimeoutError("not everything came up again")
            await asyncio.sleep(0.1)
