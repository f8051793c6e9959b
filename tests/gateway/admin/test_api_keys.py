"""`quire keys` with a real Redis."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.gateway.admin.api_keys import run
from quire.gateway.admin.key_settings import KeySettings
from quire.shared.accounts.secret import key_id_of
from quire.shared.command_line import CommandError


def act(redis_url: str, **settings: Any) -> int:
    return run(KeySettings(redis_url=redis_url, **settings), {})


def test_a_key_from_its_creation_to_its_end(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    act(redis_url)
    assert "there is no API key" in capsys.readouterr().err
    act(redis_url, action="create", name="ci", project="web", requests_per_minute=5, models="a, b")
    secret = capsys.readouterr().out.strip()
    key_id = key_id_of(secret)
    act(redis_url, action="limit", id=key_id, tokens_per_day=100, requests_per_minute=0)
    limits = json.loads(capsys.readouterr().out)["limits"]
    assert limits == {"models": ["a", "b"], "tokens_per_day": 100}
    act(redis_url, action="limit", project="web", cost_per_day=0.5)
    assert json.loads(capsys.readouterr().out)["limits"] == {"cost_per_day": 0.5}
    act(redis_url, action="limit", project="web", weight=300)
    assert json.loads(capsys.readouterr().out)["limits"] == {"cost_per_day": 0.5, "weight": 300}
    with pytest.raises(CommandError, match="--weight: weight must be set for a project"):
        act(redis_url, action="limit", id=key_id, weight=300)
    act(redis_url, action="rotate", id=key_id)
    other = capsys.readouterr().out.strip()
    assert key_id_of(other) == key_id != secret
    act(redis_url, action="revoke", id=key_id)
    act(redis_url)
    listed = capsys.readouterr().out
    assert f"{key_id}  default/web  ci  revoked" in listed
    act(redis_url, action="audit")
    audit = capsys.readouterr().out
    assert len(audit.splitlines()) == 6
    assert secret[26:] not in listed + audit
    act(redis_url, action="usage")
    assert capsys.readouterr().out.startswith("date,key,model")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"action": "revoke"}, "--id is missing"),
        ({"action": "show"}, "give the --id"),
        ({"action": "revoke", "id": "0" * 16}, "there is no account"),
        ({"action": "create", "name": "A B"}, "--name"),
        ({"action": "create", "priority": "highest"}, "--priority"),
        ({"action": "create", "weight": 5}, "--weight: weight must be set for a project"),
    ],
)
def test_faults_are_named(settings: dict[str, Any], message: str, redis_url: str) -> None:
    with pytest.raises(CommandError, match=message):
        act(redis_url, **settings)


def test_a_redis_that_does_not_answer_is_named() -> None:
    with pytest.raises(CommandError, match="--redis-url"):
        act("redis://127.0.0.1:1/0")
