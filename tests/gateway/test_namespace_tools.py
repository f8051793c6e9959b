"""Functions within namespaces, as Codex offers MCP tools and sub-agents: over HTTP, in all forms of an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.api.test_conversation import TEMPLATE, answering
from tests.gateway.conftest import Start
from tests.support.gateway.response_calls import PATH, create, prompt, raw_events
from tests.support.gateway.running import MODEL, RunningGateway, write_model

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "strict": False,
    "parameters": PARAMETERS,
}
# As Codex 0.171 sends it.
SPACE = {"type": "namespace", "name": "mcp__w", "description": "Tools in the mcp__w namespace.", "tools": [FUNCTION]}
ADDITIONAL = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [SPACE]}
CHOICE = {"type": "function", "namespace": "mcp__w", "name": "get_weather"}
USER = {"role": "user", "content": "Weather?"}
CALL = '<tool_call>\n{"name": "mcp__w__get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
NAMES = {"namespace": "mcp__w", "name": "get_weather"}


@pytest.fixture
async def gateway(start_gateway: Start, tmp_path: Path) -> RunningGateway:
    folder = write_model(tmp_path / "test-model", chat_template=TEMPLATE)
    return await start_gateway(model=str(folder), tool_call_format="hermes", reasoning_format="think")


def named(item: dict[str, Any]) -> dict[str, Any]:
    return {key: item.get(key) for key in NAMES}


@pytest.mark.parametrize("given", [{"tools": [SPACE]}, {"input": [ADDITIONAL, USER]}], ids=["tools", "item"])
async def test_an_answer_has_the_namespace_in_all_its_forms(gateway: RunningGateway, given: dict[str, Any]) -> None:
    body = {"model": MODEL, "input": [USER], **given, "tool_choice": CHOICE}
    async with gateway.worker(answering(CALL)) as worker:
        whole = (await gateway.post(PATH, body)).json
        events = await raw_events(gateway, PATH, {**body, "stream": True})
        response_id = events[0]["response"]["id"]
        stored = (await gateway.get(f"{PATH}/{response_id}")).json
        resumed = await raw_events(gateway, f"{PATH}/{response_id}?stream=true&starting_after=1")
    assert '"name": "mcp__w__get_weather"' in prompt(worker.claimed[0])
    assert "mcp__w__get_weather" in worker.claimed[0].sampling.grammar
    for output in (whole["output"], stored["output"], events[-1]["response"]["output"]):
        [call] = output
        assert named(call) == NAMES
        assert json.loads(call["arguments"]) == {"city": "Bonn"}
    assert resumed == events[2:]
    assert [named(event["item"]) for event in events if "item" in event] == [NAMES, NAMES]
    [done] = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert done["name"] == "get_weather"
    assert whole["tools"][0]["tools"][0]["name"] == "get_weather"
    assert whole["tool_choice"] == CHOICE


@pytest.mark.parametrize("given", [{"tools": [SPACE]}, {"input": [ADDITIONAL, USER]}], ids=["tools", "item"])
async def test_the_next_turn_with_stored_and_with_sent_items(gateway: RunningGateway, given: dict[str, Any]) -> None:
    body = {"model": MODEL, "input": [USER], **given}
    async with gateway.worker(answering(CALL)):
        first = (await gateway.post(PATH, body)).json
    [call] = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "SUN"}
    more: dict[str, Any] = {key: value for key, value in given.items() if key == "tools"}
    following = [
        {**more, "input": [output], "previous_response_id": first["id"]},
        {**body, "input": [*body["input"], call, output]},
    ]
    async with gateway.worker(answering(CALL)) as worker:
        answers = [(await gateway.post(PATH, {"model": MODEL, **one})).json for one in following]
    assert [[named(item) for item in answer["output"]] for answer in answers] == [[NAMES], [NAMES]]
    prompts = [prompt(request) for request in worker.claimed]
    assert prompts[0] == prompts[1]
    assert '<tool_call>mcp__w__get_weather{"city": "Bonn"}</tool_call>' in prompts[0]
    assert '"name": "mcp__w__get_weather"' in prompts[0], "the tools of the item hold in later calls"


async def test_choices_among_namespaces(gateway: RunningGateway) -> None:
    other = {**SPACE, "name": "mcp__v"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "mcp__w"}]}
    async with gateway.worker(answering(CALL)) as worker:
        reply = await create(gateway, tools=[other, SPACE], tool_choice=allowed)
        assert reply.status == 200, reply.json
    assert "mcp__v__" not in prompt(worker.claimed[0])
    for choice in ({**CHOICE, "namespace": "mcp__x"}, {"type": "function", "name": "get_weather"}):
        reply = await create(gateway, tools=[SPACE], tool_choice=choice)
        assert (reply.status, reply.error["param"]) == (400, "tool_choice")


async def test_an_error_names_the_place_within_the_namespace(gateway: RunningGateway) -> None:
    wrong = {**FUNCTION, "strict": True, "parameters": {"type": "object", "properties": {"a": {"type": "strange"}}}}
    spaces = [{**SPACE, "tools": [wrong]}]
    for given, place in (
        ({"tools": spaces}, "tools[0].tools[0].parameters"),
        ({"input": [USER, {**ADDITIONAL, "tools": spaces}]}, "input[1].tools[0].tools[0].parameters"),
    ):
        reply = await create(gateway, **given)
        assert (reply.status, reply.error["param"]) == (400, place)
