"""Leases of worker names: one live worker per name.

A worker stores in Redis which process it is. If that process is known to be gone (same machine, same process
namespace), the next worker takes the name at once. Otherwise the next worker waits for a few heartbeats. If one comes,
it is refused; else it takes the name, and the silent process ends itself when it wakes up and finds the name taken.
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from quire.shared.process.errors import StartError
from quire.shared.protocol.broker import Broker, NameHolder
from quire.shared.redis.clients import command_client

# A worker that has missed this many heartbeats has lost its name.
SILENT_BEATS = 3


class NameTaken(StartError):
    """Another live worker has this worker's name."""

    def __init__(self, worker_id: str, holder: NameHolder) -> None:
        super().__init__(
            f"the worker id {worker_id!r} is in use: {_ProcessIdentity.parse(holder.home).shown} has it. "
            "Give each worker of a model its own --worker-id (QUIRE_WORKER_ID), or stop the other one."
        )


@dataclass(frozen=True, slots=True)
class _ProcessIdentity:
    """A process: its host, machine and id, and its start time in ticks of the kernel ('' without /proc)."""

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
    """Return the identity of this process, for `is_gone`."""
    host = socket.gethostname().replace("/", "")
    return str(_ProcessIdentity(host, _machine(), str(os.getpid()), _started("self")))


def is_gone(text: str) -> bool:
    """Return whether a process has certainly ended; False also for one on another machine or in another container."""
    there = _ProcessIdentity.parse(text)
    machine = _machine()
    if not machine or there.machine != machine or not there.pid.isdigit():
        return False
    return _started(there.pid) != there.started


def pid_here(text: str) -> int | None:
    """Return the pid of a process that runs on this machine, as this process sees it; None for any other process."""
    there = _ProcessIdentity.parse(text)
    is_here = there.pid.isdigit() and there.machine == _machine() != "" and _started(there.pid) == there.started
    return int(there.pid) if is_here else None


def _machine() -> str:
    """Return the boot of this machine and the process namespace of this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}+{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: str) -> str:
    """Return when a process of this machine started, in ticks of the kernel; '' if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


async def take_name(broker: Broker, worker_id: str, incarnation: str, beat_s: float) -> None:
    """Make `incarnation` the holder of the name. Raises NameTaken."""
    before = ""
    while not await broker.enlist(worker_id, incarnation, home(), beat_s, before):
        before = await _dead_holder(broker, worker_id, beat_s)


async def check_name(redis_url: str, lane: str, worker_id: str, beat_s: float) -> None:
    """Raise NameTaken if a live worker has the name."""
    client = command_client(redis_url, lane, connections=1)
    try:
        await _dead_holder(Broker(client, lane), worker_id, beat_s)
    finally:
        await client.aclose()


async def _dead_holder(broker: Broker, worker_id: str, beat_s: float) -> str:
    """Return the incarnation of the dead worker that holds the name; '' if the name is free. Raises NameTaken."""
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
