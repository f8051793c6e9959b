"""The benchmark of /v1/embeddings: which calls it makes, what it counts, and one small run of the real stack."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from quire.ops.benchmarks.stack.embeddings import Server, measure


def counting_app(name: str, calls: list[tuple[str, dict[str, Any]]], answers: int | None = None) -> web.Application:
    """Return a server that notes its calls and gives `answers` embeddings, by default one per input."""

    async def embed(request: web.Request) -> web.Response:
        body = await request.json()
        calls.append((name, body))
        count = len(body["input"]) if answers is None else answers
        return web.json_response({"data": [{"index": index} for index in range(count)]})

    app = web.Application()
    app.router.add_post("/v1/embeddings", embed)
    return app


async def test_two_servers_get_the_same_inputs_in_alternating_order() -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    async with TestServer(counting_app("a", calls)) as first, TestServer(counting_app("b", calls)) as second:
        servers = [
            Server("a", str(first.make_url("")).rstrip("/"), "model-a", {"pooling": "mean"}),
            Server("b", str(second.make_url("")).rstrip("/"), "model-b", {}),
        ]
        times = await measure(servers, inputs=3, tokens=5, repeat=2, vocab_size=50, seed=1)
    assert [name for name, _ in calls] == ["a", "b", "b", "a", "a", "b"]
    assert [len(seconds) for seconds in times] == [2, 2]
    assert all(second > 0 for seconds in times for second in seconds)
    inputs = [body["input"] for _, body in calls]
    assert inputs[0] == inputs[1] != inputs[2] == inputs[3] != inputs[4] == inputs[5]
    assert all(len(prompt) == 5 and 2 <= min(prompt) <= max(prompt) < 50 for prompts in inputs for prompt in prompts)
    assert calls[0][1]["pooling"] == "mean"
    assert "pooling" not in calls[1][1]


async def test_a_server_that_leaves_out_an_embedding_is_an_error() -> None:
    async with TestServer(counting_app("a", [], answers=2)) as server:
        url = str(server.make_url("")).rstrip("/")
        with pytest.raises(RuntimeError, match="200"):
            await measure([Server("a", url, "m", {})], inputs=3, tokens=5, repeat=1, vocab_size=50, seed=1)


@pytest.mark.slow
def test_a_small_run_of_the_stack() -> None:
    command = "-m quire.ops.benchmarks.stack.embeddings --shape tiny --inputs 2 --tokens 16 --repeat 1"
    run = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert re.search(r"^quire: 2 inputs of 16 tokens: \d+ tokens/s", run.stdout, re.MULTILINE), run.stdout
