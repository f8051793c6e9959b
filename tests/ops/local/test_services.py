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
    gateway = found.gateway(0, "redis://r")
    assert found.model_name == "tiny"
    assert given(gateway, "PORT", "BLOCK_SIZE", "REDIS_URL", "DRAIN_S") == ["9000", "32", "redis://r", "2.0"]
    assert given(gateway, "SHUTDOWN_DELAY_S") == ["0"], "Ctrl-C must not become slower"
    assert "QUIRE_STATE_DIR" not in gateway._environ, "the services have no such setting"
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
    assert "QUIRE_REUSE_PORT" not in services().gateway(0, "")._environ, "a gateway alone owns its port"
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
    assert "QUIRE_DISCOVER_MODELS" not in services().gateway(0, "")._environ


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
    assert "QUIRE_FILES_DIR" not in bucket._environ
