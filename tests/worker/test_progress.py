"""A starting worker reports its progress to `quire serve` through a pipe, to a terminal, and to its log."""

from __future__ import annotations

import logging
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.shared.process.start_pipe import PIPE
from quire.worker.progress import BuildProgress, StartProgress
from tests.conftest import QuireProcess, StartQuire, clean_environ

PHASES = ["importing torch", "reading the configuration", "loading weights", "sizing the KV cache", "warming up"]


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Return the reading end of a pipe that the environment names, as `quire serve` sets it."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    monkeypatch.setenv(PIPE, str(writing))
    yield reading
    os.close(reading)


def begun(clock: Callable[[], float] = time.monotonic) -> StartProgress:
    started = StartProgress(clock)
    started.begin()
    assert PIPE not in os.environ, "the processes of other ranks would write to the pipe too"
    return started


def test_phases_and_shares_go_through_the_pipe(pipe: int) -> None:
    now = 100.0
    started = begun(lambda: now)
    started.phase("loading weights")
    for done in range(0, 1001, 5):
        now += 0.125
        started.share(done, 1000)
        started.share(done, 1000)  # too soon to be shown again
    started.phase("warming up")
    started.ready()
    lines = os.read(pipe, 65536).decode().splitlines()
    assert lines[:3] == ["loading weights", "loading weights\t0", "loading weights\t0"]
    assert lines[-4:] == ["loading weights\t99", "loading weights\t100", "warming up", "ready"]
    assert len(lines) == 1 + 201 + 2
    assert os.read(pipe, 1) == b"", "the pipe is closed"
    started.close()


def test_a_build_of_kernels_is_a_phase_with_its_share(pipe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started = begun()
    monkeypatch.setattr("quire.worker.progress.progress", started)
    report = BuildProgress()
    started.phase("reading the configuration")
    assert os.read(pipe, 65536).decode() == "reading the configuration\n", "no phase without a build"
    report(0, 8)
    started._shown = 0.0
    report(4, 8)
    started.close()
    phase = "building the C++ kernels, once for this machine"
    assert os.read(pipe, 65536).decode().splitlines() == [phase, f"{phase}\t0", f"{phase}\t50"]


def test_a_pipe_that_nothing_empties_does_not_stop_the_start(pipe: int) -> None:
    started = begun()
    for number in range(5000):  # more than a pipe holds
        started.phase(f"phase {number}")
    started.ready()
    assert os.read(pipe, 1 << 20).startswith(b"phase 0\nphase 1\n")


def test_a_reader_that_has_gone_does_not_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setenv(PIPE, str(writing))
    os.close(reading)
    started = begun()
    started.phase("loading weights")
    started.ready()


def test_a_descriptor_that_is_no_pipe_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(PIPE, "9999")
    started = begun()
    started.phase("loading weights")
    assert f"{PIPE}=9999 is not an open pipe: Bad file descriptor" in caplog.text
    started.close()


def test_without_a_display_phases_are_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        started = StartProgress()
        started.phase("loading weights")
        started.share(1, 2)
        started.ready()
    assert caplog.messages == ["starting: loading weights"]


@pytest.fixture
def worker(start_quire: StartQuire, tiny_model: Path, redis_url: str) -> QuireProcess:
    return start_quire("worker", str(tiny_model), "--redis-url", redis_url)


@pytest.mark.slow
def test_a_worker_logs_each_phase_of_its_start(worker: QuireProcess) -> None:
    worker.wait_for("ready: worker")
    assert re.findall(r"starting: (.*)", worker.stderr) == PHASES
    assert worker.stop() == 0


@pytest.mark.slow
def test_a_worker_on_a_terminal_redraws_one_line(tiny_model: Path, redis_url: str) -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "quire", "worker", str(tiny_model), "--redis-url", redis_url]
    process = subprocess.Popen(
        command, env=clean_environ(), stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    )
    os.close(terminal)
    shown = ""
    try:
        while "ready: worker" not in shown:
            shown += os.read(controller, 4096).decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(controller)
    drawn = re.findall(r"\r\x1b\[2Kstarting: ([a-zA-Z ]+)", shown)
    assert [phase for phase in PHASES if phase not in {text.strip() for text in drawn}] == []
    # The final content of the screen: the part of each line after its last redraw.
    lines = [line.rstrip("\r").rpartition("\x1b[2K")[2] for line in shown.split("\n")]
    assert not any("starting:" in line for line in lines)
    assert any("loading" in line and "kernels on" in line for line in lines), "the log is there too"
