"""Processes: signals, tasks, the start pipe, errors and the command line."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from quire.shared.config.command_line import Command, CommandError, report_failures, run_command, run_script
from quire.shared.config.settings import SettingError, option
from quire.shared.model.naming import served_name
from quire.shared.process import die_with_parent
from quire.shared.process.errors import StartError
from quire.shared.process.interrupts import EXIT_CODE, end_at_ctrl_c, end_now, raise_at_ctrl_c
from quire.shared.process.kill_pipe import KillRequests, WorkerKiller
from quire.shared.process.processes import spawn
from quire.shared.process.start_pipe import PIPE, READY, report_ready
from quire.shared.process.tasks import end_tasks
from quire.shared.redis.url import parse_redis_url
from quire.shared.telemetry import tracing
from quire.shared.telemetry.internal_server import bind
from quire.shared.text.tokenizer import load_tokenizer
from tests.conftest import is_running

# --- processes --------------------------------------------------------------------------------------------------------


def test_a_child_has_its_environment_its_output_and_the_files_to_keep() -> None:
    reading, writing = os.pipe()
    program = f"import os; print(os.environ['WORD'], flush=True); os.write({writing}, b'kept')"
    with tempfile.TemporaryFile() as output:
        child = spawn([sys.executable, "-c", program], environ={"WORD": "hello"}, output=output, keep=[writing])
        os.close(writing)
        assert child.wait(30) == 0
        assert os.read(reading, 10) == b"kept"
        os.close(reading)
        output.seek(0)
        assert output.read() == b"hello\n"


def test_a_child_has_a_session_of_its_own() -> None:
    program = "import os; raise SystemExit(0 if os.getsid(0) == os.getpid() else 1)"
    assert spawn([sys.executable, "-c", program], environ={}, output=None).wait(30) == 0


# --- die with parent --------------------------------------------------------------------------------------------------


# Starts a child that dies with this process, says its pid, and is killed itself.
PARENT = """
import os, signal, subprocess, sys
from quire.shared.process.processes import dying_with_parent
sleeper = "print('up', flush=True); import time; time.sleep(60)"
child = subprocess.Popen(dying_with_parent([sys.executable, "-c", sleeper]), stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_child_dies_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        # The child has inherited no end of this pipe: it ends with the parent.
        parent.wait(30)
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_parent_that_has_died_before_ends_the_child_at_once() -> None:
    command = [sys.executable, "-I", "-S", die_with_parent.__file__, "9", "1", "/bin/true"]
    assert subprocess.run(command, check=False).returncode == (0 if os.getpid() == 1 else 1)


# --- interrupts -------------------------------------------------------------------------------------------------------
# Ctrl-C ends the process at once or raises KeyboardInterrupt. A process that ignores Ctrl-C keeps ignoring it.


@pytest.mark.parametrize(("call", "code"), [("", EXIT_CODE), ("interrupts.raise_at_ctrl_c(); ", 5)])
def test_the_process_ends_at_once_unless_it_asks_for_the_exception(call: str, code: int) -> None:
    program = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's & ignores it
        "from quire.shared.process import interrupts; interrupts.end_at_ctrl_c()\n"
        f"try: {call}os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt: sys.exit(5)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_handler_of_someone_else_stays() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        end_at_ctrl_c()
        raise_at_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_change_nothing() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread = threading.Thread(target=end_at_ctrl_c)
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGINT) is not end_now
    finally:
        signal.signal(signal.SIGINT, before)


# --- start pipe -------------------------------------------------------------------------------------------------------
# The pipe by which a child of `quire serve` says that it is ready.


def test_it_says_once_that_the_process_is_ready_and_closes_the_pipe() -> None:
    reading, writing = os.pipe()
    environ = {PIPE: str(writing), "OTHER": "1"}
    report_ready(environ)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == f"{READY}\n", "the writing end is closed, so that the reader sees the end"
    assert environ == {"OTHER": "1"}, "processes that this one starts must not write to the pipe"
    report_ready(environ)


@pytest.mark.parametrize("descriptor", ["", "x", "-1", "9999"])
def test_a_process_without_a_pipe_says_nothing(descriptor: str) -> None:
    report_ready({PIPE: descriptor})


def test_a_reader_that_has_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    report_ready({PIPE: str(writing)})


# --- tasks ------------------------------------------------------------------------------------------------------------
# Background tasks are cancelled and awaited.


async def test_tasks_have_ended_when_it_returns() -> None:
    events: list[str] = []

    async def run() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            events.append("cleaned up")

    tasks = [asyncio.create_task(run()) for _ in range(2)]
    await asyncio.sleep(0)
    await end_tasks(*tasks)
    assert events == ["cleaned up"] * 2
    assert all(task.cancelled() for task in tasks)


async def test_a_task_that_has_failed_raises_nothing() -> None:
    async def fail() -> None:
        raise ValueError("failed")

    task = asyncio.create_task(fail())
    await asyncio.wait([task])
    await end_tasks(task)
    assert isinstance(task.exception(), ValueError)


