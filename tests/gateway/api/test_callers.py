"""Who calls: keys, headers, and pages of other origins."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from quire.gateway.api.caller import ANONYMOUS, Caller
from quire.gateway.errors.api_errors import ModelNotFound
from quire.gateway.features.cors.origins import CorsOrigins
from quire.gateway.features.keys.authentication import PUBLIC
from quire.gateway.features.keys.key_policy import check_model, may_use
from quire.shared.accounts.account import Account
from quire.shared.accounts.limits import AccountLimits
from quire.shared.process.errors import StartError
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, Reply, RunningGateway, chat_body, raw_request, tokens

# --- Keys over HTTP with a real Redis: which calls need one, and that no caller reaches what another caller -----------


NOT_THERE = "0" * 32


async def key_of(gateway: RunningGateway, **limits: Any) -> str:
    store = gateway.gateway.process.keys.ring.store
    return (await store.create("acme", "web", "test", AccountLimits.of(limits)))[1]


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def send(gateway: RunningGateway, method: str, path: str, body: Any = None, key: str = "", **more: str) -> Any:
    data = json.dumps(body).encode() if body is not None else b""
    return await gateway.send(raw_request(method, path, data, {**(headers(key) if key else {}), **more}))


async def test_a_gateway_that_requires_keys_answers_only_probes_and_files_without_one(start_gateway: Start) -> None:
    gateway = await start_gateway(require_keys=True)
    for resource in gateway.app.router.resources():
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
    store, key = gateway.gateway.process.keys.ring.store, await key_of(gateway)
    key_id = key[9:25]
    wrong = key[:-1] + ("A" if key[-1] != "A" else "B")
    for secret in (wrong, "sk-quire-x", "sk-other", "sk-quire-" + "0" * 16 + key[25:]):
        reply = await send(gateway, "GET", "/v1/models", key=secret)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    _, new = await store.rotate(key_id, grace_s=60)
    _, newer = await store.rotate(key_id)
    gateway.gateway.process.keys.ring.forget()
    assert [(await send(gateway, "GET", "/v1/models", key=one)).status for one in (key, new, newer)] == [401, 401, 200]
    await store.revoke(key_id)
    gateway.gateway.process.keys.ring.forget()
    assert (await send(gateway, "GET", "/v1/models", key=newer)).status == 401
    _, old = await store.create("acme", "web", "old", AccountLimits(), expires=1)
    reply = await send(gateway, "GET", "/v1/models", key=old)
    assert "expired" in reply.error["message"]


async def test_an_open_gateway_takes_other_tokens_for_none_and_checks_keys(gateway: RunningGateway) -> None:
    assert (await send(gateway, "GET", "/v1/models", key="sk-of-another-server")).status == 200
    assert (await send(gateway, "GET", "/v1/models", key="sk-quire-" + "0" * 16 + "-" + "x" * 43)).status == 401


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


# --- The models that keys may use; tests/gateway/features/keys has the other limits over HTTP ----------------


def caller(*models: tuple[str, ...]) -> Caller:
    return Caller(
        "a", tuple(Account(kind="key", id="a", name="a", limits=AccountLimits(models=names)) for names in models)
    )


def test_a_model_must_be_one_of_each_account() -> None:
    assert may_use(ANONYMOUS, "a")
    assert may_use(caller((), ("a", "b")), "a")
    assert not may_use(caller(("b",), ("a", "b")), "a")
    with pytest.raises(ModelNotFound, match="does not exist, or your API key has no access"):
        check_model(caller(("b",)), "a")


# --- CORS: only pages of the configured origins may call the API, and never with credentials --------------------------


ORIGIN = "https://app.example.com"
CHAT = "/v1/chat/completions"


async def preflight(gateway: RunningGateway, origin: str = ORIGIN, path: str = CHAT, **more: str) -> Reply:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST", **more}
    return await gateway.send(raw_request("OPTIONS", path, headers=headers))


def cors_headers(reply: Reply) -> set[str]:
    return {name for name in reply.headers if name.startswith("access-control-")}


async def test_without_the_setting_there_are_no_cors_headers(gateway: RunningGateway) -> None:
    assert (await preflight(gateway)).status == 405
    plain = await gateway.send(raw_request("GET", "/v1/models", headers={"Origin": ORIGIN}))
    assert plain.status == 200
    assert not cors_headers(plain)
    assert "vary" not in plain.headers


async def test_a_listed_origin_may_call(start_gateway: Start) -> None:
    gateway = await start_gateway(cors_origins=f"{ORIGIN}, http://localhost:3000")
    asked = "authorization,content-type,x-stainless-os"
    reply = await preflight(gateway, **{"Access-Control-Request-Headers": asked})
    assert (reply.status, reply.body) == (204, b"")
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    assert reply.headers["access-control-allow-methods"] == "GET, POST, DELETE"
    assert reply.headers["access-control-allow-headers"] == asked
    assert int(reply.headers["access-control-max-age"]) > 0
    assert reply.headers["vary"] == "Origin"
    async with gateway.worker(emit(tokens("a"), "stop")):
        answer = await gateway.post(CHAT, chat_body(), Origin="http://localhost:3000")
        async with gateway.stream(CHAT, chat_body(stream=True), Origin=ORIGIN) as stream:
            assert stream.response.headers["Access-Control-Allow-Origin"] == ORIGIN
            await stream.rest()
    wrong = await gateway.post(CHAT, chat_body(n=0), Origin="http://localhost:3000")
    for found in (answer, wrong):
        assert found.headers["access-control-allow-origin"] == "http://localhost:3000"
        exposed = found.headers["access-control-expose-headers"]
        assert exposed == "X-Request-Id, X-Quire-Request-Id, Retry-After, X-Quire-No-Effect"
    assert (answer.status, wrong.status) == (200, 400)


@pytest.mark.parametrize(
    "origin", ["https://evil.example.com", "http://app.example.com", f"{ORIGIN}:8443", f"{ORIGIN}.evil.org", "null", ""]
)
async def test_another_origin_may_not(start_gateway: Start, origin: str) -> None:
    gateway = await start_gateway(cors_origins=ORIGIN)
    refused = await preflight(gateway, origin)
    assert (refused.status, cors_headers(refused)) == (405, set())
    reply = await gateway.send(raw_request("GET", "/v1/models", headers={"Origin": origin}))
    assert (reply.status, cors_headers(reply)) == (200, set())
    # A cache must not give this answer to a page of an allowed origin.
    assert reply.headers["vary"] == "Origin"


async def test_a_star_is_every_origin_without_credentials(start_gateway: Start) -> None:
    gateway = await start_gateway(cors_origins="*")
    for reply in (
        await preflight(gateway, "https://anything.example.net"),
        await gateway.send(raw_request("GET", "/v1/models", headers={"Origin": "null"})),
    ):
        assert reply.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in reply.headers


async def test_pages_and_the_engine_view_are_for_their_own_origin(start_gateway: Start) -> None:
    gateway = await start_gateway(cors_origins="*", engine_view="on")
    for path in ("/", "/engine", "/engine/workers", "/chat.js", "/readyz"):
        reply = await gateway.send(raw_request("GET", path, headers={"Origin": ORIGIN}))
        assert (reply.status in (200, 503), cors_headers(reply)) == (True, set())
    assert (await preflight(gateway, path="/engine/workers")).status == 405


@pytest.mark.parametrize("asked", ["x\ty", "a b", "a,,b", "x" * 3000, "é"])
async def test_odd_header_names_are_not_repeated(start_gateway: Start, asked: str) -> None:
    gateway = await start_gateway(cors_origins="*")
    reply = await preflight(gateway, **{"Access-Control-Request-Headers": asked})
    assert reply.status == 204
    assert "access-control-allow-headers" not in reply.headers


@pytest.mark.parametrize(
    "text",
    ["app.example.com", "https://app.example.com/", "https://App.example.com", "https://*.example.com", "null", "*, *"],
)
def test_what_no_browser_sends_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(StartError, match=r"--cors-origins \(QUIRE_CORS_ORIGINS\)"):
        CorsOrigins.parse(text)


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("", set()),
        (" , ", set()),
        ("*", {"*"}),
        ("http://[::1]:8000,https://a-b.c", {"http://[::1]:8000", "https://a-b.c"}),
    ],
)
def test_origins_are_separated_by_commas(text: str, origins: Any) -> None:
    assert CorsOrigins.parse(text).origins == origins


# --- The id that a client gives is in the answer and in the log; the server's own id stays its own --------------------


async def test_without_an_id_of_the_client_both_headers_have_that_of_the_server(gateway: RunningGateway) -> None:
    reply = await gateway.get("/v1/models")
    assert re.fullmatch("[0-9a-f]{32}", reply.headers["x-request-id"])
    assert reply.headers["x-quire-request-id"] == reply.headers["x-request-id"]


async def test_the_id_of_a_client_comes_back_and_is_logged(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gateway.access")
    async with gateway.worker(emit(tokens("a"), "stop")):
        reply = await gateway.post(
            "/v1/completions", {"model": "test-model", "prompt": "x"}, X_Request_Id="trace/1.2:[x]~!"
        )
    assert reply.headers["x-request-id"] == "trace/1.2:[x]~!"
    server_id = reply.headers["x-quire-request-id"]
    assert reply.json["id"] == f"cmpl-{server_id}"
    [record] = caplog.records
    assert record.__dict__["client_request_id"] == "trace/1.2:[x]~!"
    assert record.__dict__["request_id"] == server_id
    assert f"request={server_id} " in record.getMessage()
    assert "client_request=trace/1.2:[x]~!" in record.getMessage()


async def test_streams_and_errors_have_both_ids(gateway: RunningGateway) -> None:
    async with (
        gateway.worker(emit(tokens("a"), "stop")),
        gateway.stream(
            "/v1/completions", {"model": "test-model", "prompt": "x", "stream": True}, X_Request_Id="mine"
        ) as stream,
    ):
        assert stream.response.headers["X-Request-Id"] == "mine"
        assert len(stream.response.headers["X-Quire-Request-Id"]) == 32
    lost = await gateway.send(raw_request("GET", "/nothing", headers={"X-Request-Id": "mine"}))
    assert (lost.status, lost.headers["x-request-id"]) == (404, "mine")


async def test_an_id_that_cannot_be_logged_is_refused(gateway: RunningGateway) -> None:
    for value in ["two words", 'a"b', "a'b", "x" * 129, "é", "a\tb"]:
        reply = await gateway.send(raw_request("GET", "/v1/models", headers={"X-Request-Id": value}))
        assert (reply.status, reply.error["param"]) == (400, "X-Request-Id")
        assert len(reply.headers["x-request-id"]) == 32


async def test_two_ids_are_refused(gateway: RunningGateway) -> None:
    reply = await gateway.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\r\nX-Request-Id: b\r\n\r\n")
    assert (reply.status, reply.error["param"]) == (400, "X-Request-Id")
    assert "2 values" in reply.error["message"]
