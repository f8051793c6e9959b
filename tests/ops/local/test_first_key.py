"""From an empty state folder to a call with a key, by what `quire serve` itself says."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from quire.gateway.settings import GatewaySettings
from quire.ops.cli.settings import ServeSettings
from quire.ops.local.first_key import first_key
from quire.shared.command_line import CommandError
from tests.conftest import QuireProcess, StartQuire, clean_environ

pytestmark = pytest.mark.timeout(240)

REDIS_URL = "redis://127.0.0.1:1/0"  # nothing answers there


def flags(model: Path, state_dir: Path) -> list[str]:
    return ["serve", str(model), "--port", "0", "--state-dir", str(state_dir), "--require-keys"]


def status(url: str, key: str = "") -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=headers), timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def assert_key_works(process: QuireProcess, key: str, state_dir: Path) -> None:
    """The commands that the server prints work with the key, and no file below the state folder has the key."""
    url = process.wait_ready()
    assert [status(url), status(url, key)] == [401, 200]
    curl = process.wait_for(r"^curl .*")[0].replace("KEY", key)
    answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "data: [DONE]" in answer
    chat = process.wait_for(r"^  chat   (.*)")[1].replace("KEY", key)
    subprocess.run(["bash", "-c", f"{chat} --max-tokens 4 Hello"], check=True, timeout=60, env=clean_environ())
    assert process.stop() == 0
    assert key not in process.stdout
    files = [path for path in state_dir.rglob("*") if path.is_file()]
    assert {"gateway.log", "redis.log", "worker-1.log"} <= {path.name for path in files}
    assert not [path for path in files if key[26:].encode() in path.read_bytes()]


@pytest.mark.slow
def test_the_refusal_names_the_command_that_makes_the_first_key(
    start_quire: StartQuire, tiny_model: Path, tmp_path: Path
) -> None:
    state_dir = tmp_path / "a state folder"
    refused = start_quire(*flags(tiny_model, state_dir))
    assert refused.wait() == 1
    command = re.search(r"--require-keys is set, and there is no key: make one with `quire ([^`]*)`", refused.stderr)
    assert command, refused.stderr
    made = start_quire(*shlex.split(command[1]))
    assert made.wait() == 0, made.stderr
    assert f"using the Redis data of the state folder {state_dir}" in made.stderr
    assert_key_works(start_quire(*flags(tiny_model, state_dir)), made.stdout.strip(), state_dir)
    listed = start_quire("keys", "--state-dir", str(state_dir))
    assert listed.wait() == 0
    assert made.stdout.strip()[9:25] in listed.stdout


@pytest.mark.slow
def test_on_a_terminal_it_makes_and_shows_the_first_key(
    start_quire: StartQuire, tiny_model: Path, tmp_path: Path
) -> None:
    process = start_quire(*flags(tiny_model, tmp_path), terminal=True)
    key = process.wait_for(r"The first API key, shown only now .*: (sk-quire-\S+)")[1]
    page = process.wait_for(r"The chat page with this key: (\S+)")[1]
    assert page == f"{process.wait_ready()}/#key={key}"
    assert_key_works(process, key, tmp_path)


def test_a_key_is_made_only_for_a_terminal() -> None:
    """Nothing answers at the Redis: an answer without an error shows that no key is looked for."""
    assert first_key(GatewaySettings(), ServeSettings(), REDIS_URL, io.StringIO()) == ""
    admin = GatewaySettings(host="0.0.0.0", admin_key="0123456789abcdef")
    assert first_key(admin, ServeSettings(), REDIS_URL, io.StringIO()) == ""
    with pytest.raises(CommandError, match="--redis-url"):
        first_key(GatewaySettings(host="0.0.0.0"), ServeSettings(), REDIS_URL, io.StringIO())


def test_without_a_terminal_the_error_names_the_same_redis(redis_url: str) -> None:
    with pytest.raises(CommandError, match=r"make one with `quire keys create` and the same --redis-url"):
        first_key(GatewaySettings(host="0.0.0.0"), ServeSettings(redis_url=redis_url), redis_url, io.StringIO())
