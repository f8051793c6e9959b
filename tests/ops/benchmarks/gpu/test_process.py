"""A part of the check ends in time, with all processes that it has started."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

import pytest

from quire.ops.benchmarks.gpu import process


def has_ended(pid: int) -> bool:
    """Within ten seconds: whoever kills a process does not wait until it is gone."""
    try:
        process_fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process_fd], [], [], 10)[0])
    finally:
        os.close(process_fd)


# A child of its own that would outlive it, and a handler of SIGINT that says something last.
STUBBORN = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(2, lambda *_: 0); signal.pause()"])
def last(*_):
    print("stopping", flush=True)
    signal.pause()
signal.signal(signal.SIGINT, last)
print(child.pid, flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_a_part_that_takes_too_long_says_its_last_and_ends_with_all_its_processes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.5)
    log = tmp_path / "log"
    with log.open("w") as output:
        code = process.run([sys.executable, "-c", STUBBORN], tmp_path, os.environ, output, 2.0)
    assert code == -1
    pid, *rest = log.read_text().splitlines()
    assert rest == ["stopping", "", "gpu-check: stopped after 2 s"]
    assert has_ended(int(pid))


def test_a_part_that_ends_leaves_nothing_behind(tmp_path: Path) -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); raise SystemExit(3)"
    log = tmp_path / "log"
    with log.open("w") as output:
        assert process.run([sys.executable, "-c", program], tmp_path, os.environ, output, 30) == 3
    assert has_ended(int(log.read_text()))


@pytest.mark.slow
def test_tests_that_fail_are_counted_and_all_of_them_run(tmp_path: Path, capsys) -> None:
    (tmp_path / "test_some.py").write_text("def test_a(): assert 1 == 2\ndef test_b(): pass\n")
    passed, summary = process.run_tests(tmp_path, ("test_some.py",), False)
    assert not passed
    assert summary.startswith("1 failed, 1 passed in")
    assert "assert 1 == 2" in capsys.readouterr().out
