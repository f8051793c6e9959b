"""`quire doctor`: each check finds its fault and names a remedy, and none is needed for another."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from quire.ops.watch import machine
from quire.ops.watch.checks import Check, Verdict
from quire.ops.watch.redis_health import SAFE, checks_of
from tests.support.commands import quire
from tests.support.terminal import terminal

GOOD: dict[str, Any] = {
    "redis_version": "6.2.23",
    "maxmemory_policy": "noeviction",
    "aof_enabled": 1,
    "used_memory": 2**20,
    "maxmemory": 2**30,
    "role": "master",
}


def bad(checks: list[Check]) -> dict[str, Verdict]:
    """The checks that found something, all of them with a remedy."""
    found = {check.name: check.verdict for check in checks if check.verdict != Verdict.OK}
    assert all(check.remedy for check in checks if check.name in found)
    return found


@pytest.mark.parametrize(
    ("changed", "name", "verdict"),
    [
        ({"redis_version": "6.0.16"}, "redis version", Verdict.FAILED),
        ({"redis_version": "6.2.22"}, "redis version", Verdict.WARNING),
        ({"redis_version": "7.0.15"}, "redis version", Verdict.WARNING),
        ({"redis_version": "7.2.4", "valkey_version": "8.1.3"}, "redis version", Verdict.WARNING),
        ({"maxmemory_policy": "allkeys-lru"}, "eviction", Verdict.FAILED),
        ({"aof_enabled": 0}, "persistence", Verdict.WARNING),
        ({"used_memory": 0.9 * 2**30}, "redis memory", Verdict.WARNING),
        ({"aof_last_write_status": "err"}, "redis disk", Verdict.FAILED),
        ({"evicted_keys": 3}, "evicted keys", Verdict.FAILED),
        ({"role": "slave"}, "redis role", Verdict.FAILED),
    ],
)
def test_a_redis_with_a_fault(changed: dict[str, Any], name: str, verdict: Verdict) -> None:
    assert bad(checks_of(GOOD | changed, 0.0, is_local=False)) == {name: verdict}


@pytest.mark.parametrize("version", ["6.2.23", "7.2.15", "8.8.1", "9.0.0"])
def test_a_good_redis(version: str) -> None:
    assert bad(checks_of(GOOD | {"redis_version": version}, -0.9, is_local=False)) == {}
    assert max(SAFE["Redis"]) < (9, 0)


def test_clocks_that_differ() -> None:
    assert bad(checks_of(GOOD, -1.5, is_local=True)) == {"clocks": Verdict.WARNING}
    assert "behind Redis" in checks_of(GOOD, -1.5, is_local=True)[-1].seen


def place(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_the_memory_is_compared_with_the_model(tmp_path: Path) -> None:
    place(tmp_path, "proc/meminfo", "MemTotal: 9 kB\nMemAvailable:       1000 kB\n")
    model = tmp_path / "model"
    model.mkdir()
    for kilobytes, verdict in ((400, Verdict.OK), (600, Verdict.WARNING), (1100, Verdict.FAILED)):
        with (model / "model.safetensors").open("wb") as file:
            file.truncate(1024 * kilobytes)
        assert machine.memory(str(model), tmp_path).verdict == verdict
    assert machine.memory("Qwen/Qwen3-0.6B", tmp_path).verdict == Verdict.OK
    assert machine.memory(str(model), tmp_path / "no linux").verdict == Verdict.OK


def test_a_gpu_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.gpu(tmp_path).verdict == Verdict.OK
    place(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX 570.1\nGCC")
    assert "--gpus all" in machine.gpu(tmp_path).remedy
    (tmp_path / "proc/driver/nvidia/gpus/0000:01").mkdir(parents=True)
    monkeypatch.setattr(machine, "version", lambda name: "2.13.0+cpu")
    assert 'torch==2.13.0"' in machine.gpu(tmp_path).remedy
    monkeypatch.setattr(machine, "version", lambda name: "2.13.0")
    assert machine.gpu(tmp_path).seen == "1 GPUs, NVIDIA UNIX 570.1; torch 2.13.0"


def test_kernel_settings_that_redis_warns_of(tmp_path: Path) -> None:
    pages = "sys/kernel/mm/transparent_hugepage/enabled"
    place(tmp_path, pages, "[always] madvise never")
    place(tmp_path, "proc/sys/vm/overcommit_memory", "0")
    assert bad([machine.huge_pages(tmp_path), machine.overcommit(tmp_path)]) == {
        "huge pages": Verdict.WARNING,
        "overcommit": Verdict.WARNING,
    }
    place(tmp_path, pages, "always [madvise] never")
    place(tmp_path, "proc/sys/vm/overcommit_memory", "1")
    assert bad([machine.huge_pages(tmp_path), machine.overcommit(tmp_path)]) == {}
    assert bad([machine.huge_pages(tmp_path / "x"), machine.overcommit(tmp_path / "x")]) == {}


def test_few_open_files() -> None:
    assert bad([machine.open_files(1024)]) == {"open files": Verdict.WARNING}
    assert bad([machine.open_files(4096), machine.open_files(-1)]) == {}


def test_a_port_in_use_names_who_uses_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        check = machine.free_for_clients("127.0.0.1", taken.getsockname()[1])
    assert check.verdict == Verdict.FAILED
    assert f"process {os.getpid()} (" in check.seen
    assert "pass --port " in check.remedy


def test_kernels_that_are_not_built_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    build = machine.kernel_build()
    monkeypatch.setattr(machine, "kernel_build", lambda: build)
    found = build.find
    monkeypatch.setattr(build, "find", lambda name: found(name) if name == build.COMMON else None)
    assert re.search("not built: (avx|amx)", machine.processor().seen)
    monkeypatch.setattr(build, "find", lambda name: None)
    assert machine.processor().verdict == Verdict.WARNING
    monkeypatch.setenv("CXX", "no-such-compiler")
    check = machine.processor()
    assert (check.verdict, "install g++" in check.remedy) == (Verdict.FAILED, True)
    monkeypatch.setattr(machine, "kernel_build", lambda: None)
    assert machine.processor().verdict == Verdict.OK


@pytest.mark.slow
def test_the_command_with_a_redis_without_one_and_with_a_wrong_one(redis_url: str, tmp_path: Path) -> None:
    common = ("doctor", "--port", "0", "--json", "--state-dir", str(tmp_path))
    done = quire(*common)
    assert done.returncode == 0, done.stdout
    assert "none runs for " in json.loads(done.stdout)[-1]["seen"]
    with Redis.from_url(redis_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            done = quire(*common, "--redis-url", redis_url)
        finally:
            client.config_set("maxmemory-policy", "noeviction")
    assert done.returncode == 1
    assert {check["name"] for check in json.loads(done.stdout) if check["verdict"] == "failed"} == {"eviction"}
    done = quire(*common[:3], "--redis-url", "redis://user:secret@127.0.0.1:1")
    assert done.returncode == 1
    assert "failed   redis" in done.stdout
    assert "secret" not in done.stdout
    assert "→ start it, or pass another --redis-url" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_verdicts_have_colours_only_in_a_terminal_and_without_no_color(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quire", "doctor", "--port", "0", "--state-dir", str(tmp_path)]
    for environ, begins in (({}, "\x1b[3"), ({"NO_COLOR": "1"}, "ok")):
        with terminal(command, **environ) as screen:
            assert screen.wait() == 0
            assert screen.said.startswith(begins)
            assert ("\x1b" in screen.said) == (begins != "ok")
    assert "\x1b" not in quire(*command[3:]).stdout
