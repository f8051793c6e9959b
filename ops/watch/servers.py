"""`quire ps` and `quire stop`: the running `quire serve`s of this user, found by the locks of their state folders."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.ops.local.announcement import answers
from quire.ops.local.preconditions import EMBEDDED, read_lock
from quire.ops.local.processes import FileLock, is_running
from quire.ops.paths import resolve_state_dir
from quire.ops.watch.commands import OfStateFolder, StopSettings
from quire.ops.watch.words import duration, lines
from quire.shared.config.command_line import CommandError
from quire.shared.process.interrupts import raise_at_ctrl_c
from quire.shared.redis.url import redact

LOCK = "lock"
# Interval at which a server that stops at once is told again: signals that come together count once.
REPEAT_S = 0.2


@dataclass(frozen=True, slots=True)
class Server:
    """A `quire serve` that runs. started: unix time. url, redis and models are empty while it begins."""

    pid: int
    url: str
    redis: str
    models: list[str]
    started: float
    state_dir: str


def ps(settings: OfStateFolder, environ: Mapping[str, str]) -> int:
    """Print the running servers."""
    raise_at_ctrl_c()
    rows = [{**asdict(server), "state": _state(server)} for server in _of(settings, environ)]
    if settings.json:
        print(json.dumps(rows, indent=1))
        return 0
    now = time.time()
    table = [
        (
            str(row["pid"]),
            row["url"] or "-",
            row["state"],
            duration(now - row["started"]),
            ", ".join(row["models"]) or "-",
            row["state_dir"],
        )
        for row in rows
    ]
    if table:
        print("\n".join(lines(("PID", "URL", "STATE", "UP", "MODELS", "STATE FOLDER"), table)))
    else:
        print("no `quire serve` runs", file=sys.stderr)
    return 0


def stop(settings: StopSettings, environ: Mapping[str, str]) -> int:
    """Stop one server, or all of them, and print those that have ended. Raise CommandError."""
    raise_at_ctrl_c()
    servers, state_dir = _of(settings, environ), str(resolve_state_dir(settings.state_dir, environ))
    chosen = servers if settings.all else [server for server in servers if server.state_dir == state_dir]
    if not chosen:
        others = f"; others run: give --state-dir {servers[0].state_dir}, or --all" if servers else ""
        place = "" if settings.all else f" with the state folder {state_dir}"
        raise CommandError(f"no `quire serve` runs{place}{others or '; `quire ps` lists those that run'}")
    stopped = []
    for server in chosen:
        _end(server, settings.timeout_s, settings.now)
        stopped.append({"pid": server.pid, "state_dir": server.state_dir})
        if not settings.json:
            print(f"stopped {server.pid} ({server.url or 'it had not begun to listen'})", flush=True)
    if settings.json:
        print(json.dumps(stopped, indent=1))
    return 0


def running(folders: Iterable[Path], processes: Path = Path("/proc")) -> list[Server]:
    """Return the servers that hold the lock of one of these state folders, or that this user runs anywhere (Linux)."""
    found = {path: _holder(path) for path in (folder / LOCK for folder in folders)}
    for process in processes.glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if process.stat().st_uid == os.geteuid():
                for entry in (process / "fd").iterdir():
                    path = Path(os.readlink(entry))
                    if path.name == LOCK and (server := _holder(path, process.name)):
                        found[path] = server
    return sorted(filter(None, found.values()), key=lambda server: server.started)


def _holder(path: Path, opener: str = "") -> Server | None:
    """Return the server that holds a lock; None if it is free, or held by something else, such as a Redis.

    opener: the pid of a process that has the file open. The file must name this process, because its owner can write
    any pid into it. Without `opener`, the process that the file names must have the file open.
    """
    with suppress(OSError):
        holder = read_lock(path)
        if not holder.pid.isdecimal() or not holder.url:
            return None
        is_right = holder.pid == opener if opener else _has_open(holder.pid, path)
        if is_right and not _is_free(path):
            redis = "embedded" if holder.redis_url == EMBEDDED else redact(holder.redis_url)
            models = holder.models.split(",") if holder.models else []
            return Server(int(holder.pid), holder.url, redis, models, path.stat().st_mtime, str(path.parent))
    return None


def _has_open(pid: str, path: Path) -> bool:
    """Return whether a process runs and has a file open. Without /proc, return whether the process runs."""
    process, file = Path("/proc") / pid, path.stat()
    if not process.parent.joinpath("self").exists():
        return is_running(int(pid))
    for entry in (process / "fd").iterdir():
        with suppress(OSError):  # closed by now
            if os.path.samestat(entry.stat(), file):
                return True
    return False


def _is_free(path: Path, timeout_s: float = 0.0) -> bool:
    """Return whether no process holds the lock, at the latest after `timeout_s`."""
    lock = FileLock(path)
    try:
        return lock.acquire(timeout_s)
    finally:
        lock.close()


def _of(settings: OfStateFolder, environ: Mapping[str, str]) -> list[Server]:
    return running([resolve_state_dir(settings.state_dir, environ)])


def _state(server: Server) -> str:
    return "ready" if answers(server.url, "/readyz") else "not ready"


def _end(server: Server, timeout_s: float, now: bool) -> None:
    """Send SIGTERM, and wait until the lock is free and the process has ended. Raise CommandError."""
    lock, deadline = Path(server.state_dir) / LOCK, time.monotonic() + timeout_s
    _signal(server)
    while not _is_free(lock, min(REPEAT_S, max(0.0, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            raise CommandError(
                f"the `quire serve` {server.pid} has not ended after {timeout_s:g} s; give it more --timeout-s, or "
                "stop it with --now"
            )
        if now:
            _signal(server)
    with suppress(AttributeError, ProcessLookupError):  # no such call but in Linux, or the process has ended
        process = os.pidfd_open(server.pid)
        select.select([process], [], [], max(0.0, deadline - time.monotonic()))
        os.close(process)


def _signal(server: Server) -> None:
    try:
        os.kill(server.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise CommandError(f"the process {server.pid} is of another user; stop it as that user or as root") from error
