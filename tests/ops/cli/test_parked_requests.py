"""`quire parking` finds the Redis of a running `quire serve`, or says that there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.ops.cli.parked_requests import parking
from quire.ops.cli.settings import ParkedSettings
from quire.ops.local import preconditions
from quire.shared.command_line import CommandError


def test_without_a_server_the_command_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditions, "DEFAULT_REDIS_URL", "redis://127.0.0.1:1/0")
    with pytest.raises(CommandError, match=r"no `quire serve` runs with the state folder .*--redis-url"):
        parking(ParkedSettings(state_dir=str(tmp_path)), {})


def test_a_given_redis_is_used() -> None:
    with pytest.raises(CommandError, match=r"no Redis at redis://127\.0\.0\.1:1/0"):
        parking(ParkedSettings(redis_url="redis://127.0.0.1:1/0"), {})
