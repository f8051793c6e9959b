"""Clients that lose their connections again and again, and execute each tool call once: in all three dialects.

A client remembers the ids of the calls that it has executed. One kind of client keeps what it has read, and resumes the
stream after its last event. The other kind is started again, repeats its request with the same Idempotency-Key, and
reads the whole answer. Each connection goes to another gateway than the one before.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import openai
import pytest

from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from tests.gateway.api.test_conversation import ADD, CHAT, TEMPLATE
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Steps
from tests.support.gateway.response_calls import TOOL
from tests.support.gateway.running import MODEL, RunningGateway, tokens, write_model

CITIES = ("Köln", "Bonn", "Köln")
ANSWER = "Let me see." + "".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>\n' for city in CITIES
)
STEP_S = 0.002
KEY = "Idempotency-Key"
MESSAGES = "/v1/messages"
# Events that a connection lasts, or that it lasts longer than the one before.
LASTS = pytest.mark.parametrize("lasts", [1, 4])


async def slowly(request: GenerationRequest) -> Steps:
    """Emits the answer a token at a time, slowly enough that most connections are made while it runs."""
    emitted = [*tokens(ANSWER), 2]
    for at, token in enumerate(emitted, 1):
        await asyncio.sleep(STEP_S)
        reason = "stop" if at == len(emitted) else None
        yield (Delta(0, (token,), reason),), Outcome(reason) if reason else None


class Tools:
    """Executes tool calls, each id once. executed: (id, name, arguments) in the order of execution."""

    def __init__(self) -> None:
        self.executed: list[tuple[str, str, str]] = []
        self._ids: set[str] = set()

    def execute(self, call_id: str, name: str, arguments: str) -> None:
        if call_id not in self._ids:
            self._ids.add(call_id)
            self.executed.append((call_id, name, arguments))


class ChatClient:
    """Reads the stream of a chat, and executes a call as soon as the next one begins or the answer ends."""

    def __init__(self, tools: Tools, sdk: openai.AsyncOpenAI, key: str) -> None:
        self._tools = tools
        self._key = key
        self._id = ""
        self._last = ""
        self._call: dict[str, str] = {}
        self.is_done = False

    async def read(self, gateway: RunningGateway, count: int) -> None:
        """Reads up to `count` events over a connection of its own."""
        function = {name: TOOL[name] for name in ("name", "parameters")}
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Hello"}],
            "tools": [ADD, {"type": "function", "function": function}],
            "stream": True,
            "background": True,
        }
        opened = (
            gateway.stream(f"{CHAT}/{self._id}/stream", Last_Event_ID=self._last)
            if self._last
            else gateway.stream(CHAT, body, Idempotency_Key=self._key)
        )
        async with opened as stream:
            assert stream.response.status == 200, await stream.response.text()
            for _ in range(count):
                event = await stream.next()
                self._last = str(event.id)
                if event.data == "[DONE]":
                    self.is_done = True
                    return
                self._feed(event.data)

    def _feed(self, chunk: dict[str, Any]) -> None:
        self._id = chunk["id"]
        for choice in chunk["choices"]:
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    self._execute()
                    self._call = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
                self._call["arguments"] += call["function"]["arguments"]
            if choice["finish_reason"]:
                assert choice["finish_reason"] == "tool_calls"
                self._execute()

    def _execute(self) -> None:
        if self._call:
            self._tools.execute(**self._call)
        self._call = {}


class ResponseClient:
    """Reads the events of a response with the `openai` SDK, and executes a call as soon as its item is done."""

    def __init__(self, tools: Tools, sdk: openai.AsyncOpenAI, key: str) -> None:
        self._tools = tools
        self._sdk = sdk
        self._key = key
        self._id = ""
        self._last = -1
        self.is_done = False

    async def read(self, gateway: RunningGateway, count: int) -> None:
        """Reads up to `count` events over a connection of its own."""
        async with await self._open(self._sdk.with_options(base_url=f"{gateway.url}/v1")) as stream:
            async for event in stream:
                self._last = event.sequence_number
                if event.type == "response.created":
                    self._id = event.response.id
                if event.type == "response.output_item.done" and event.item.type == "function_call":
                    self._tools.execute(event.item.call_id, event.item.name, event.item.arguments)
                count -= 1
                self.is_done = event.type == "response.completed"
                if self.is_done or not count:
                    return

    async def _open(self, client: openai.AsyncOpenAI) -> Any:
        if self._id:
            return await client.responses.retrieve(self._id, stream=True, starting_after=self._last)
        return await client.responses.create(
            model=MODEL, input="Hello", tools=[TOOL], stream=True, background=True, extra_headers={KEY: self._key}
        )


class MessageClient:
    """Reads the events of a message of the Messages API, and executes a call as soon as its block stops."""

    def __init__(self, tools: Tools, sdk: openai.AsyncOpenAI, key: str) -> None:
        self._tools = tools
        self._key = key
        self._id = ""
        self._last = ""
        self._call: dict[str, str] = {}
        self.is_done = False

    async def read(self, gateway: RunningGateway, count: int) -> None:
        """Reads up to `count` events over a connection of its own."""
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Hello"}],
            "tools": [{"name": TOOL["name"], "input_schema": TOOL["parameters"]}],
            "max_tokens": 400,
            "stream": True,
            "background": True,
        }
        opened = (
            gateway.stream(f"{MESSAGES}/{self._id}/stream", Last_Event_ID=self._last)
            if self._last
            else gateway.stream(MESSAGES, body, Idempotency_Key=self._key)
        )
        async with opened as stream:
            assert stream.response.status == 200, await stream.response.text()
            event_id = ""
            async for line in stream.response.content:
                if line.startswith(b"id: "):
                    event_id = line[4:].decode().strip()
                if line.startswith(b"data: "):
                    self._feed(json.loads(line[6:]))
                    self._last = event_id
                    count -= 1
                    if self.is_done or not count:
                        return

    def _feed(self, event: dict[str, Any]) -> None:
        if event["type"] == "message_start":
            self._id = event["message"]["id"]
        elif event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            block = event["content_block"]
            self._call = {"call_id": block["id"], "name": block["name"], "arguments": ""}
        elif event["type"] == "content_block_delta" and self._call:
            self._call["arguments"] += event["delta"]["partial_json"]
        elif event["type"] == "content_block_stop" and self._call:
            self._tools.execute(**self._call)
            self._call = {}
        self.is_done = event["type"] == "message_stop"


Client = type[ChatClient] | type[ResponseClient] | type[MessageClient]
CLIENTS = pytest.mark.parametrize("client_class", [ChatClient, ResponseClient, MessageClient])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("once") / "test-model", chat_template=TEMPLATE)


@dataclass(frozen=True)
class Servers:
    """Two gateways, and the SDK that reaches both."""

    gateways: list[RunningGateway]
    sdk: openai.AsyncOpenAI

    async def undisturbed(self, client_class: Client, key: str) -> list[tuple[str, str, str]]:
        """The calls of the request with this key, read over one connection; checks what they ask for."""
        tools = Tools()
        client = client_class(tools, self.sdk, key)
        await client.read(self.gateways[0], 10_000)
        assert client.is_done
        assert [name for _, name, _ in tools.executed] == ["weather"] * len(CITIES)
        assert tuple(json.loads(arguments)["city"] for _, _, arguments in tools.executed) == CITIES
        assert len({call_id for call_id, _, _ in tools.executed}) == len(CITIES)
        return tools.executed


@pytest.fixture
async def servers(start_gateway: Start, folder: Path) -> AsyncIterator[Servers]:
    """Two gateways, and a worker that answers slowly."""
    gateways = [await start_gateway(model=str(folder), tool_call_format="hermes") for _ in range(2)]
    async with gateways[0].worker(slowly), gateways[0].openai() as sdk:
        yield Servers(gateways, sdk)


@pytest.mark.slow
@CLIENTS
@LASTS
async def test_a_client_that_resumes_executes_each_call_once(
    servers: Servers, client_class: Client, lasts: int
) -> None:
    tools = Tools()
    client = client_class(tools, servers.sdk, "resumes")
    connections = 0
    for gateway in cycle(servers.gateways):
        await client.read(gateway, lasts)
        connections += 1
        if client.is_done:
            break
    assert connections > len(CITIES)
    assert tools.executed == await servers.undisturbed(client_class, "resumes")


@pytest.mark.soak
@CLIENTS
@LASTS
async def test_a_client_that_is_started_again_executes_each_call_once(
    servers: Servers, client_class: Client, lasts: int
) -> None:
    """Only the executed ids outlive the client. Each connection lasts longer than the one before."""
    tools = Tools()
    count, executed = 0, []
    for gateway in cycle(servers.gateways):
        count += lasts
        client = client_class(tools, servers.sdk, "again")
        await client.read(gateway, count)
        executed.append(len(tools.executed))
        if client.is_done:
            break
    # The client was started again before a call, and between two calls.
    assert executed[0] == 0
    assert any(0 < number < len(CITIES) for number in executed)
    assert tools.executed == await servers.undisturbed(client_class, "again")
