from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from quire.shared.telemetry.internal_server import (
    InternalServer,
    PortError,
    ServiceUnavailable,
    bind,
    json_response,
)


async def good(request: web.Request) -> web.Response:
    return json_response(200, {"fine": True})


async def late(request: web.Request) -> web.Response:
    raise ServiceUnavailable("the engine does not answer")


async def broken(request: web.Request) -> web.Response:
    raise ValueError("secret")


@pytest.fixture
async def server() -> AsyncIterator[InternalServer]:
    server = InternalServer(bind("127.0.0.1", 0), {"/good": good, "/late": late, "/broken": broken})
    await server.start()
    yield server
    await server.close()


async def fetch(url: str, method: str = "GET") -> tuple[int, dict[str, object]]:
    def call() -> tuple[int, dict[str, object]]:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    return await asyncio.to_thread(call)


async def test_every_answer_is_json(server: InternalServer) -> None:
    assert await fetch(f"{server.url}/good") == (200, {"fine": True})
    assert await fetch(f"{server.url}/late") == (503, {"error": "the engine does not answer"})
    assert await fetch(f"{server.url}/none") == (
        404,
        {"error": "there is no /none; there are /good, /late and /broken"},
    )
    assert (await fetch(f"{server.url}/good", "POST"))[0] == 405


async def test_an_unexpected_error_is_not_quoted(server: InternalServer) -> None:
    assert await fetch(f"{server.url}/broken") == (500, {"error": "internal error; the log says more"})


def test_a_port_that_is_taken_or_forbidden_is_refused_with_the_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortError, match=rf"--internal-port {port} .*give another one, or 0"):
            bind("127.0.0.1", port)
    with pytest.raises(PortError, match=r"--internal-host .*give an address of this machine"):
        bind("203.0.113.1", 0)
