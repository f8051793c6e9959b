"""The comparison of two addresses, on servers that answer at once and late."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from quire.ops.benchmarks.stack import proxy
from quire.ops.local.ports import free_port


def server(delay_s: float, seen: list[tuple[str, bool]]) -> TestServer:
    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append((request.headers.get("Authorization", ""), body["stream"]))
        if body["model"] != "m":
            return web.json_response({"error": {"message": "there is no such model"}}, status=404)
        await asyncio.sleep(delay_s)
        if not body["stream"]:
            return web.json_response({"choices": []})
        response = web.StreamResponse()
        await response.prepare(request)
        for content in ("", "Hi"):
            await response.write(f"data: {json.dumps({'choices': [{'delta': {'content': content}}]})}\n\n".encode())
            await asyncio.sleep(0.05)
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    return TestServer(app)


async def test_rates_and_first_tokens_are_those_of_each_address() -> None:
    seen: list[tuple[str, bool]] = []
    async with server(0.0, seen) as fast, server(0.1, []) as slow:
        first, second = (
            proxy.ComparedServer(str(one.make_url("/v1")), key, "m") for one, key in ((fast, "k"), (slow, ""))
        )
        await proxy.measure([first, second], rounds=2, seconds=0.3, concurrency=3, calls=2)
    assert len(first.rates) == len(second.firsts) == 2
    assert min(first.rates) > max(second.rates) > 0
    assert min(first.firsts) >= 0.05  # the first event is empty
    assert min(second.firsts) >= 0.15
    assert {key for key, _ in seen} == {"Bearer k"}
    assert sum(is_streamed for _, is_streamed in seen) == 4


async def test_a_call_that_fails_ends_the_measurement() -> None:
    async with server(0.0, []) as one:
        address = proxy.ComparedServer(str(one.make_url("/v1")), "", "other")
        with pytest.raises(ValueError, match="there is no such model"):
            await proxy.measure([address], rounds=1, seconds=0.1, concurrency=1, calls=1)


def test_a_server_that_is_not_there_gives_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert proxy.main([f"http://127.0.0.1:{free_port()}/v1"] * 2) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        proxy.main(["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1", "--keys", "a"])
    assert "--keys and --models take one value for each address" in capsys.readouterr().err


def test_a_spread_has_median_least_and_greatest() -> None:
    assert proxy.spread([0.003, 0.001, 0.002], 1e3) == "2.0 (1.0 to 3.0)"
