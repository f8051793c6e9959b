"""Fixtures for all tests: a real Redis, the command `quire` as a real process, and a tiny checkpoint."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quire.shared.process.processes import dying_with_parent
from tests.support.turns import turn

if TYPE_CHECKING:
    from quire.ops.local.embedded_redis import EmbeddedRedis

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0


def clean_environ(**variables: str) -> dict[str, str]:
    """Return the environment without QUIRE_ settings and without make's variables, plus `variables`.

    A `make` that a test starts would otherwise inherit the arguments of `make test ARGS=...`.
    """
    dropped = ("QUIRE_", "MAKE", "MFLAGS", "ARGS")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "COLUMNS": "100", **variables}


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def has_ended(pid: int) -> bool:
    """Return True within ten seconds of the kill of a process, even if its parent has not waited for it yet."""
    try:
        process_fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process_fd], [], [], 10)[0])
    finally:
        os.close(process_fd)


def children_of(pid: int) -> dict[int, str]:
    """Return the child processes of this process: pid and command line. A child that ends meanwhile is left out."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in (task / "children").read_text().split():
                with suppress(FileNotFoundError, ProcessLookupError):
                    found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    return found


class QuireProcess:
    """A running `quire ...`. A thread collects its output, and `wait_for` waits for a line of it."""

    def __init__(
        self,
        arguments: tuple[str, ...],
        environ: Mapping[str, str],
        cwd: Path | None,
        module: str = "quire",
        prefix: tuple[str, ...] = (),
        terminal: bool = False,
    ) -> None:
        """terminal: make standard error a terminal."""
        ours, its_own = os.openpty() if terminal else (-1, subprocess.PIPE)
        self.process = subprocess.Popen(
            dying_with_parent(
                [*prefix, sys.executable, "-m", module, *arguments]
            ),  # the child also ends if the test run is killed
            env={"QUIRE_THREADS": "1", **environ},  # a second thread of a tiny model mostly waits for the first
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=its_own,
            text=True,
            start_new_session=True,
        )
        if terminal:
            os.close(its_own)
            self.process.stderr = open(ours, encoding="utf-8")  # noqa: SIM115
        self._lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._changed = threading.Condition()
        self._open = 2
        self._readers = [threading.Thread(target=self._read, args=(name,), daemon=True) for name in self._lines]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stdout(self) -> str:
        return "\n".join(self._lines["stdout"])

    @property
    def stderr(self) -> str:
        return "\n".join(self._lines["stderr"])

    def wait_for(self, pattern: str, timeout_s: float = START_TIMEOUT_S) -> re.Match[str]:
        """Wait for the first match of `pattern` in a line of the output, including earlier lines."""

        def find() -> re.Match[str] | None:
            lines = [line for lines in self._lines.values() for line in lines]
            return next((match for line in lines if (match := re.search(pattern, line))), None)

        with self._changed:
            self._changed.wait_for(lambda: find() or not self._open, timeout_s)
            match = find()
        assert match, f"no {pattern!r} in the output:\n{self.stdout}\n{self.stderr}"
        return match

    def wait_ready(self) -> str:
        """Wait until `quire serve` reports that it is ready; return its URL."""
        return self.wait_for(r"^ready: (\S+)")[1]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait for the end of the process and of its output; return the exit code."""
        code = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(timeout_s)
        return code

    def stop(self) -> int:
        """End the process as Ctrl-C does; return the exit code."""
        self.send(signal.SIGINT)
        return self.wait()

    def kill(self) -> None:
        """Send SIGKILL if the process still runs."""
        self.process.kill()

    def close(self) -> None:
        """Kill the process and close its pipes. Children of `quire serve` die with it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def _read(self, name: str) -> None:
        with suppress(OSError):  # the other end of a terminal was closed
            for line in getattr(self.process, name):
                with self._changed:
                    self._lines[name].append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._open -= 1
            self._changed.notify_all()


def pytest_configure(config: pytest.Config) -> None:
    """TEST_REDIS_SERVER: path of the redis-server or valkey-server that tests run instead of the packaged one."""
    if not is_one_of_several(config):  # xdist's processes inherit the variable
        turns = tempfile.TemporaryDirectory(prefix="quire-turns-")
        config.add_cleanup(turns.cleanup)
        os.environ["TEST_TURNS"] = turns.name
    with suppress(ImportError):  # the environment of a GPU machine has no hypothesis
        from hypothesis import HealthCheck, settings

        # An example takes as long as a busy machine needs for it, and each run draws the same examples.
        settings.register_profile(
            "tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("tests")
    if server := os.environ.get("TEST_REDIS_SERVER"):
        assert os.access(server, os.X_OK), f"TEST_REDIS_SERVER={server} is not a program"
        folder = tempfile.TemporaryDirectory(prefix="quire-redis-")
        config.add_cleanup(folder.cleanup)
        (Path(folder.name) / "redis-server").symlink_to(Path(server).absolute())
        os.environ["PATH"] = f"{folder.name}{os.pathsep}{os.environ['PATH']}"


def is_one_of_several(config: pytest.Config) -> bool:
    """Return whether pytest-xdist started this process.

    The environment does not tell: a test that starts a test run hands its environment down.
    """
    return hasattr(config, "workerinput")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    """Wait for the turn of a test outside of its own time."""
    if not is_one_of_several(item.config):
        return (yield)
    with turn(Path(os.environ["TEST_TURNS"]), item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_report_header() -> str:
    server = os.environ.get("TEST_REDIS_SERVER")
    if not server:
        return "redis-server: the usual one"
    said = subprocess.run([server, "--version"], capture_output=True, text=True, check=True).stdout
    return f"redis-server: {said.strip()}"


StartQuire = Callable[..., QuireProcess]


@contextmanager
def quire_processes() -> Iterator[StartQuire]:
    """Start `quire ARGUMENTS`, and end the processes afterwards; `environ={"QUIRE_...": ...}` passes settings."""
    started: list[QuireProcess] = []

    def start(
        *arguments: str, environ: Mapping[str, str] | None = None, cwd: Path | None = None, terminal: bool = False
    ) -> QuireProcess:
        process = QuireProcess(arguments, clean_environ(**(environ or {})), cwd, terminal=terminal)
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            process.close()


@pytest.fixture
def start_quire() -> Iterator[StartQuire]:
    """Start `quire ARGUMENTS` for one test; `environ={"QUIRE_...": ...}` passes settings.

    With `terminal=True` its standard error is a terminal.
    """
    with quire_processes() as start:
        yield start


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A Redis of this test run, on a private socket."""
    from quire.ops.local.embedded_redis import (
        EmbeddedRedis,  # imported here because tests of the kernels run without the packages that it needs
    )

    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The URL of an empty Redis."""
    from redis import Redis

    with Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random checkpoint of a few kilobytes, its tokenizer and its chat template."""
    from tests.support.checkpoints import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama")
