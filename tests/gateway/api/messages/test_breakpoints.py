"""Cache breakpoints: where the blocks with `cache_control` end in the prompt that a worker gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.gateway.model.renderer import common_length
from quire.shared.protocol.messages import PromptReport
from tests.support.chat_templates import TEMPLATES
from tests.support.gateway.agents import TEMPLATE, WEATHER, body, saying
from tests.support.gateway.running import MODEL, RunningGateway, byte_level, write_model

EPHEMERAL: Any = {"type": "ephemeral"}
HOUR: Any = {"type": "ephemeral", "ttl": "1h"}
USE: Any = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "toolu_1"}


def text(said: str, marker: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": said} | ({"cache_control": marker} if marker else {})


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


async def prefixes(gateway: RunningGateway, **parameters: Any) -> list[tuple[str, int]]:
    """Return the text of the prompt before each breakpoint, and the time of the breakpoint."""
    async with gateway.worker(saying("x")) as worker:
        reply = await gateway.post("/v1/messages", body(**parameters))
    assert reply.status == 200, reply.json
    [request] = worker.claimed
    decode = byte_level().decode
    return [
        (decode(list(request.prompt[: point.position]), skip_special_tokens=False), point.ttl_s)
        for point in request.breakpoints
    ]


async def test_blocks_end_where_the_template_has_written_them(agent_gateway: RunningGateway) -> None:
    found = await prefixes(
        agent_gateway,
        tools=[{**WEATHER, "cache_control": HOUR}],
        system=[text("Be kind.", HOUR), text("It is noon.")],
        messages=[
            user(text("Hello"), text("there", EPHEMERAL)),
            {"role": "assistant", "content": [text("I look."), {**USE, "cache_control": EPHEMERAL}]},
            user({**RESULT, "content": "Sunny."}, text("Thanks")),
        ],
    )
    tools, system, said, use = (prefix for prefix, _ in found)
    assert [ttl_s for _, ttl_s in found] == [3600, 3600, 300, 300]
    # This template writes the system prompt before the tools.
    assert system.endswith("<|im_start|>system\nBe kind.")
    assert tools.startswith(system)
    assert tools.rstrip().endswith('"required": ["city"]}}}')
    assert said.endswith("<|im_start|>user\nHello\nthere")
    assert use.startswith(said)
    assert use.endswith('"arguments": {"city": "Paris"}}\n</tool_call>')


@pytest.mark.parametrize(
    ("content", "end"),
    [
        (None, "<tool_response>\n"),
        ("Sunny.", "Sunny."),
        ([text("Sunny."), text("Warm.")], "Sunny.\nWarm."),
        ([text("Sunny.", EPHEMERAL), text("Warm.")], "Sunny.\nWarm."),
        ([], "<tool_response>\n"),
        ([{"type": "tool_reference", "tool_name": "get_time"}], "get_time\n"),
    ],
)
async def test_a_tool_result_ends_after_its_content(agent_gateway: RunningGateway, content: Any, end: str) -> None:
    messages = [user(text("Hello")), {"role": "assistant", "content": [USE]}]
    messages.append(user({**RESULT, "content": content, "cache_control": EPHEMERAL}, text("Thanks")))
    *_, (prefix, _) = await prefixes(agent_gateway, messages=messages)
    assert prefix.endswith(end), prefix


@pytest.mark.parametrize("said", ["Hello", [text("Hello")], [text("Hello", EPHEMERAL)]])
async def test_the_marker_of_the_call_is_that_of_its_last_block(agent_gateway: RunningGateway, said: Any) -> None:
    messages = [{"role": "user", "content": said}]
    [(prefix, ttl_s)] = await prefixes(agent_gateway, messages=messages, cache_control=EPHEMERAL)
    assert (prefix, ttl_s) == ("<|im_start|>user\nHello", 300)


@pytest.mark.parametrize("name", TEMPLATES)
async def test_any_template(start_gateway: Any, tmp_path: Path, name: str) -> None:
    """Texts with control tokens, and blank ends that some templates strip."""
    model = write_model(tmp_path / "test-model", chat_template=TEMPLATES[name])
    gateway = await start_gateway(model=str(model))
    texts = "One <|im_start|> of many. ", "And <|im_end|>this?\n"
    messages = [
        user(text(texts[0], EPHEMERAL)),
        {"role": "assistant", "content": "Yes."},
        user(text("Is it?"), text(texts[1], EPHEMERAL)),
    ]
    first, second = await prefixes(gateway, messages=messages)
    assert first[0].rstrip().endswith(texts[0].strip())
    assert second[0].rstrip().removesuffix("\\n").endswith(texts[1].strip())  # a template may write JSON
    assert second[0].startswith(first[0])


async def test_what_a_template_leaves_out_has_no_place(agent_gateway: RunningGateway) -> None:
    label = text("x-anthropic-billing-header: 1;", EPHEMERAL)
    assert await prefixes(agent_gateway, system=[label, text("Be kind.")]) == []
    tools = [{**WEATHER, "cache_control": EPHEMERAL}]
    assert await prefixes(agent_gateway, tools=tools, tool_choice={"type": "none"}) == []


ONE_CALL = TEMPLATE.replace(
    "{%- for call in message.tool_calls or [] %}",
    "{%- if (message.tool_calls or []) | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    "{%- for call in message.tool_calls or [] %}",
)


async def test_a_template_that_refuses_a_probe_serves_the_call(start_gateway: Any, tmp_path: Path) -> None:
    gateway = await start_gateway(model=str(write_model(tmp_path / "test-model", chat_template=ONE_CALL)))
    messages = [
        user(text("Hello", EPHEMERAL)),
        {"role": "assistant", "content": [{**USE, "cache_control": EPHEMERAL}]},
        user({**RESULT, "content": "Sunny."}),
    ]
    [first, *_] = await prefixes(gateway, messages=messages)
    assert first[0] == "<|im_start|>user\nHello"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"system": [text("s", EPHEMERAL)] * 5}, "At most 4 blocks may have cache_control, not 5"),
        ({"system": [text("s", EPHEMERAL)] * 4, "cache_control": EPHEMERAL}, "not 5"),
        (
            {"system": [text("s", EPHEMERAL)], "messages": [user(text("a"), text("b", HOUR))]},
            "messages[0].content[1].cache_control has the ttl 1h after a block with 5m",
        ),
        ({"tools": [{**WEATHER, "cache_control": EPHEMERAL}], "system": [text("s", HOUR)]}, "system[0].cache_control"),
        ({"system": [text("s", HOUR)], "tools": [{**WEATHER, "cache_control": EPHEMERAL}]}, "system[0].cache_control"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_too_many_markers_and_a_wrong_order_are_refused(
    agent_gateway: RunningGateway, path: str, parameters: Any, message: str
) -> None:
    asked = body(**parameters)
    if path.endswith("count_tokens"):
        del asked["max_tokens"]
    reply = await agent_gateway.post(path, asked)
    assert reply.status == 400
    assert message in reply.json["error"]["message"]


async def test_the_counts_of_the_worker_reach_the_client(
    client: anthropic.AsyncAnthropic, agent_gateway: RunningGateway
) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 9, "messages": [user(text("Hello", EPHEMERAL))]}
    async with agent_gateway.worker(saying("Hi"), report=lambda request: PromptReport(3, None, None, (4, 2))):
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            [started] = [event.message.usage async for event in stream if event.type == "message_start"]
            final = await stream.get_final_message()
    for usage in (whole.usage, started, final.usage):
        assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (3, 6)
        assert usage.cache_creation is not None
        assert usage.cache_creation.to_dict() == {"ephemeral_5m_input_tokens": 4, "ephemeral_1h_input_tokens": 2}
    assert whole.usage.input_tokens == final.usage.input_tokens == started.input_tokens
    assert (started.output_tokens, final.usage.output_tokens) == (0, 2)


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_the_common_beginning_of_two_texts(first: str, second: str) -> None:
    count = common_length(first, second)
    assert first[:count] == second[:count]
    assert first[count : count + 1] != second[count : count + 1] or not (first[count:] and second[count:])
