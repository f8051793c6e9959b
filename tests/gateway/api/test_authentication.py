"""Keys over HTTP with a real Redis: which calls need one, and that no caller reaches what another caller made."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.gateway.api.authentication import PUBLIC
from quire.shared.accounts.limits import AccountLimits
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, RunningGateway, chat_body, raw_request, tokens

NOT_THERE = "0" * 32


async def key_of(gateway: RunningGateway, **limits: Any) -> str:
    store = gateway.gateway.process.key_ring.store
    return (await store.create("acme", "web", "test", AccountLimits.of(limits)))[1]


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def send(gateway: RunningGateway, method: str, path: str, body: Any = None, key: str = "", **more: str) -> Any:
    data = json.dumps(body).encode() if body is not None else b""
    return await gateway.send(raw_request(method, path, data, {**(headers(key) if key else {}), **more}))


async def test_a_gateway_that_requires_keys_answers_only_probes_and_files_without_one(start_gateway: Start) -> None:
    gateway = await start_gateway(require_keys=True)
    app = gateway._runner.app if gateway._runner else None
    assert app is not None
    for resource in app.router.resources():
        path = resource.canonical
        for route in resource:
            if route.method in ("HEAD", "*"):
                continue
            reply = await send(gateway, route.method, path.replace("{id}", NOT_THERE).replace("{name}", MODEL))
            is_public = path in PUBLIC or path in ("/", "/engine") or path.endswith((".js", ".css", ".svg"))
            assert (reply.status == 401) != is_public, path
            if reply.status == 401:
                assert reply.headers["www-authenticate"] == "Bearer"
    assert (await send(gateway, "GET", "/none")).status == 401


@pytest.mark.parametrize("scheme", ["bearer", "x-api-key"])
async def test_a_key_in_either_header_is_accepted(scheme: str, start_gateway: Start) -> None:
    gateway = await start_gateway(require_keys=True)
    key = await key_of(gateway)
    given = headers(key) if scheme == "bearer" else {"x-api-key": key}
    assert (await gateway.send(raw_request("GET", "/v1/models", headers=given))).status == 200


async def test_wrong_revoked_expired_and_rotated_keys_are_refused(start_gateway: Start) -> None:
    gateway = await start_gateway(require_keys=True)
    store, key = gateway.gateway.process.key_ring.store, await key_of(gateway)
    key_id = key[9:25]
    wrong = key[:-1] + ("A" if key[-1] != "A" else "B")
    for secret in (wrong, "sk-quire-x", "sk-other", "sk-quire-" + "0" * 16 + key[25:]):
        reply = await send(gateway, "GET", "/v1/models", key=secret)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    _, new = await store.rotate(key_id, grace_s=60)
    _, newer = await store.rotate(key_id)
    gateway.gateway.process.key_ring.forget()
    assert [(await send(gateway, "GET", "/v1/models", key=one)).status for one in (key, new, newer)] == [401, 401, 200]
    await store.revoke(key_id)
    gateway.gateway.process.key_ring.forget()
    assert (await send(gateway, "GET", "/v1/models", key=newer)).status == 401
    _, old = await store.create("acme", "web", "old", AccountLimits(), expires=1)
    reply = await send(gateway, "GET", "/v1/models", key=old)
    assert "expired" in reply.error["message"]


async def test_an_open_gateway_takes_other_tokens_for_none_and_checks_keys(gateway: RunningGateway) -> None:
    assert (await send(gateway, "GET", "/v1/models", key="sk-of-another-server")).status == 200
    assert (await send(gateway, "GET", "/v1/models", key="sk-quire-" + "0" * 16 + "-" + "x" * 43)).status == 401


async def test_an_idempotency_key_of_one_caller_is_not_that_of_another(start_gateway: Start) -> None:
    gateway = await start_gateway()
    first, second = await key_of(gateway), await key_of(gateway)
    async with gateway.worker(emit(tokens("abc"))):
        ids = [
            (await send(gateway, "POST", "/v1/chat/completions", chat_body(), key, Idempotency_Key="k")).json["id"]
            for key in (first, second, "", first, second, "")
        ]
    assert ids[:3] == ids[3:]
    assert len(set(ids)) == 3


async def test_a_secret_is_neither_in_redis_nor_in_logs(
    start_gateway: Start, caplog: pytest.LogCaptureFixture, redis_url: str
) -> None:
    caplog.set_level("DEBUG")
    gateway = await start_gateway(require_keys=True)
    key = await key_of(gateway)
    async with gateway.worker(emit(tokens("abc"))):
        answers = [await send(gateway, "POST", "/v1/chat/completions", chat_body(), key)]
        answers += [await send(gateway, "GET", f"/v1/none/{key}", key=key[:-1])]
        answers += [await send(gateway, "POST", "/v1/chat/completions", {"model": 1}, key)]
    client: Any = gateway.gateway.broker.client
    dumped = b""
    for name in await client.keys("*"):
        dumped += name + (await client.execute_command("DUMP", name) or b"")
    secret = key[26:]
    assert secret.encode() not in dumped
    assert all(secret.encode() not in answer.body for answer in (answers[0], answers[2]))
    assert f"key={key[9:25]}" in caplog.text
