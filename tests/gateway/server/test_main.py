"""The gateway as a process: how it starts, what keeps it from starting, how it ends, what it never loads."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.features.keys.start_check import check_start, make_first_key
from quire.gateway.server import commands
from quire.gateway.server.main import serve
from quire.gateway.settings import GatewaySettings
from quire.ops.paths import PROJECT_ROOT
from quire.shared.accounts.secret import key_id_of
from quire.shared.config.command_line import CommandError
from quire.shared.config.settings import to_environ
from quire.shared.process.errors import StartError

# --- The gateway as a process: how it starts, what it says when it cannot, how it ends, what it never loads -----------


START = """
import os, sys
from quire.gateway.server.main import run
from quire.gateway.server.main import serve
from quire.gateway.settings import GatewaySettings
from quire.shared.process.errors import StartError
from quire.shared.config.settings import load
sys.exit(run(load(GatewaySettings, [], os.environ, prog="gateway")))
"""
MAX_RSS_MB = 250


def command(settings: GatewaySettings) -> dict[str, Any]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    return {
        "args": [sys.executable, "-c", START],
        "env": {**environ, **to_environ(settings), "HF_HUB_OFFLINE": "1"},
        "stderr": subprocess.PIPE,
        "stdout": subprocess.DEVNULL,
        "text": True,
    }


@contextmanager
def running(settings: GatewaySettings) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The process, its URL, and the lines that it logs."""
    with subprocess.Popen(**command(settings)) as process:
        assert process.stderr is not None
        lines: list[str] = []
        try:
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r"listening on (http://\S+)", line):
                    thread = threading.Thread(target=lines.extend, args=(process.stderr,))
                    thread.start()
                    yield process, found[1], lines
                    process.wait(60)
                    thread.join()
                    return
            raise AssertionError("".join(lines))
        finally:
            process.kill()


def settings(redis_url: str, model_folder: Path, **changes: Any) -> GatewaySettings:
    return GatewaySettings(**{"model": str(model_folder), "redis_url": redis_url, "port": 0, **changes})


@pytest.mark.slow
def test_it_stays_small_and_ends_in_steps_on_sigterm(redis_url: str, model_folder: Path) -> None:
    """A load balancer sees /readyz fail before a connection is refused, and open connections end after the drain."""
    given = settings(redis_url, model_folder, shutdown_delay_s=1, drain_s=0.2)
    with running(given) as (process, url, lines):
        with urllib.request.urlopen(url + "/v1/models") as reply:
            assert reply.status == 200
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        status = Path(f"/proc/{process.pid}/status").read_text()
        address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        with socket.create_connection(address) as idle, socket.create_connection(address) as busy:
            idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert idle.recv(100).startswith(b"HTTP/1.1 200")
            busy.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
            process.send_signal(signal.SIGTERM)
            while not any("not ready any more" in line for line in lines):
                time.sleep(0.01)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(url + "/readyz")
            assert refused.value.code == 503
            assert "this gateway is shutting down" in refused.value.read().decode()
            with urllib.request.urlopen(url + "/v1/models") as reply:
                assert reply.status == 200
            assert process.wait(60) == 0
    text = "".join(lines)
    assert "Traceback" not in text
    assert "GET /v1/models 200" in text
    assert "libtorch" not in maps
    assert "numpy" not in maps
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    assert int(found[1]) < MAX_RSS_MB * 1024


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_load_balancers(redis_url: str, model_folder: Path) -> None:
    with running(settings(redis_url, model_folder, shutdown_delay_s=600, drain_s=0)) as (process, _, lines):
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert "Traceback" not in "".join(lines)


