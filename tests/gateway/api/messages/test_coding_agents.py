"""The request sequences of a coding agent, over HTTP as it sends them.

The sequences follow public issue threads: a probe with one token, a count before each turn, a system prompt of several
cached blocks of which the first is a label that changes with each request, tools with flags, adaptive thinking with a
budget of 0, edits of the context, and results of several tools in one message.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from quire.shared.protocol.messages import GenerationRequest
from tests.support.gateway.agents import (
    TEMPLATE,
    MessageEvent,
    assembled,
    parse_message_events,
    prompt_of,
    saying,
)
from tests.support.gateway.running import MODEL, RunningGateway, raw_request, write_model

CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
HEADERS = {
    "User-Agent": "claude-cli/2.1.328 (external, cli)",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "prompt-caching-scope-2026-01-05,effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "x-api-key": "sk-none",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "Accept": "application/json",
}
USER_ID = json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": "5f0c7a3e-9d1b-4c6f-8a2e-0d4b6c8f1a3e"})


def tool(name: str, *fields: str, **more: Any) -> dict[str, Any]:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {field: {"type": "string", "description": f"The {field}."} for field in fields},
        "required": list(fields),
        "additionalProperties": False,
    }
    return {"name": name, "description": f"{name}s.", "input_schema": schema, **more}


TOOLS = [
    tool("Read", "file_path"),
    tool("Bash", "command", eager_input_streaming=True),
    tool("Edit", "file_path", "old_string", "new_string", **CACHED),
]


def system(turn: int) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.328; cc_entrypoint=cli; cch={turn:05x};"},
        {"type": "text", "text": "You are a coding agent.", **CACHED},
        {
            "type": "text",
            "text": "Work in /repo.",
            "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"},
        },
    ]


class Agent:
    """Sends what a coding agent sends, and keeps the conversation."""

    def __init__(self, gateway: RunningGateway) -> None:
        self.gateway = gateway
        self.messages: list[dict[str, Any]] = []
        self.turn = 0

    async def post(self, path: str, body: Any) -> tuple[dict[str, str], Any]:
        reply = await self.gateway.send(raw_request("POST", path, json.dumps(body).encode(), HEADERS))
        assert reply.status == 200, reply.body
        return reply.headers, reply.json

    async def probe(self) -> Any:
        body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}
        return (await self.post("/v1/messages?beta=true", {**body, "metadata": {"user_id": USER_ID}}))[1]

    async def count(self) -> int:
        body = {"model": MODEL, "messages": self._marked(), "system": system(self.turn), "tools": TOOLS}
        tokens: int = (await self.post("/v1/messages/count_tokens?beta=true", body))[1]["input_tokens"]
        return tokens

    async def take_turn(self, content: Any) -> tuple[dict[str, Any], list[MessageEvent], int]:
        """Count, then stream one message; returns the message, its events and the count."""
        self.turn += 1
        self.messages.append({"role": "user", "content": content})
        if self.turn == 1:  # the agent describes its environment after the first message
            self.messages.append({"role": "system", "content": [{"type": "text", "text": "# Environment"}]})
        count = await self.count()
        body = {
            "model": MODEL,
            "max_tokens": 32_000,
            "messages": self._marked(),
            "system": system(self.turn),
            "tools": TOOLS,
            "metadata": {"user_id": USER_ID},
            "thinking": {"type": "adaptive", "display": "omitted"},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "stream": True,
        }
        data = raw_request("POST", "/v1/messages?beta=true", json.dumps(body).encode(), HEADERS)
        reader, writer = await self.gateway.connect(data)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            assert " 200 " in head.splitlines()[0], head
            assert "text/event-stream" in head
            text = b""
            while size := int((await reader.readline()).strip(), 16):
                text += await reader.readexactly(size)
                await reader.readline()
        finally:
            writer.close()
        events = parse_message_events(text.decode())
        message = assembled(events)
        self.messages.append({"role": "assistant", "content": message["content"]})
        return message, events, count

    def _marked(self) -> list[dict[str, Any]]:
        """The conversation with a cache marker at the end of its last message."""
        *before, last = self.messages
        content = last["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        return [*before, {**last, "content": [*blocks[:-1], {**blocks[-1], **CACHED}]}]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose context has room for an agent's tools."""
    folder = write_model(tmp_path_factory.mktemp("models") / "test-model", chat_template=TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    return folder


@pytest.fixture
async def agent(start_gateway: Any, long_model: Path) -> Agent:
    return Agent(await start_gateway(model=str(long_model)))


async def test_a_session_with_tools(agent: Agent) -> None:
    """A question, two tool calls at once, their results, an edit that fails, and the answer."""
    prompts: list[str] = []

    def remember(text: str) -> Any:
        script = saying(text, step=4)

        async def run(request: GenerationRequest) -> Any:
            prompts.append(prompt_of(request))
            async for step in script(request):
                yield step

        return run

    counts = []
    reads = (
        f"<think>\nI read both.\n</think>\n\nI look.\n{call('Read', file_path='/repo/a')}\n{call('Bash', command='ls')}"
    )
    async with agent.gateway.worker(remember(reads)):
        first, events, count = await agent.take_turn("Fix the bug.")
        counts.append((count, first["usage"]["input_tokens"]))
    assert first["stop_reason"] == "tool_use"
    assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    read, bash = first["content"][2:]
    assert (read["name"], read["input"]) == ("Read", {"file_path": "/repo/a"})
    assert (bash["name"], bash["input"]) == ("Bash", {"command": "ls"})
    assert read["id"] != bash["id"]
    # The input comes in pieces, so that the agent can show it while it grows.
    pieces = [event for event in events if event.data.get("delta", {}).get("type") == "input_json_delta"]
    assert len(pieces) > 4

    results = [
        {"type": "tool_result", "tool_use_id": read["id"], "content": "1\tbug"},
        {
            "type": "tool_result",
            "tool_use_id": bash["id"],
            "content": [{"type": "text", "text": "a"}],
            "is_error": False,
        },
        {"type": "text", "text": "<system-reminder>Be quick.</system-reminder>"},
    ]
    edit = call("Edit", file_path="/repo/a", old_string="bug", new_string="fix")
    async with agent.gateway.worker(remember(edit)):
        second, _, count = await agent.take_turn(results)
        counts.append((count, second["usage"]["input_tokens"]))
    assert [block["type"] for block in second["content"]] == ["tool_use"]

    failed = {
        "type": "tool_result",
        "tool_use_id": second["content"][0]["id"],
        "content": "File has not been read yet.",
        "is_error": True,
    }
    async with agent.gateway.worker(remember("I could not.")):
        third, _, count = await agent.take_turn([failed])
        counts.append((count, third["usage"]["input_tokens"]))
    assert third["stop_reason"] == "end_turn"

    # A label that changes with each request is not in the prompt, so each prompt begins with the one before it.
    assert all("x-anthropic-billing-header" not in prompt for prompt in prompts)
    heads = [prompt.removesuffix("<|im_start|>assistant\neffort=high ") for prompt in prompts]
    assert heads[1].startswith(heads[0])
    assert heads[2].startswith(heads[1])
    assert "<tool_response>\n1\tbug\n</tool_response>" in prompts[1]
    # The agent asks for thinking without its text; the signature brings the text back.
    assert first["content"][0]["thinking"] == ""
    assert "<think>\nI read both." in prompts[1]
    assert "<|im_start|>system\n# Environment<|im_end|>" in prompts[0]
    assert "<tool_response>\nError: File has not been read yet.\n</tool_response>" in prompts[2]
    # The count of a prompt has no effort, which the template writes before the answer.
    assert all(0 <= asked - count < 20 for count, asked in counts)


async def test_a_request_for_a_title_in_json(agent: Agent) -> None:
    """Agents ask in the background for a title that follows a schema, without thinking and without tools."""
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    body = {
        "model": MODEL,
        "max_tokens": 100,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Fix the bug."}]}],
        "system": system(1),
        "tools": [],
        "metadata": {"user_id": USER_ID},
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}},
        "temperature": 1,
        "stream": False,
    }
    async with agent.gateway.worker(saying('{"title": "Fix"}')):
        headers, answer = await agent.post("/v1/messages?beta=true", body)
    assert answer["content"] == [{"type": "text", "text": '{"title": "Fix"}', "citations": []}]
    assert headers["x-quire-no-effect"] == "claude-code-20250219, x-anthropic-billing-header"


async def test_the_server_answers_the_check_of_its_address(agent: Agent) -> None:
    async with aiohttp.ClientSession() as session, session.head(agent.gateway.url) as response:
        assert response.status == 200
