"""`quire ps` and `quire stop`: they find the `quire serve`s of this user, and end the one that is meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.ops.watch import servers
from quire.ops.watch.commands import StopSettings
from quire.ops.watch.servers import Server, running, stop
from quire.shared.config.command_line import CommandError
from tests.conftest import QuireProcess, quire_processes
from tests.support.commands import quire, refusal

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state") / "of a server"


@pytest.fixture
def server(state: Path, tiny_model: Path) -> Iterator[QuireProcess]:
    with quire_processes() as start:
        process = start("serve", str(tiny_model), "--port", "0", "--state-dir", str(state))
        process.wait_ready()
        yield process


def listed(folder: Path) -> list[dict[str, object]]:
    """The servers of a state folder that `quire ps` finds, without being told the folder."""
    return [row for row in json.loads(quire("ps", "--json").stdout) if row["state_dir"] == str(folder)]


def test_a_server_is_found_wherever_its_state_folder_is_and_stopped_in_order(state: Path, server: QuireProcess) -> None:
    url = server.wait_ready()
    [row] = listed(state)
    assert (row["pid"], row["url"], row["models"]) == (server.pid, url, ["tiny"])
    assert (row["state"], row["redis"]) == ("ready", "embedded")
    assert f"{server.pid} " in quire("ps").stdout
    done = quire("stop", "--state-dir", str(state))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"stopped {server.pid} ({url})\n"
    assert server.process.poll() == 0, "the command returns when the server has ended"
    assert "Stopped" in server.stderr
    assert listed(state) == []
    assert "no `quire serve` runs with the state folder" in refusal(1, "stop", "--state-dir", str(state))


def test_a_killed_server_is_not_listed_and_its_number_is_not_signalled(state: Path, server: QuireProcess) -> None:
    server.kill()
    server.wait()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        # The lock as a killed server leaves it, whose pid belongs to another process by now.
        (state / "lock").write_text(f"{bystander.pid} http://127.0.0.1:1 embedded tiny")
        assert running([state], processes=state) == []
        assert "no `quire serve` runs" in refusal(1, "stop", "--state-dir", str(state))
        assert bystander.poll() is None


def test_stop_names_a_server_of_another_folder_and_does_not_touch_it(
    state: Path, server: QuireProcess, tmp_path: Path
) -> None:
    said = refusal(1, "stop", "--state-dir", str(tmp_path))
    assert "others run: give --state-dir " in said
    assert server.process.poll() is None
    done = quire("stop", "--state-dir", str(state), "--json")
    assert json.loads(done.stdout) == [{"pid": server.pid, "state_dir": str(state)}]


# Holds the lock of a state folder as `quire serve` does, and ends at the third SIGTERM: `stop` sends one, `--now` more.
# Arguments: the lock, and a text to write into it instead of its own pid.
HOLDER = """
import fcntl, os, signal, sys
told = []
def on_stop(number, frame):
    told.append(number)
    if len(told) == 3:
        os._exit(7)
signal.signal(signal.SIGTERM, on_stop)
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print(*sys.argv[2:] or [os.getpid()], "http://127.0.0.1:1", "embedded", file=lock, flush=True)
print(flush=True)
while True:
    signal.pause()
"""


@contextmanager
def holding(folder: Path, *text: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run HOLDER until the end of the block."""
    command = [sys.executable, "-c", HOLDER, str(folder / "lock"), *text]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            yield holder
        finally:
            holder.kill()


def pids(folder: Path) -> list[int]:
    """The servers of a state folder that a look at all processes finds."""
    return [server.pid for server in running([]) if server.state_dir == str(folder)]


def test_processes_of_other_users_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with holding(tmp_path) as holder:
        assert pids(tmp_path) == [holder.pid]
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        assert pids(tmp_path) == []


def test_a_lock_that_names_a_process_without_it_stops_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        with holding(tmp_path, str(bystander.pid)):
            assert pids(tmp_path) == []
            assert "no `quire serve` runs" in refusal(1, "stop", "--state-dir", str(tmp_path))
        assert bystander.poll() is None


def test_a_lock_whose_text_changes_during_a_look_never_names_another_process(tmp_path: Path) -> None:
    # Both texts have the same length, so that a reader sees one of them.
    with holding(tmp_path) as holder, open(tmp_path / "lock", "r+b", buffering=0) as lock:
        texts = [f"{pid:>10} http://127.0.0.1:1 embedded\n".encode() for pid in (holder.pid, os.getppid())]
        is_over = threading.Event()

        def flip() -> None:
            while not is_over.is_set():
                for text in texts:
                    os.pwrite(lock.fileno(), text, 0)

        flipping = threading.Thread(target=flip)
        flipping.start()
        try:
            seen = {pid for _ in range(100) for pid in pids(tmp_path)}
        finally:
            is_over.set()
            flipping.join()
        assert seen <= {holder.pid}


def test_files_of_other_programs_with_the_name_of_a_lock_are_passed_over(tmp_path: Path) -> None:
    """Among the open files of this process: bytes that are no text, a FIFO, and one that is too long for a lock."""
    for name in ("binary", "fifo", "long"):
        (tmp_path / name).mkdir()
    (tmp_path / "binary" / "lock").write_bytes(b"\xff\xfe\x00")
    os.mkfifo(tmp_path / "fifo" / "lock")
    with (
        open(tmp_path / "binary" / "lock", "rb"),
        open(os.open(tmp_path / "fifo" / "lock", os.O_RDWR), "rb", buffering=0),
        holding(tmp_path / "long", " " * 5000),
    ):
        state_dirs = [row["state_dir"] for row in json.loads(quire("ps", "--json").stdout)]
        assert not [folder for folder in state_dirs if folder.startswith(str(tmp_path))]
        for name in ("binary", "fifo"):
            said = refusal(1, "stop", "--state-dir", str(tmp_path / name))
            assert "no `quire serve` runs" in said


def test_now_does_not_wait_for_running_requests(tmp_path: Path) -> None:
    with holding(tmp_path) as holder:
        said = refusal(1, "stop", "--state-dir", str(tmp_path), "--timeout-s", "0.1")
        assert f"the `quire serve` {holder.pid} has not ended after 0.1 s" in said
        assert quire("stop", "--state-dir", str(tmp_path), "--now").returncode == 0
        assert holder.wait(10) == 7


def test_all_stops_every_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers are made up: those of whoever runs this test are not to be stopped."""
    found = [Server(pid, f"http://x:{pid}", "embedded", [], 0.0, f"/s{pid}") for pid in (7, 8)]
    ended: list[int] = []
    monkeypatch.setattr(servers, "running", lambda folders: found)
    monkeypatch.setattr(servers, "_end", lambda server, timeout_s, now: ended.append(server.pid))
    assert stop(StopSettings(all=True), {}) == 0
    assert ended == [7, 8]
    with pytest.raises(CommandError, match="give --state-dir /s7, or --all"):
        stop(StopSettings(state_dir="/nowhere"), {})