@pytest.mark.slow
def test_no_import_of_the_gateway_brings_torch_or_transformers() -> None:
    code = (
        "import pkgutil, importlib, sys\n"
        "from quire import gateway\n"
        "for module in pkgutil.walk_packages(gateway.__path__, gateway.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'quire.worker', 'quire.kernels', 'huggingface_hub'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_keeps_it_from_starting_is_one_line(redis_url: str, tmp_path: Path) -> None:
    result = subprocess.run(**command(settings(redis_url, tmp_path / "missing")), timeout=30, check=False)
    assert result.returncode == 1, result.stderr
    *logged, line = result.stderr.strip().split("\n")
    assert not [text for text in logged if "Traceback" in text or "ERROR" in text]
    assert line.startswith("quire gateway: ")
    assert "there is no folder" in line
    assert "--model" in line


async def refusal(given: GatewaySettings) -> str:
    """Return why a gateway with these settings does not start."""
    with pytest.raises(StartError) as refused:
        await serve(given)
    return str(refused.value)


async def test_a_setting_that_keeps_it_from_starting_is_named(
    redis_url: str, model_folder: Path, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = await refusal(settings(redis_url, model_folder, port=port))
    assert f"cannot listen on 127.0.0.1 port {port}" in line
    assert "--port" in line
    assert "is not a Redis URL" in await refusal(settings("http://127.0.0.1", model_folder))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{broken")
    assert "is not a tokenizer" in await refusal(settings(redis_url, tmp_path))
    assert "--served-model-name" in await refusal(settings(redis_url, model_folder, served_model_name="a{b}"))
    line = await refusal(settings(redis_url, model_folder, cors_origins="https://app.example.com/path"))
    assert "--cors-origins (QUIRE_CORS_ORIGINS)" in line
    assert "'https://app.example.com/path' is not an origin" in line


def test_the_redis_url_is_not_shown_to_others() -> None:
    given = GatewaySettings(redis_url="redis://:secret@host/0")
    assert "secret" not in repr(given)


# --- The application: its log, its models, its files ------------------------------------------------------------------


@pytest.mark.parametrize("project", ["pyproject.toml", "gateway/pyproject.toml"])
def test_every_static_file_is_packaged(project: str) -> None:
    with (PROJECT_ROOT / project).open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["quire.gateway"]
    gateway = PROJECT_ROOT / "gateway"
    packaged = {path for pattern in patterns for path in gateway.glob(pattern)}
    static = {path for path in (gateway / "features" / "pages" / "static").rglob("*") if path.is_file()}
    assert static
    assert static <= packaged


# --- The commands of the gateway: the model's folder becomes absolute, and examples name the program ------------------


def test_the_gateway_gets_the_absolute_folder_of_the_model(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[GatewaySettings] = []
    monkeypatch.setattr("quire.gateway.server.main.run", lambda settings: seen.append(settings) or 0)
    monkeypatch.chdir(model_folder.parent)
    assert commands.run_gateway(GatewaySettings(model=f"./{model_folder.name}"), {}) == 0
    assert [Path(settings.model) for settings in seen] == [model_folder.resolve()]


def test_a_folder_without_a_model_is_refused_before_the_gateway_starts(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"config\.json is missing"):
        commands.run_gateway(GatewaySettings(model=str(tmp_path)), {})


# --- A gateway that other machines reach starts only with a key, an admin key, or permission --------------------------


async def test_a_gateway_without_keys_does_not_start(redis_url: str) -> None:
    public = GatewaySettings(redis_url=redis_url, host="0.0.0.0")
    local = GatewaySettings(redis_url=redis_url, require_keys=True)
    with pytest.raises(
        StartError, match=r"--host 0\.0\.0\.0 lets .*quire keys create.*, or --allow-anonymous to accept"
    ):
        await check_start(public)
    with pytest.raises(
        StartError, match=r"because --require-keys is set, .*--allow-anonymous instead of --require-keys"
    ):
        await check_start(local)
    await check_start(replace(public, allow_anonymous=True))
    await check_start(replace(public, admin_key_file="/run/secrets/admin"))
    secret = await make_first_key(redis_url)
    assert key_id_of(secret)
    await check_start(public)
    await check_start(local)


@pytest.mark.parametrize(
    ("settings", "is_open"),
    [
        ({}, True),
        ({"require_keys": True}, False),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": ""}, False),
        ({"host": "gateway.example.com"}, False),
        ({"host": "0.0.0.0", "allow_anonymous": True}, True),
    ],
)
def test_only_a_loopback_address_or_permission_opens_a_gateway(settings: dict[str, object], is_open: bool) -> None:
    assert GatewaySettings(**settings).is_open is is_open  # type: ignore[arg-type]


def test_contradicting_settings_are_refused() -> None:
    with pytest.raises(StartError, match="both given"):
        _ = GatewaySettings(allow_anonymous=True, require_keys=True).is_open
