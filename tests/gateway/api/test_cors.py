"""CORS: only pages of the configured origins may call the API, and never with credentials."""

from __future__ import annotations

from typing import Any

import pytest

from quire.gateway.api.cors import CorsOrigins
from quire.shared.errors import StartError
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import Reply, RunningGateway, chat_body, raw_request, tokens

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
