"""One worker per name: a second one is refused while the first lives, and the name of a dead one is free at once.

A worker notes in Redis which process it is. If that process is known to be gone (same machine, same process namespace),
whoever starts under its name takes it. Else its beats are waited for: one that beats has the name, one that is silent
has lost it, and ends itself when it wakes up and finds the name taken.
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from quire.shared.broker import Broker, NameHolder
from quire.shared.redis.clients import command_client
from quire.worker.errors import WorkerStartError

# Who has not beaten for so many of its beats is silent.
SILENT_BEATS = 3


class NameTaken(WorkerStartError):
    """Another worker lives under this worker's name."""

    def __init__(self, worker_id: str, holder: NameHolder) -> None:
        super().__init__(
            f"the worker id {worker_id!r} is in use: {_ProcessIdentity.parse(holder.home).shown} beats under it. "
            "Give each worker of a model its own --worker-id (QUIRE_WORKER_ID), or stop the other one."
        )


@dataclass(frozen=True, slots=True)
class _ProcessIdentity:
    """A process: where it runs, its id there and when it started, in the kernel's ticks ('' where /proc lacks)."""

    host: str = ""
    machine: str = ""
    pid: str = ""
    started: str = ""

    @classmethod
    def parse(cls, text: str) -> _ProcessIdentity:
        parts = text.split("/")
        return cls(*parts) if len(parts) == 4 else cls()

    def __str__(self) -> str:
        return "/".join((self.host, self.machine, self.pid, self.started))

    @property
    def shown(self) -> str:
        return f"process {self.pid} on {self.host}" if self.pid else "another worker"


def home() -> str:
    """This process, as `is_gone` understands it on any machine."""
    host = socket.gethostname().replace("/", "")
    return str(_ProcessIdentity(host, _machine(), str(os.getpid()), _started("self")))


def is_gone(text: str) -> bool:
    """Whether a process certainly runs no more. One on another machine, or in another container, may."""
    there = _ProcessIdentity.parse(text)
    machine = _machine()
    if not machine or there.machine != machine or not there.pid.isdigit():
        return False
    return _started(there.pid) != there.started


def _machine() -> str:
    """The boot of this machine and the process namespace of this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}+{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: str) -> str:
    """When a process of this machine started; '' if it runs no more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


async def take_name(broker: Broker, worker_id: str, incarnation: str, beat_s: float) -> None:
    """From now on `incarnation` is the worker of this name. Raises NameTaken."""
    before = ""
    while not await broker.enlist(worker_id, incarnation, home(), beat_s, before):
        before = await _free(broker, worker_id, beat_s)


async def check_name(redis_url: str, lane: str, worker_id: str, beat_s: float) -> None:
    """Raises NameTaken if a worker lives under the name."""
    client = command_client(redis_url, lane, connections=1)
    try:
        await _free(Broker(client, lane), worker_id, beat_s)
    finally:
        await client.aclose()


async def _free(broker: Broker, worker_id: str, beat_s: float) -> str:
    """The incarnation of the dead worker that has the name, '' if none has it. Raises NameTaken."""
    first = await broker.holder(worker_id)
    if first is None or is_gone(first.home):
        return first.incarnation if first else ""
    loop = asyncio.get_running_loop()
    until = loop.time() + SILENT_BEATS * max(beat_s, first.beat_s)
    while loop.time() < until:
        await asyncio.sleep(beat_s / 4)
        holder = await broker.holder(worker_id)
        if holder is None:
            return ""
        if holder.incarnation != first.incarnation or holder.beat_ms != first.beat_ms:
            raise NameTaken(worker_id, holder)
    return first.incarnation
