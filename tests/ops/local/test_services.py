"""The gateway and the workers of `quire serve`: names, ids, ports and threads."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quire.ops.cli.settings import ServeSettings
from quire.ops.local.children import ServiceProgram
from quire.ops.local.services import Services
from quire.shared.command_line import CommandError
from quire.shared.settings import SettingError

STATE = Path("/state")


def services(environ: Mapping[str, str] = {}, **settings: Any) -> Services:
    defaults = {"model": "/models/tiny", "served_model_name": "tiny", "device": "cpu"}
    return Services(ServeSettings(**{**defaults, **settings}), environ, STATE)


def given(program: ServiceProgram, *names: str) -> list[str]:
    """The values of these settings in the environment of a program."""
    return [program._environ[f"QUIRE_{name}"] for name in names]


def test_a_setting_of_serve_beats_a_variable_and_the_rest_is_passed_on() -> None:
    found = services({"QUIRE_PORT": "1", "QUIRE_BLOCK_SIZE": "32", "QUIRE_STATE_DIR": "/x"}, port=9000)
    gateway = found.gateway("redis://r")
    assert found.model_name == "tiny"
    assert given(gateway, "PORT", "BLOCK_SIZE", "REDIS_URL", "DRAIN_S") == ["9000", "32", "redis://r", "2.0"]
    assert "QUIRE_STATE_DIR" not in gateway._environ, "the services have no such setting"
    assert gateway.log_path == STATE / "logs" / "gateway.log"


def test_internal_ports_follow_each_other_workers_first() -> None:
    found = services({"QUIRE_INTERNAL_PORT": "9100"}, workers=2)
    programs = [found.worker(0, ""), found.worker(1, ""), found.gateway("")]
    assert [given(program, "INTERNAL_PORT") for program in programs] == [["9100"], ["9101"], ["9102"]]
    assert given(services(workers=2).worker(1, ""), "INTERNAL_PORT") == ["0"]
    with pytest.raises(CommandError, match="leaves too few ports for 2 workers and the gateway; give one up to 65533"):
        services({"QUIRE_INTERNAL_PORT": "65534"}, workers=2)


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
