"""Help for tests of /v1/responses: calls, and their events."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from quire.shared.protocol.messages import GenerationRequest
from tests.support.gateway.running import MODEL, Reply, RunningGateway
from tests.support.tokenizers import byte_level

PATH = "/v1/responses"
TEXT = "Hello wörld 😀, how are you?"
# Reasoning, text, and two function calls.
WHOLE = (
    "<think>\nHmm 😀.</think>Let me see."
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
)
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


async def create(gateway: RunningGateway, **parameters: Any) -> Reply:
    return await gateway.post(PATH, {"model": MODEL, "input": "Hello", **parameters})


def prompt(request: GenerationRequest) -> str:
    """Returns what the model was told."""
    text: str = byte_level().decode(list(request.prompt), skip_special_tokens=False)
    return text


async def events_of(stream: Any) -> list[Any]:
    return [event async for event in stream]


async def raw_events(gateway: RunningGateway, path: str, body: Any = None, **headers: str) -> list[dict[str, Any]]:
    """Returns the events of a stream as JSON; checks ids, names and the end."""
    async with (
        aiohttp.ClientSession() as session,
        session.request("GET" if body is None else "POST", gateway.url + path, json=body, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        text = await response.text()
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    events = []
    for block in blocks:
        if block == "data: [DONE]":
            assert block is blocks[-1]
            continue
        number, name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert number == f"id: {event['sequence_number']}"
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
