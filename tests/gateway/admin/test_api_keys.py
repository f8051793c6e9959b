"""`quire keys` with a real Redis."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.admin.api_keys import run
from quire.gateway.admin.key_settings import KeySettings
from quire.shared.accounts.limits import AccountLimits
from quire.shared.accounts.secret import key_id_of
from quire.shared.accounts.store import AccountStore
from quire.shared.command_line import CommandError
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, tokens, until


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
    printed = capsys.readouterr()
    assert json.loads(printed.out)["revoked"] > 0
    assert f"refuse the key {key_id} within a second, and end its open calls" in printed.err
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


async def test_a_key_works_after_its_backup_is_restored_and_its_budget_goes_on(
    start_gateway: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = await start_gateway()
    store, url = gateway.gateway.process.key_ring.store, gateway.settings.redis_url
    _, secret = await store.create("acme", "web", "ci", AccountLimits(tokens_per_day=40))
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 10}
    async with gateway.worker(emit(tokens("abc"))):
        first = await gateway.post("/v1/completions", body, Authorization=f"Bearer {secret}")
    assert first.status == 200
    # A request that waits has reserved a part of the budget; the backup does not contain it.
    waiting = asyncio.create_task(gateway.post("/v1/completions", body, Authorization=f"Bearer {secret}"))
    await until(lambda: has_open_request(store))
    file = tmp_path / "keys.json"
    await asyncio.to_thread(act, url, action="backup", file=str(file))
    waiting.cancel()
    assert secret[26:] not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(CommandError, match="give the name of a new file"):
        await asyncio.to_thread(act, url, action="backup", file=str(file))

    await store.client.flushall()
    await asyncio.to_thread(act, url, action="restore", file=str(file))
    assert "restored: API keys: 1" in capsys.readouterr().err
    async with gateway.worker(emit(tokens("abc"))):
        assert (await gateway.post("/v1/completions", body, Authorization=f"Bearer {secret}")).status == 200
        refused = await gateway.post("/v1/completions", {**body, "max_tokens": 37}, Authorization=f"Bearer {secret}")
    assert (refused.status, refused.error["code"]) == (402, "insufficient_quota")


async def has_open_request(store: AccountStore) -> bool:
    return await store.client.hget(store.keys.spent("project:acme/web"), "open") == b"1"
