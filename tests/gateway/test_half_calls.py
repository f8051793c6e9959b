"""Calls that are cut: by the context, or by the length of an answer."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from quire.gateway.settings import GatewaySettings
from quire.shared.model.naming import InvalidModelName
from tests.gateway.api.test_conversation import TEMPLATE
from tests.gateway.api.test_conversation import streamed as added_up
from tests.gateway.conftest import Start
from tests.gateway.test_dialects import DIALECTS, Events, said_in
from tests.support.gateway.agents import assembled, prompt_of, saying, stream_events
from tests.support.gateway.response_calls import raw_events
from tests.support.gateway.running import MODEL, RunningGateway, tokens, write_model

# --- An answer that ends inside the arguments of a tool call: no dialect gives its client a call that it could --------


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


async def test_a_chat(gateway: RunningGateway) -> None:
    for before in ["", FIRST]:
        for reason, stop in ENDS:
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


async def test_a_message(gateway: RunningGateway) -> None:
    for before in ["", FIRST]:
        for reason, stop in ENDS:
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


async def test_a_response(gateway: RunningGateway) -> None:
    for before in ["", FIRST]:
        for reason, stop in ENDS:
            text = before + CUT
            tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
            body = {
                "model": MODEL,
                "input": "How is the weather?",
                "tools": [tool],
                "max_output_tokens": len(tokens(text)),
            }
            body |= {"stop": stop} if stop else {}
            async with gateway.worker(saying(text, reason, stop)) as worker:
                whole = (await gateway.post("/v1/responses", body)).json
                events = await raw_events(gateway, "/v1/responses", {**body, "stream": True})
                output = {
                    "type": "function_call_output",
                    "call_id": whole["output"][-1]["call_id"],
                    "output": "not run",
                }
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
                assert [item["status"] for item in response["output"]] == [
                    *(["completed"] if before else []),
                    "incomplete",
                ]
            arguments = [
                event["arguments"] for event in events if event["type"] == "response.function_call_arguments.done"
            ]
            assert arguments == (['{"city": "Bonn"}'] if before else [])


async def test_a_stop_string_after_a_complete_call_leaves_the_call(gateway: RunningGateway) -> None:
    for streams in [False, True]:
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


FORCED: dict[str, Any] = {"chat": "required", "response": "required", "message": {"type": "any"}}


@pytest.mark.parametrize("name", FORCED)
async def test_the_head_of_a_call_is_no_content_of_an_answer(gateway: RunningGateway, name: str) -> None:
    dialect = DIALECTS[name]
    for choice, text in HEADS:
        asked = {"tools": dialect.tools, **({"tool_choice": FORCED[name]} if choice == "required" else {})}
        async with gateway.worker(saying(text, "length", None)):
            whole = dialect.whole((await gateway.post(dialect.path, {**dialect.body, **asked})).json)
            async with Events(gateway.url, dialect, **asked) as stream:
                streamed = said_in(dialect, await stream.rest())
        for said in (whole, streamed):
            assert not said.text
            assert [name for _, name, _ in said.calls] == ["weather"] * text.count(FIRST)


# --- A prompt over the context is refused in the words by which clients recognise it, to shorten the ------------------


CLAUDE_CODE = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)
PI = re.compile(r"maximum context length is (\d+) tokens", re.IGNORECASE)
CONTEXT = 512
# Tokenized, and refused by the number of characters alone.
LONG, VERY_LONG = "x " * 1000, "x" * (CONTEXT * 16 + 1)


def bodies(text: str) -> dict[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    return {
        "/v1/chat/completions": {"messages": messages},
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
        "/v1/messages": {"messages": messages, "max_tokens": 5},
    }


async def test_clients_recognise_the_refusal(server: RunningGateway) -> None:
    for text in [LONG, VERY_LONG]:
        for path, body in bodies(text).items():
            replies = [
                await server.post(path, {"model": MODEL, **body, "stream": streams}) for streams in (False, True)
            ]
            assert [reply.status for reply in replies] == [400, 400]
            errors = [reply.json["error"] for reply in replies]
            assert errors[0] == errors[1]
            message = errors[0]["message"]
            found = PI.search(message)
            assert found, message
            assert int(found[1]) == CONTEXT
            assert ".." not in message
            code = errors[0]["details"]["error_code"] if path == "/v1/messages" else errors[0]["code"]
            assert code == "context_length_exceeded"
            if path == "/v1/messages":
                assert message.startswith("prompt is too long: ")
                numbers = CLAUDE_CODE.search(message)
                assert numbers, message
                # The client drops as many tokens as the prompt is too long by.
                assert int(numbers[1]) > int(numbers[2]) == CONTEXT - 1


async def test_a_prompt_that_just_leaves_no_room_for_an_answer(server: RunningGateway) -> None:
    count = (await server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})).json["count"]
    letters = CONTEXT - count + 1
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "x" * letters}]}
    tokens = (await server.post("/v1/messages/count_tokens", {key: body[key] for key in ("model", "messages")})).json[
        "input_tokens"
    ]
    reply = await server.post("/v1/messages", body)
    assert (reply.status, tokens) == (400, CONTEXT)
    assert reply.json["error"]["message"].startswith(f"prompt is too long: {CONTEXT} tokens > {CONTEXT - 1} maximum. ")


async def test_a_count_is_refused_by_the_number_of_characters_alone(server: RunningGateway) -> None:
    path = "/v1/messages/count_tokens"
    reply = await server.post(path, {"model": MODEL, "messages": [{"role": "user", "content": VERY_LONG}]})
    assert reply.status == 400
    assert CLAUDE_CODE.search(reply.json["error"]["message"])


# --- The settings of a gateway: help texts that stand alone, and the name under which clients know the model ----------


def test_the_name_is_that_of_the_folder_unless_another_is_given() -> None:
    assert GatewaySettings(model="models/demo").name == "demo"
    assert GatewaySettings(model="models/demo", served_model_name="other").name == "other"
    with pytest.raises(InvalidModelName):
        _ = GatewaySettings(model="models/demo", served_model_name="{lane}").name
