"""The processes that `quire serve` starts, and their settings."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quire.ops.cli.settings import ServeSettings
from quire.ops.local.children import FIRST_BACKOFF_S, LAST_BACKOFF_S, Child, ServiceProgram, StartPhase, start_phases
from quire.ops.local.processes import FileLock, is_running, wait_all
from quire.ops.local.services import Services
from quire.shared.config.command_line import CommandError
from quire.shared.config.settings import SettingError

# --- processes --------------------------------------------------------------------------------------------------------
# Locks that end with their holder, and waiting for processes.


def test_a_lock_is_held_by_one_and_free_after_its_end(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.acquire()
    first.write("a longer text")
    first.write("me")
    assert not second.acquire()
    assert second.read() == "me"
    first.close()
    first.close()
    assert second.acquire()
    second.close()


def test_waiting_ends_in_time_or_when_told_to_hurry() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not wait_all([process], 0.05, lambda: False)
        assert not wait_all([process], 60.0, lambda: True)
        assert is_running(process.pid)
    finally:
        process.communicate(b"\n")
    assert wait_all([process], 0.0, lambda: True)
    assert not is_running(process.pid)
    assert is_running(os.getpid())


# --- children ---------------------------------------------------------------------------------------------------------
# The children of `quire serve`: the phases of their start, and the waits between restarts.


def test_what_a_child_says_of_its_start_is_read_as_it_comes(tmp_path: Path) -> None:
    program = (
        "import os, sys; pipe = int(os.environ['_QUIRE_PROGRESS_FD'])\n"
        "for line in sys.stdin: os.write(pipe, eval(line))\n"
    )
    words = tmp_path / "words"
    os.mkfifo(words)
    command = ["/bin/sh", "-c", f'exec "$@" < {words}', "-", sys.executable, "-uc", program]
    service = ServiceProgram("worker-1", command, dict(os.environ), tmp_path / "logs" / "worker-1.log")
    (tmp_path / "logs").mkdir()
    process = service.start()
    try:
        with words.open("w", buffering=1) as say:

            def after(said: bytes, expected: str) -> None:
                say.write(f"{said!r}\n")
                deadline = time.monotonic() + 60
                while str(service.phase()) != expected and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert str(service.phase()) == expected

            assert str(service.phase()) == "starting Python"
            after(b"importing torch\n", "importing torch")
            after(b"loading weights\nloading weights\t4", "loading weights")  # the last line is not whole yet
            after(b"2\n", "loading weights 42 %")
            after(b"x" * 60_000 + b"\nloading weights\t43\n", "loading weights 43 %")
        assert process.wait(60) == 0
        assert str(service.phase()) == "loading weights 43 %"
    finally:
        process.kill()
        process.wait()


def test_workers_in_the_same_phase_share_a_place() -> None:
    def shown(*phases: tuple[str, str]) -> tuple[str, str]:
        return start_phases([Saying(f"worker-{number + 1}", StartPhase(*phase)) for number, phase in enumerate(phases)])

    assert shown(("loading weights", "42")) == ("worker-1: loading weights 42 %", "worker-1: loading weights")
    assert shown(("loading weights", "42"), ("loading weights", "7"), ("warming up", "")) == (
        "2 workers: loading weights 7 %, worker-3: warming up",
        "2 workers: loading weights, worker-3: warming up",
    )
    assert shown(("ready", ""), ("warming up", ""))[0] == "worker-2: warming up"
    assert shown(("ready", ""))[0] == "gateway: starting"


class Saying(ServiceProgram):
    """A worker that says one thing."""

    def __init__(self, name: str, phase: StartPhase) -> None:
        self.name = name
        self._phase = phase

    def phase(self) -> StartPhase:
        return self._phase


def test_restarts_wait_twice_as_long_each_time_until_one_lasts() -> None:
    now = 0.0
    child = Child(Nothing(), clock=lambda: now)
    waits = []
    for _ in range(8):
        child.start()
        waits.append(child.schedule_restart())
    assert waits[:4] == [FIRST_BACKOFF_S, 1.0, 2.0, 4.0]
    assert waits[-1] == LAST_BACKOFF_S
    assert not child.is_due()
    now += LAST_BACKOFF_S
    assert child.is_due()
    child.start()
    now += 61
    assert child.schedule_restart() == FIRST_BACKOFF_S


class Nothing:
    """A program that is never really started."""

    name = "nothing"
    log_path = Path(os.devnull)

    def start(self):  # type: ignore[no-untyped-def]
        return None

    def reason(self) -> str:
        return ""


# --- services ---------------------------------------------------------------------------------------------------------
# The gateway and the workers of `quire serve`: names, ids, ports and threads.


STATE = Path("/state")


def services(environ: Mapping[str, str] = {}, **settings: Any) -> Services:
    defaults = {"model": "/models/tiny", "served_model_name": "tiny", "device": "cpu"}
    return Services(ServeSettings(**{**defaults, **settings}), environ, STATE)


def environ(program: ServiceProgram) -> Mapping[str, str]:
    """The environment with which a program is started."""
    return program._environ


def given(program: ServiceProgram, *names: str) -> list[str]:
    """The values of these settings in the environment of a program."""
    return [environ(program)[f"QUIRE_{name}"] for name in names]


def test_a_setting_of_serve_beats_a_variable_and_the_rest_is_passed_on() -> None:
    found = services({"QUIRE_PORT": "1", "QUIRE_BLOCK_SIZE": "32", "QUIRE_STATE_DIR": "/x"}, port=9000)
    gateway = found.gateway(0, "redis://r")
    assert found.model_name == "tiny"
    assert given(gateway, "PORT", "BLOCK_SIZE", "REDIS_URL", "DRAIN_S") == ["9000", "32", "redis://r", "2.0"]
    assert given(gateway, "SHUTDOWN_DELAY_S") == ["0"], "Ctrl-C must not become slower"
    assert "QUIRE_STATE_DIR" not in environ(gateway), "the services have no such setting"
    assert gateway.log_path == STATE / "logs" / "gateway.log"


def test_internal_ports_follow_each_other_workers_first() -> None:
    found = services({"QUIRE_INTERNAL_PORT": "9100"}, workers=2)
    programs = [found.worker(0, ""), found.worker(1, ""), found.gateway(0, "")]
    assert [given(program, "INTERNAL_PORT") for program in programs] == [["9100"], ["9101"], ["9102"]]
    assert given(services(workers=2).worker(1, ""), "INTERNAL_PORT") == ["0"]
    with pytest.raises(CommandError, match="leaves too few ports for 2 workers and the gateway; give one up to 65533"):
        services({"QUIRE_INTERNAL_PORT": "65534"}, workers=2)


def test_several_gateways_share_a_port_and_a_key_and_have_their_own_internal_ports() -> None:
    found = services({"QUIRE_INTERNAL_PORT": "9100", "QUIRE_GATEWAY_ID": "me"}, workers=2, gateways=2)
    programs = [found.gateway(index, "") for index in range(2)]
    assert [program.name for program in programs] == ["gateway-1", "gateway-2"]
    assert programs[1].log_path == STATE / "logs" / "gateway-2.log"
    assert [given(program, "INTERNAL_PORT", "REUSE_PORT", "GATEWAY_ID") for program in programs] == [
        ["9102", "true", "me-1"],
        ["9103", "true", "me-2"],
    ]
    [key], [same] = (given(program, "USER_HASH_KEY") for program in programs)
    assert key == same != ""
    assert given(services({"QUIRE_USER_HASH_KEY": "k"}, gateways=2).gateway(1, ""), "USER_HASH_KEY") == ["k"]
    assert "QUIRE_REUSE_PORT" not in environ(services().gateway(0, "")), "a gateway alone owns its port"
    with pytest.raises(CommandError, match="too few ports for 1 workers and 3 gateways; give one up to 65532"):
        services({"QUIRE_INTERNAL_PORT": "65533"}, gateways=3)


def test_several_gateways_need_a_system_that_shares_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "SO_REUSEPORT")
    assert services().num_gateways == 1
    with pytest.raises(CommandError, match="--gateways: this system cannot share a port"):
        services(gateways=2)


def test_worker_ids_are_unique_where_the_redis_is_shared() -> None:
    assert given(services().worker(0, ""), "WORKER_ID") == ["worker-1"]
    assert given(services({"QUIRE_WORKER_ID": "me"}).worker(0, ""), "WORKER_ID") == ["me"]
    assert given(services({"QUIRE_WORKER_ID": "me"}, workers=2).worker(1, ""), "WORKER_ID") == ["me-2"]
    (shared,) = given(services(redis_url="redis://other").worker(0, ""), "WORKER_ID")
    assert shared.startswith(f"{socket.gethostname()}-")
    assert shared.endswith("-1")


def test_workers_on_one_machine_share_its_cores() -> None:
    cores = os.cpu_count() or 1
    assert given(services(workers=2).worker(0, ""), "THREADS") == [str(max(1, cores // 2))]
    assert given(services().worker(0, ""), "THREADS") == ["0"]
    assert given(services({"QUIRE_THREADS": "3"}, workers=2).worker(0, ""), "THREADS") == ["3"]


def test_wrong_settings_of_the_services_are_refused_before_anything_starts() -> None:
    with pytest.raises(SettingError, match="'17' from QUIRE_BLOCK_SIZE"):
        services({"QUIRE_BLOCK_SIZE": "17"})
    with pytest.raises(CommandError, match="a b"):
        services(served_model_name="a b")


def test_each_of_several_models_has_workers_of_its_own_and_the_gateway_discovers_them() -> None:
    found = services(model="/models/a,/models/b", served_model_name="a,b", workers=2)
    assert found.count == 4
    programs = [found.worker(index, "") for index in range(4)]
    assert [given(program, "MODEL", "SERVED_MODEL_NAME", "WORKER_ID") for program in programs] == [
        ["/models/a", "a", "worker-1"],
        ["/models/a", "a", "worker-2"],
        ["/models/b", "b", "worker-3"],
        ["/models/b", "b", "worker-4"],
    ]
    assert given(programs[3], "THREADS") == [str(max(1, (os.cpu_count() or 1) // 4))]
    assert given(found.gateway(0, ""), "DISCOVER_MODELS", "SERVED_MODEL_NAME") == ["true", ""]
    assert "QUIRE_DISCOVER_MODELS" not in environ(services().gateway(0, ""))


def test_several_models_refuse_the_settings_of_one() -> None:
    with pytest.raises(CommandError, match="--lora belongs to one model"):
        services({"QUIRE_LORA": "x=/y"}, model="/models/a,/models/b", served_model_name="a,b")
    with pytest.raises(CommandError, match="--model-aliases belongs to one model"):
        services(model="/models/a,/models/b", served_model_name="a,b", model_aliases="x")
    with pytest.raises(CommandError, match="2 workers of several models need 2 GPUs, and there are 1"):
        services({"CUDA_VISIBLE_DEVICES": "0"}, model="/models/a,/models/b", served_model_name="a,b", device="cuda")
    shared = {"CUDA_VISIBLE_DEVICES": "0", "QUIRE_KV_CACHE_GB": "1"}
    assert services(shared, model="/models/a,/models/b", served_model_name="a,b", device="cuda").count == 2


def test_files_are_in_the_state_folder_unless_a_setting_names_another_place() -> None:
    assert given(services().gateway(0, ""), "FILES_DIR") == [str(STATE / "files")]
    assert given(services({"QUIRE_FILES_DIR": "/x"}).gateway(0, ""), "FILES_DIR") == ["/x"]
    bucket = services({"QUIRE_FILES_BUCKET": "s3://x"}).gateway(0, "")
    assert given(bucket, "FILES_BUCKET") == ["s3://x"]
    assert "QUIRE_FILES_DIR" not in environ(bucket)
