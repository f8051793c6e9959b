"""The commands that read and write Redis: keys, dead letters and parked requests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from redis import Redis

from quire.gateway.features.keys.key_settings import CreateKey, ListKeys, RevokeKey
from quire.ops.cli.redis_commands import dead, keys
from quire.ops.cli.settings import DeadSettings, of_state_folder
from quire.ops.local.embedded_redis import running_url
from quire.ops.local.preconditions import find_redis, lock_state_dir
from quire.shared.accounts.secret import key_id_of
from quire.shared.config.command_line import CommandError
from quire.shared.protocol.keys import LaneKeys
from tests.conftest import StartQuire, clean_environ

# --- api keys ---------------------------------------------------------------------------------------------------------
# `quire keys` uses the Redis of a state folder, whether or not its `quire serve` runs.


def test_keys_are_made_and_used_while_no_server_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandError, match=r"no `quire serve` has run with the state folder .*--redis-url"):
        keys(of_state_folder(ListKeys)(state_dir=str(tmp_path)), {})
    assert list(tmp_path.iterdir()) == []
    assert keys(of_state_folder(CreateKey)(state_dir=str(tmp_path)), {}) == 0
    secret = capsys.readouterr().out.strip()
    assert keys(of_state_folder(RevokeKey)(id=key_id_of(secret), state_dir=str(tmp_path)), {}) == 0
    assert keys(of_state_folder(ListKeys)(state_dir=str(tmp_path)), {}) == 0
    assert "revoked" in capsys.readouterr().out
    assert not (tmp_path / "redis" / "redis.sock").exists(), "the Redis ended"
    lock_state_dir(tmp_path).close()


@pytest.mark.slow
def test_commands_at_the_same_time_wait_for_each_other(start_quire: StartQuire, tmp_path: Path) -> None:
    running = [start_quire("keys", "create", "--state-dir", str(tmp_path)) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert len({process.stdout for process in running}) == 3


# --- dead letters -----------------------------------------------------------------------------------------------------
# `quire dead` over several lanes.


FIELDS = {"id": "r", "class": "standard", "worker": "w", "emitted": "3", "body": "x", "metadata": ""}


@pytest.fixture
def lanes(redis_url: str) -> str:
    """Two lanes with an entry of the same id, and one more in the second."""
    with Redis.from_url(redis_url) as client:
        for lane in ("one", "two/b"):
            client.xadd(LaneKeys(lane).dead, dict(FIELDS), id="5-0")
        client.xadd(LaneKeys("two/b").dead, dict(FIELDS), id="6-0")
    return redis_url


def settings(redis_url: str, action: str, entry: str = "", lane: str = "") -> DeadSettings:
    return DeadSettings(action=action, entry=entry, redis_url=redis_url, served_model_name=lane)


def quire_dead(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", "dead", *arguments]
    return subprocess.run(
        command, env=clean_environ(**environ), capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder", [pytest.param("state", marks=pytest.mark.soak), "state" * 20], ids=["socket", "port"]
)
def test_the_redis_of_a_running_serve_is_found_by_its_state_folder(
    folder: str, start_quire: StartQuire, tiny_model: Path, tmp_path: Path
) -> None:
    state = tmp_path / folder
    process = start_quire("serve", str(tiny_model), "--port", "0", "--state-dir", str(state))
    process.wait_ready()
    url = running_url(state)
    assert url.startswith("unix://" if folder == "state" else "redis://")
    with Redis.from_url(url) as client:
        client.xadd(LaneKeys("tiny").dead, dict(FIELDS), id="7-0")
    for done in (quire_dead("--state-dir", str(state)), quire_dead(QUIRE_STATE_DIR=str(state))):
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("7-0  tiny  request r  ")
    assert process.stop() == 0
    assert find_redis(state) is None


@pytest.mark.slow
def test_the_redis_that_a_running_serve_was_given_is_found_too(
    lanes: str, start_quire: StartQuire, tiny_model: Path, tmp_path: Path
) -> None:
    process = start_quire("serve", str(tiny_model), "--port", "0", "--state-dir", str(tmp_path), "--redis-url", lanes)
    process.wait_ready()
    assert len(quire_dead("--state-dir", str(tmp_path)).stdout.splitlines()) == 3
    assert process.stop() == 0


@pytest.mark.slow
def test_a_serve_that_was_killed_is_not_taken_for_a_running_one(
    start_quire: StartQuire, tiny_model: Path, tmp_path: Path
) -> None:
    process = start_quire("serve", str(tiny_model), "--port", "0", "--state-dir", str(tmp_path))
    process.wait_for("^Starting")
    assert find_redis(tmp_path) is not None
    process.kill()
    process.wait()
    assert find_redis(tmp_path) is None


@pytest.mark.slow
def test_without_any_redis_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.ops.local.preconditions.DEFAULT_REDIS_URL", "redis://127.0.0.1:1/0")
    with pytest.raises(CommandError) as caught:
        dead(DeadSettings(state_dir=str(tmp_path)), {})
    said = str(caught.value)
    assert said.startswith(
        f"no `quire serve` runs with the state folder {tmp_path}, and no Redis is at redis://127.0.0.1:1"
    )
    for remedy in ("start `quire serve`", "--state-dir (QUIRE_STATE_DIR)", "--redis-url (QUIRE_REDIS_URL)"):
        assert remedy in said
    assert not list(tmp_path.iterdir()), "looking makes no files"
    with pytest.raises(CommandError, match=r"no Redis at redis://127.0.0.1:1/0: .*; pass another --redis-url"):
        dead(settings("redis://127.0.0.1:1/0", "list"), {})
