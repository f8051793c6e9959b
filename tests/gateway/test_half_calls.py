"""An answer that ends inside the arguments of a tool call: no dialect gives its client a call that it could run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.api.test_conversation import TEMPLATE
from tests.gateway.api.test_conversation import streamed as added_up
from tests.gateway.conftest import Start
from tests.support.gateway.agents import assembled, prompt_of, saying, stream_events
from tests.support.gateway.response_calls import raw_events
from tests.support.gateway.running import MODEL, RunningGateway, tokens, write_model

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": False}
FIRST = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>\n'
CUT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome'
USER = {"role": "user", "content": "How is the weather?"}
# Why the answer ends: the reason and the stop string.
ENDS = [("stop", "Rome"), ("length", None)]


@pytest.fixture
async def gateway(start_gateway: Start, tmp_path: Any) -> RunningGateway:
    folder = write_model(tmp_path / "test-model", chat_template=TEMPLATE)
    return await start_gateway(model=str(folder), tool_call_format="hermes")


def limits(stop: str | None, text: str) -> dict[str, Any]:
    return {"max_tokens": len(tokens(text)), **({"stop": [stop]} if stop else {})}


@pytest.mark.parametrize("before", ["", FIRST], ids=["only call", "second call"])
@pytest.mark.parametrize(("reason", "stop"), ENDS)
async def test_a_chat(gateway: RunningGateway, reason: str, stop: str | None, before: str) -> None:
    text = before + CUT
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    body = {"model": MODEL, "messages": [USER], "tools": [tool], **limits(stop, text)}
    async with gateway.worker(saying(text, reason, stop)):
        whole = (await gateway.post("/v1/chat/completions", body)).json["choices"][0]
        events = await gateway.events("/v1/chat/completions", {**body, "stream": True})
    ends = [event.data["choices"][0] for event in events if event.data != "[DONE]"]
    assert (ends[-1]["finish_reason"], ends[-1]["stop_reason"]) == (reason, stop)
    assert (whole["finish_reason"], whole["stop_reason"]) == (reason, stop)
    calls = whole["message"].get("tool_calls", [])
    assert [call["function"]["arguments"] for call in calls] == (['{"city": "Bonn"}'] if before else [])
    assert whole["message"]["content"] == (None if before else "")
    # Streamed text cannot be taken back: the finish reason tells that the last call is cut.
    arguments = [call["function"]["arguments"] for call in added_up(events)["tool_calls"]]
    assert arguments[-1] == ('{"city": "' if stop else '{"city": "Rome')


@pytest.mark.parametrize("before", ["", FIRST], ids=["only call", "second call"])
@pytest.mark.parametrize(("reason", "stop"), ENDS)
async def test_a_message(gateway: RunningGateway, reason: str, stop: str | None, before: str) -> None:
    text = before + CUT
    body = {
        "model": MODEL,
        "messages": [USER],
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "max_tokens": len(tokens(text)),
        **({"stop_sequences": [stop]} if stop else {}),
    }
    async with gateway.worker(saying(text, reason, stop)):
        whole = (await gateway.post("/v1/messages", body)).json
        events = await stream_events(gateway, "/v1/messages", {**body, "stream": True})
    expected = ("stop_sequence" if stop else "max_tokens", stop)
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    assert [block["input"] for block in whole["content"]] == ([{"city": "Bonn"}] if before else [])
    [end] = [event.data["delta"] for event in events if event.name == "message_delta"]
    assert (end["stop_reason"], end["stop_sequence"]) == expected
    with pytest.raises(json.JSONDecodeError):
        assembled(events)


@pytest.mark.parametrize("before", ["", FIRST], ids=["only call", "second call"])
@pytest.mark.parametrize(("reason", "stop"), ENDS)
async def test_a_response(gateway: RunningGateway, reason: str, stop: str | None, before: str) -> None:
    text = before + CUT
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    body = {"model": MODEL, "input": "How is the weather?", "tools": [tool], "max_output_tokens": len(tokens(text))}
    body |= {"stop": stop} if stop else {}
    async with gateway.worker(saying(text, reason, stop)) as worker:
        whole = (await gateway.post("/v1/responses", body)).json
        events = await raw_events(gateway, "/v1/responses", {**body, "stream": True})
        output = {"type": "function_call_output", "call_id": whole["output"][-1]["call_id"], "output": "not run"}
        for given in ("Again.", [output]):
            following = {"model": MODEL, "input": given, "previous_response_id": whole["id"]}
            assert (await gateway.post("/v1/responses", following)).status == 200
            assert "INVALID_JSON" in prompt_of(worker.claimed[-1])
    assert len(worker.claimed) == 4
    last = events[-1]
    assert last["type"] == "response.incomplete"
    for response in (whole, last["response"]):
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "stop" if stop else "max_output_tokens"}
        assert [item["status"] for item in response["output"]] == [*(["completed"] if before else []), "incomplete"]
    arguments = [event["arguments"] for event in events if event["type"] == "response.function_call_arguments.done"]
    assert arguments == (['{"city": "Bonn"}'] if before else [])


@pytest.mark.parametrize("streams", [False, True])
async def test_a_stop_string_after_a_complete_call_leaves_the_call(gateway: RunningGateway, streams: bool) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    body = {"model": MODEL, "messages": [USER], "tools": [tool], "stop": ["</tool_call>"]}
    path = "/v1/chat/completions"
    async with gateway.worker(saying(FIRST[:-1], "stop", "</tool_call>")):
        if streams:
            *_, end, _ = await gateway.events(path, {**body, "stream": True})
            reason = end.data["choices"][0]["finish_reason"]
        else:
            choice = (await gateway.post(path, body)).json["choices"][0]
            reason = choice["finish_reason"]
            assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Bonn"}'
    assert reason == "tool_calls"


# Answers that end before the arguments of a call: with `auto` after its beginning, with `required` anywhere.
HEADS = [
    ("auto", '<tool_call>\n{"name": "weather", "argu'),
    ("required", "<tool"),
    ("auto", f"{FIRST}<"),
    ("required", f'{FIRST}<tool_call>\n{{"name": "w'),
]


@pytest.mark.parametrize(("choice", "text"), HEADS)
async def test_the_head_of_a_call_is_no_content_of_a_chat(gateway: RunningGateway, choice: str, text: str) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    body = {"model": MODEL, "messages": [USER], "tools": [tool], "tool_choice": choice, **limits(None, text)}
    async with gateway.worker(saying(text, "length", None)):
        whole = (await gateway.post("/v1/chat/completions", body)).json["choices"][0]
        events = await gateway.events("/v1/chat/completions", {**body, "stream": True})
    assert not whole["message"]["content"]
    assert len(whole["message"].get("tool_calls", [])) == text.count(FIRST)
    assert not added_up(events)["content"]
    assert len(added_up(events)["tool_calls"]) == text.count(FIRST)


@pytest.mark.parametrize(("choice", "text"), HEADS)
async def test_the_head_of_a_call_is_no_block_of_a_message(gateway: RunningGateway, choice: str, text: str) -> None:
    kind = {"auto": "auto", "required": "any"}[choice]
    body = {"model": MODEL, "messages": [USER], "tools": [{"name": "weather", "input_schema": SCHEMA}]}
    body |= {"tool_choice": {"type": kind}, "max_tokens": len(tokens(text))}
    async with gateway.worker(saying(text, "length", None)):
        whole = (await gateway.post("/v1/messages", body)).json
        events = await stream_events(gateway, "/v1/messages", {**body, "stream": True})
    kinds = ["tool_use"] * text.count(FIRST)
    assert [block["type"] for block in whole["content"]] == kinds
    assert [event.data["content_block"]["type"] for event in events if event.name == "content_block_start"] == kinds


@pytest.mark.parametrize(("choice", "text"), HEADS)
async def test_the_head_of_a_call_is_no_item_of_a_response(gateway: RunningGateway, choice: str, text: str) -> None:
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    body = {"model": MODEL, "input": "How is the weather?", "tools": [tool], "tool_choice": choice}
    body["max_output_tokens"] = len(tokens(text))
    async with gateway.worker(saying(text, "length", None)):
        whole = (await gateway.post("/v1/responses", body)).json
        events = await raw_events(gateway, "/v1/responses", {**body, "stream": True})
    kinds = ["function_call"] * text.count(FIRST)
    assert [item["type"] for item in whole["output"]] == kinds
    assert [item["type"] for item in events[-1]["response"]["output"]] == kinds
    assert [event["item"]["type"] for event in events if event["type"] == "response.output_item.added"] == kinds
