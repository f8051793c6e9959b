"""Server processes: start, readiness, and processor time and memory of a process with its descendants (Linux)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from quire.shared.config.command_line import CommandError
from quire.shared.process.processes import spawn

PROC = Path("/proc")
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.02
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ServerProcess:
    """One server under measurement, started by this process and ended with it.

    ready_s: seconds from the start to the first good answer of the page that tells readiness.
    """

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.name, self.log, self.ready_s = name, log, 0.0
        self._started = time.perf_counter()
        try:
            with log.open("wb") as output:
                self._process = spawn(command, environ=environ, output=output, death_signal=signal.SIGTERM)
        except OSError as error:
            raise CommandError(f"{name}: cannot start {command[0]}: {error.strerror}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, page: str) -> None:
        """Poll `page` until it answers with 200. Raise CommandError if the server ends before, or takes too long."""
        while not answers(page):
            if self._process.poll() is not None:
                raise CommandError(f"{self.name} ended before it was ready: {last_line(self.log)}")
            if time.perf_counter() - self._started > START_TIMEOUT_S:
                raise CommandError(f"{self.name} is not ready after {START_TIMEOUT_S:.0f} s: {last_line(self.log)}")
            time.sleep(POLL_S)
        self.ready_s = time.perf_counter() - self._started

    def cpu_s(self) -> float:
        """Return the processor time of the server so far, in seconds, with all its descendants."""
        return sum(_cpu_s(pid) for pid in self._pids())

    def memory_mib(self) -> float:
        """Return the resident memory in MiB, with all descendants. Pages that they share count once (PSS)."""
        return sum(_memory_mib(pid) for pid in self._pids())

    def stop(self) -> None:
        """Ask the server to end, then kill the rest of its process group."""
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _pids(self) -> list[int]:
        return [self._process.pid, *descendants(self._process.pid)]


def answers(page: str) -> bool:
    """Return whether `page` answers with 200."""
    try:
        with urllib.request.urlopen(page, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it wrote nothing"


def descendants(pid: int) -> list[int]:
    """Return the pids of all processes below `pid`."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (parent := _parent(int(entry.name))):
            children.setdefault(parent, []).append(int(entry.name))
    pids: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        pids += below
        waiting += below
    return pids


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command's name; empty if the process has ended."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


def _memory_mib(pid: int) -> float:
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)
