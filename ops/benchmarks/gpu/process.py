"""Runs a part of the check as a process group that ends in time, with all processes that it has started."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from quire.shared.process.processes import dying_with_parent

# Time between asking a part to stop and killing it, in which pytest reports failures.
GRACE_S = 8.0
# Maximum number of test processes. Tests use little memory of the card, and compiling kernels takes most of the time.
TEST_PROCESSES = 12
# Failures after which a run of tests ends: that many usually have one cause.
MAX_FAILURES = 25


def run(command: list[str], folder: Path, environ: Mapping[str, str], output: IO[str], seconds: float) -> int:
    """Run a command, with all processes that it starts, for at most `seconds`. Return its exit code; -1: stopped."""
    process = subprocess.Popen(
        dying_with_parent(command),
        cwd=folder,
        env=dict(environ),
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    stopped = False
    try:
        return process.wait(max(1.0, seconds - GRACE_S))
    except subprocess.TimeoutExpired:
        stopped = True
        _signal_group(process, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        return -1
    finally:
        # Also after a normal end: processes that the part has left running would hold memory of the card.
        _signal_group(process, signal.SIGKILL)
        process.wait()
        if stopped:
            output.write(f"\ngpu-check: stopped after {seconds:.0f} s\n")


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def run_tests(root: Path, arguments: tuple[str, ...], parallel: bool) -> tuple[bool, str]:
    """Run pytest and pass its output on. Return whether all tests passed, and pytest's summary.

    parallel: run in several processes, if pytest-xdist is installed.
    """
    # The project's pytest configuration names plugins that a bare machine lacks.
    ini = Path(__file__).with_name("pytest.ini")
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--maxfail={MAX_FAILURES}", "--durations=10"]
    command += ["-c", str(ini), f"--rootdir={root}"]
    if parallel and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(max(1, min(TEST_PROCESSES, (os.cpu_count() or 1) - 2)))]
    environ = os.environ | ({"OMP_NUM_THREADS": "2"} if parallel else {})
    # SIGINT reaches pytest too, which prints its report and ends. This process waits for pytest.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    summary = ""
    try:
        with subprocess.Popen(
            [*command, *arguments], cwd=root, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as tests:
            assert tests.stdout is not None
            for line in tests.stdout:
                print(line, end="", flush=True)
                if " in " in line and any(word in line for word in (" passed", " failed", " error", "no tests ran")):
                    summary = line.strip().strip("= ")
    finally:
        signal.signal(signal.SIGINT, before)
    return tests.returncode == 0, summary
