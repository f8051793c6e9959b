"""A real Redis for tests: one server process for the session, empty at the start of each test."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from quire.ops.local.embedded_redis import find_redis_server


class RedisServer:
    """One server on a unix socket. A test can kill and restart the server on this address, with or without its data."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}?db=0"

    def start(self) -> None:
        command = [find_redis_server(), "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self._folder)]
        # A Redis that does nothing else ends blocking reads on the ticks of its timer.
        command += ["--save", "", "--hz", "250", "--dynamic-hz", "no", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        with self.client() as client:
            deadline = time.monotonic() + 60
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    assert time.monotonic() < deadline, "redis-server does not start"
                    assert self._process.poll() is None, "redis-server ended at once"
                    time.sleep(0.005)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self.socket.unlink(missing_ok=True)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process during the block: the server neither answers nor closes a connection."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)


@contextmanager
def running_redis(*options: str) -> Iterator[RedisServer]:
    # The path of a unix socket has at most 107 characters, so pytest's temporary folder may be too long.
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        server = RedisServer(Path(folder), *options)
        server.start()
        try:
            yield server
        finally:
            server.kill()
