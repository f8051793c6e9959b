"""Help for the tests of the Messages API: a chat template, texts that a model may answer, and raw streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from quire.gateway.stream.sse import EventId
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from tests.support.gateway.fake_worker import Script
from tests.support.gateway.running import MODEL, RunningGateway, byte_level, tokens

# Qwen3's form: tools as JSON, calls in <tool_call> tags, reasoning in <think> tags.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
For each function call, return a json object within <tool_call></tool_call> tags.<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'user' or not loop.first %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if reasoning_effort is defined %}effort={{ reasoning_effort }} {% endif %}
{%- if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

WEATHER = {
    "name": "get_weather",
    "description": "Tells the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = "<think>\nThey ask for the weather.\n</think>\n\nI look it up.\n" + CALL


def body(**parameters: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": MODEL, "max_tokens": 100, "messages": messages, **parameters}


def saying(text: str, reason: str = "stop", stop: str | None = None, step: int = 1) -> Script:
    """A script that emits the tokens of a text, `step` tokens at once. stop: the stop string that ends it."""
    ids = tokens(text)

    async def script(request: GenerationRequest) -> AsyncIterator[tuple[tuple[Delta, ...], Outcome | None]]:
        for at in range(0, len(ids), step):
            last = at + step >= len(ids)
            piece = tuple(ids[at : at + step])
            yield (Delta(0, piece, *((reason, stop) if last else ())),), Outcome(reason) if last else None

    return script


def prompt_of(request: GenerationRequest) -> str:
    """The prompt that a worker received, as text."""
    text: str = byte_level().decode(list(request.prompt), skip_special_tokens=False)
    return text


@dataclass(frozen=True)
class MessageEvent:
    """One server-sent event of the Messages API."""

    id: EventId | None
    name: str
    data: dict[str, Any]


def parse_message_events(text: str) -> list[MessageEvent]:
    """The events of a stream, whose framing is checked."""
    assert text.endswith("\n\n")
    found: list[MessageEvent] = []
    for block in text[:-2].split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        event_id = EventId.parse(lines.pop(0)[4:]) if lines[0].startswith("id: ") else None
        name, data = lines
        event = MessageEvent(event_id, name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        assert event.data["type"] == event.name
        if event_id is not None and found and found[-1].id is not None:
            assert event_id > found[-1].id
        found.append(event)
    return found


async def stream_events(
    gateway: RunningGateway, path: str, json_body: Any = None, headers: Mapping[str, str] | None = None
) -> list[MessageEvent]:
    """All events of a stream: of a new call, or without a body of a resumed one."""
    async with (
        asyncio.timeout(60),
        aiohttp.ClientSession(headers={"Accept": "text/event-stream", **(headers or {})}) as session,
        session.request("GET" if json_body is None else "POST", gateway.url + path, json=json_body) as response,
    ):
        assert response.status == 200, await response.text()
        return parse_message_events(await response.text())


def assembled(events: list[MessageEvent]) -> dict[str, Any]:
    """The message that a client makes of the events of a stream."""
    message: dict[str, Any] = dict(events[0].data["message"])
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    for event in events[1:]:
        match event.name:
            case "content_block_start":
                assert event.data["index"] == len(blocks)
                blocks.append(dict(event.data["content_block"]))
            case "content_block_delta":
                index = event.data["index"]
                [(field, text)] = [item for item in event.data["delta"].items() if item[0] != "type"]
                if field == "partial_json":
                    inputs[index] = inputs.get(index, "") + text
                else:
                    blocks[index][field] += text
            case "message_delta":
                message |= event.data["delta"]
                message["usage"] = {**message["usage"], **event.data["usage"]}
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text)
    return {**message, "content": blocks}
