"""Benchmarks of the stack: embeddings and tools."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from quire.ops.benchmarks.stack.embeddings import Server, measure
from quire.ops.benchmarks.stack.tools import QUESTION, TOOLS, WRITES_NO_TOOLS, WRITES_TOOLS, described_tool, stream
from quire.shared.text.chat_template import ChatTemplate

# --- embeddings -------------------------------------------------------------------------------------------------------
# The benchmark of /v1/embeddings: which calls it makes, what it counts, and one small run of the real stack.


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


# --- tools ------------------------------------------------------------------------------------------------------------
# The benchmark of tools: both kinds of call have the same prompt, times count tokens, and one small run.


def test_the_text_of_tools_is_the_prompt_of_tools() -> None:
    template = ChatTemplate(WRITES_TOOLS + "{{ messages[0].content }}", {})
    tools = [described_tool(number) for number in range(TOOLS)]
    text = "".join(f"{json.dumps(tool, ensure_ascii=False)}\n" for tool in tools)
    with_tools = template.render([{"role": "user", "content": QUESTION}], tools=tools)
    assert with_tools == template.render([{"role": "user", "content": text + QUESTION}])
    assert with_tools.count("read_lines_") == TOOLS
    silent = ChatTemplate(WRITES_NO_TOOLS + "{{ messages[0].content }}", {})
    assert "tools" in silent.variables  # otherwise the gateway describes the tools in the message
    assert silent.render([{"role": "user", "content": QUESTION}], tools=tools) == QUESTION


def event(position: str, delta: dict[str, Any]) -> str:
    return f"id: {position}\ndata: {json.dumps({'choices': [{'delta': delta}]})}\n\n"


async def times_of(*events: str) -> tuple[float, float]:
    """Return the times that `stream` measures for these events, 20 ms apart."""

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.headers["Accept"] == "text/event-stream"
        response = web.StreamResponse()
        await response.prepare(request)
        for one in events:
            await response.write(one.encode())
            await asyncio.sleep(0.02)
        return response

    app = web.Application()
    app.router.add_post("/", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        return await stream(session, str(server.make_url("/")), {}, 10)


async def test_the_time_between_tokens_counts_tokens_and_not_events() -> None:
    """Several tokens may come in one event, and a part of a call counts as text does."""
    call = {"tool_calls": [{"index": 0, "function": {"arguments": "x"}}]}
    opening = event("0.1", {"role": "assistant", "content": ""})
    first, by_one = await times_of(opening, event("1", {"content": "a"}), event("2", {"content": "b"}))
    assert first >= 0.02
    _, by_ten = await times_of(opening, event("1", call), event("11", call), event("11.1", {}), "data: [DONE]\n\n")
    assert by_one >= 0.02
    assert 0.002 <= by_ten < by_one


async def test_a_chat_that_fails_ends_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="a chat failed: no room"):
        await times_of('data: {"error": {"message": "no room"}}\n\n')


async def test_a_new_prompt_has_another_salt_each_time_it_is_sent_again() -> None:
    """An answer without text is asked for again, and its prompt is in the prefix cache under its salt."""
    salts: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        salts.append((await request.json())["cache_salt"])
        return web.Response(text=event("1", {"content": "a" if len(salts) == 3 else ""}))

    app = web.Application()
    app.router.add_post("/", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        await stream(session, str(server.make_url("/")), {"cache_salt": "s"}, 1, is_new=True)
    assert len(set(salts)) == 3


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_small_run() -> None:
    command = [sys.executable, "-m", "quire.ops.benchmarks.stack.tools", "--shape", "tiny", "--rounds", "1"]
    done = subprocess.run([*command, "--prompt", "tools"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(.+): \d+\.\d{3} \(from \d+\.\d{3} to \d+\.\d{3}\)$", done.stdout, re.MULTILINE)
    assert found == ["first token, new prompts", "first token, cached prompts"], done.stdout
