"""The children of `quire serve`: how each is started, what its log says, and when it is restarted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from quire.ops.local.embedded_redis import EmbeddedRedis
from quire.shared.config.command_line import CommandError
from quire.shared.process.backoff import Backoff
from quire.shared.process.processes import spawn
from quire.shared.process.start_pipe import PIPE, READY

FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 30.0
# After a child has run this long, its next restart uses the first backoff again.
HEALTHY_AFTER_S = 60.0
# A longer log is rotated at the next start. One older log is kept.
MAX_LOG_BYTES = 16 * 1024 * 1024
# Only the last bytes of a log are searched for the reason of a death.
MAX_REASON_BYTES = 65536
# Only the last bytes of the progress output are kept: more than its longest line.
MAX_PROGRESS_BYTES = 4096

# The last line of a command of Quire that fails, and a log line of level ERROR or CRITICAL.
_FINAL_LINE = re.compile(r"quire(?: \w+)?: (?P<message>.+)")
_ERROR_LINE = re.compile(r"\S+ \S+ (?:ERROR|CRITICAL)\s+.*?  (?P<message>.+)")


class StartPhase(NamedTuple):
    """A phase of the start of a process. `percent`: the finished part in digits; empty if that is unknown."""

    phase: str
    percent: str

    def __str__(self) -> str:
        return f"{self.phase} {self.percent} %" if self.percent else self.phase


class Program(Protocol):
    """A program that can be started any number of times."""

    name: str
    log_path: Path

    def start(self) -> subprocess.Popen[bytes]:
        """Start a process, without waiting until it is ready. Raise CommandError."""
        ...

    def reason(self) -> str:
        """Return why the last process ended, if its log tells; else empty."""
        ...


class ServiceProgram:
    """A gateway or a worker. Each has its own log, and reports the progress of its start through a pipe."""

    def __init__(
        self, name: str, command: Sequence[str], environ: Mapping[str, str], log_path: Path, keep: Sequence[int] = ()
    ) -> None:
        """`keep`: file descriptors that each process inherits."""
        self.name = name
        self._keep = keep
        self.log_path = log_path
        self._command = command
        self._environ = environ
        self._log_start = 0
        self._progress = -1  # read end of the pipe
        self._said = b""

    def start(self) -> subprocess.Popen[bytes]:
        try:
            self.log_path.parent.mkdir(exist_ok=True)
            if self.log_path.exists() and self.log_path.stat().st_size > MAX_LOG_BYTES:
                self.log_path.replace(self.log_path.with_suffix(".log.1"))
            log = self.log_path.open("ab")
        except OSError as error:
            raise CommandError(
                f"cannot write the log {self.log_path}: {error.strerror}; make room there, or pass another --state-dir"
            ) from error
        with log:
            self._log_start = log.tell()
            return self._spawn(log)

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        if self._progress >= 0:  # the pipe of the previous process
            os.close(self._progress)
        self._said = b""
        self._progress, writing = os.pipe()
        os.set_blocking(self._progress, False)
        try:
            return spawn(
                self._command, environ={**self._environ, PIPE: str(writing)}, output=log, keep=[writing, *self._keep]
            )
        finally:
            os.close(writing)

    def reason(self) -> str:
        lines = [line.strip() for line in self._lines() if line.strip()]
        for pattern in (_FINAL_LINE, _ERROR_LINE):
            for line in reversed(lines):
                if match := pattern.fullmatch(line):
                    return match["message"]
        return lines[-1] if lines else ""

    def phase(self) -> StartPhase:
        """Return the last phase that the process reported; `starting Python` before the first report."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._progress, 65536):
                self._said = (self._said + data)[-MAX_PROGRESS_BYTES:]
        lines = self._said.decode(errors="replace").split("\n")[:-1]  # the last line is incomplete or empty
        phase, _, percent = (lines[-1] if lines else "").partition("\t")
        return StartPhase(phase or "starting Python", percent)

    def _lines(self) -> list[str]:
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, 2)
                log.seek(max(self._log_start, size - MAX_REASON_BYTES))
                return [_as_text(line) for line in log.read().decode(errors="replace").splitlines()]
        except OSError:  # the log was deleted
            return []


def _as_text(line: str) -> str:
    """Return a line of the log as text, also if the service logs JSON."""
    if line.startswith("{"):
        try:
            record = json.loads(line)
            return f"{record['ts'].replace('T', ' ')} {record['level'].upper()} log  {record['msg']}"
        except (ValueError, KeyError, AttributeError, TypeError):
            pass
    return line


class RedisProgram:
    """The embedded Redis as a program."""

    name = "redis"

    def __init__(self, redis: EmbeddedRedis) -> None:
        self._redis = redis
        self.log_path = redis.log_path

    def start(self) -> subprocess.Popen[bytes]:
        self._redis.begin()
        assert self._redis.process is not None
        return self._redis.process

    def reason(self) -> str:
        return self._redis.why_it_ended()


class Child:
    """A program, and the process that runs it at the moment, if any."""

    def __init__(self, program: Program, clock: Callable[[], float] = time.monotonic) -> None:
        self.program = program
        self.process: subprocess.Popen[bytes] | None = None
        self.restart_at: float | None = None
        self._clock = clock
        self._started_at = 0.0
        self._backoff = Backoff(FIRST_BACKOFF_S, LAST_BACKOFF_S)

    @property
    def name(self) -> str:
        return self.program.name

    def start(self) -> None:
        """Start the program. Raise CommandError and OSError."""
        self.restart_at = None
        self._started_at = self._clock()
        self.process = self.program.start()

    def kill(self) -> None:
        """Kill the process as a crash would, with its own children. Its next start does not wait for long."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self._backoff.reset()

    def has_ended(self) -> bool:
        """Return whether the process has ended and its restart is not planned yet."""
        return self.process is not None and self.process.poll() is not None

    def how_it_ended(self) -> str:
        """Return `killed by SIGKILL`, or `exit code 1: <its last error>`."""
        assert self.process is not None
        code = self.process.returncode
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        reason = self.program.reason()
        return f"exit code {code}: {reason}" if reason and code else f"exit code {code}"

    def schedule_restart(self) -> float:
        """Plan the next start. Return the seconds until then, which double with every early death."""
        now = self._clock()
        if now - self._started_at > HEALTHY_AFTER_S:
            self._backoff.reset()
        wait_s = self._backoff.next()
        self.process = None
        self.restart_at = now + wait_s
        return wait_s

    def is_due(self) -> bool:
        """Return True once the time of the planned restart has come."""
        return self.restart_at is not None and self._clock() >= self.restart_at


def start_phases(workers: Sequence[ServiceProgram]) -> tuple[str, str]:
    """Return the phases of the workers that are not ready yet, as text with and without percentages.

    Workers in the same phase are counted together, with the percentage of the slowest. If all workers are ready, the
    start waits for a gateway.
    """
    phases: dict[str, list[tuple[int, str, str]]] = {}
    for worker in workers:
        phase = worker.phase()
        if phase.phase != READY:
            phases.setdefault(phase.phase, []).append((int(phase.percent or 0), str(phase), worker.name))
    if not phases:
        return ("gateway: starting",) * 2
    texts, plain = [], []
    for name, members in phases.items():
        who = members[0][2] if len(members) == 1 else f"{len(members)} workers"
        texts.append(f"{who}: {min(members)[1]}")
        plain.append(f"{who}: {name}")
    return ", ".join(texts), ", ".join(plain)
