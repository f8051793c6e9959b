"""`quire keys` uses the Redis of a state folder, whether or not its `quire serve` runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.ops.cli.api_keys import keys
from quire.ops.cli.settings import ApiKeySettings
from quire.ops.local.preconditions import lock_state_dir
from quire.shared.accounts.secret import key_id_of
from quire.shared.command_line import CommandError
from tests.conftest import StartQuire


def test_keys_are_made_and_used_while_no_server_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandError, match=r"no `quire serve` has run with the state folder .*--redis-url"):
        keys(ApiKeySettings(state_dir=str(tmp_path)), {})
    assert list(tmp_path.iterdir()) == []
    assert keys(ApiKeySettings(action="create", state_dir=str(tmp_path)), {}) == 0
    secret = capsys.readouterr().out.strip()
    assert keys(ApiKeySettings(action="revoke", id=key_id_of(secret), state_dir=str(tmp_path)), {}) == 0
    assert keys(ApiKeySettings(state_dir=str(tmp_path)), {}) == 0
    assert "revoked" in capsys.readouterr().out
    assert not (tmp_path / "redis" / "redis.sock").exists(), "the Redis ended"
    lock_state_dir(tmp_path).close()


@pytest.mark.slow
def test_commands_at_the_same_time_wait_for_each_other(start_quire: StartQuire, tmp_path: Path) -> None:
    running = [start_quire("keys", "create", "--state-dir", str(tmp_path)) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert len({process.stdout for process in running}) == 3


def test_a_given_redis_is_used() -> None:
    with pytest.raises(CommandError, match=r"no Redis at redis://127\.0\.0\.1:1/0"):
        keys(ApiKeySettings(redis_url="redis://127.0.0.1:1/0"), {})