async def test_a_task_that_was_never_started_is_no_fault() -> None:
    await end_tasks(None)
    await end_tasks()


# --- command line -----------------------------------------------------------------------------------------------------
# The runner of commands: exit codes, and one line on standard error for each failure.


@dataclass(frozen=True, kw_only=True)
class Settings:
    size: int = option(3, minimum=1, help="Size.")


def show(settings: Settings, environ: Mapping[str, str]) -> int:
    if settings.size == 13:
        raise CommandError("--size: 13 brings bad luck; give another")
    print(f"size {settings.size}")
    return 7 if settings.size == 7 else 0


COMMAND = Command("Show a size.", "Show a size, and no more.", ("{prog} --size 4",), Settings, show)


def failing(error: BaseException) -> Callable[[], NoReturn]:
    def run() -> NoReturn:
        raise error

    return run


def test_a_command_gets_its_settings_and_gives_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("try", COMMAND, ["--size", "4"], {}) == 0
    assert run_command("try", COMMAND, [], {"QUIRE_SIZE": "7"}) == 7
    assert capsys.readouterr().out == "size 4\nsize 7\n"


def test_a_wrong_setting_is_2_and_a_failure_is_1_with_the_source_of_the_setting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command("try", COMMAND, ["--size", "0"], {}) == 2
    assert run_command("try", COMMAND, [], {"QUIRE_SIZE": "13"}) == 1
    wrong, failed = capsys.readouterr().err.splitlines()
    assert wrong.startswith("try: --size (QUIRE_SIZE): '0' from --size is too small")
    assert failed == ("try: --size: 13 brings bad luck; give another (--size came as QUIRE_SIZE from the environment)")


def test_variables_of_other_processes_are_refused_unless_they_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Other:
        colour: str = option("", help="Colour.")

    environ = {"QUIRE_COLOUR": "red"}
    assert run_command("try", COMMAND, [], environ) == 2
    assert "QUIRE_COLOUR in the environment is not a setting" in capsys.readouterr().err
    assert run_command("try", COMMAND, [], environ, known=[Other]) == 0


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (SettingError("no such\nsetting"), 2, "try: no such setting\n"),
        (CommandError("no room"), 1, "try: no room\n"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(0), 0, ""),
        (ConnectionError("nothing there"), 1, "try: nothing there\n"),
        (ModuleNotFoundError(name="torch"), 1, "try: the Python package torch is missing: `make setup` installs "),
        (ValueError("odd"), 1, "try: unexpected failure, ValueError: odd (at test_processes.py:"),
    ],
)
def test_each_failure_has_its_exit_code_and_its_line(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_failures("try", {}, failing(error)) == code
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert err.count("\n") == bool(said)


def test_the_traceback_is_printed_if_the_log_level_is_debug(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_failures("try", {"QUIRE_LOG_LEVEL": "debug"}, failing(ValueError("odd"))) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_script_says_its_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["quire-try", "--version"])
    monkeypatch.setattr("quire.shared.config.command_line.end_at_ctrl_c", lambda: None)
    assert run_script("quire-try", COMMAND) == 0
    assert capsys.readouterr().out.startswith("quire-try 0.")


# --- errors -----------------------------------------------------------------------------------------------------------


def test_each_refusal_to_start_is_a_start_error_of_one_line(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        for refused in (
            lambda: served_name("model", "a{b}"),
            lambda: parse_redis_url("http://host"),
            lambda: load_tokenizer(tmp_path, {}),
            lambda: bind("127.0.0.1", taken.getsockname()[1]),
            lambda: tracing.start("gateway", "g", "collector:4318", {}),
        ):
            with pytest.raises(StartError) as error:
                refused()
            assert "\n" not in str(error.value)


def test_a_redis_that_is_away_is_also_a_connection_error() -> None:
    """Code that retries network errors retries this one too."""
    with pytest.raises(ConnectionError):
        parse_redis_url("http://host")


# --- kill pipe --------------------------------------------------------------------------------------------------------
# The pipe through which a gateway has `quire serve` kill a worker.


def test_only_workers_of_the_pipe_are_named_and_each_once() -> None:
    requests = KillRequests(["w1", "w2"])
    killer = WorkerKiller.of(requests.environ)
    assert killer is not None
    assert requests.read() == []
    assert killer.kill("w2")
    assert killer.kill("w2")
    assert not killer.kill("w3")
    # Whoever has the pipe may write anything.
    os.write(requests.writing, b"redis\n\nw1\n\xff\nw")
    assert requests.read() == ["w2", "w1"]
    os.write(requests.writing, b"1\n")
    assert requests.read() == ["w1"], "a line may arrive in parts"


def test_a_pipe_that_nobody_reads_holds_nobody_up() -> None:
    requests = KillRequests(["w1"])
    killer = WorkerKiller.of(requests.environ)
    assert killer is not None
    while killer.kill("w1"):
        pass  # until the pipe is full
    assert requests.read() == ["w1"]
    assert killer.kill("w1")
