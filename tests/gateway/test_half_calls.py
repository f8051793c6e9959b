"""Calls that are cut: by the context, or by the length of an answer."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from quire.gateway.settings import GatewaySettings
from quire.shared.model.naming import InvalidModelName
from tests.gateway.api.test_conversation import TEMPLATE
from tests.gateway.conftest import Start
from tests.gateway.test_dialects import DIALECTS, Events, said_in
from tests.support.gateway.agents import prompt_of, saying
from tests.support.gateway.response_calls import TOOL
from tests.support.gateway.running import MODEL, RunningGateway, tokens, write_model

# --- An answer that ends inside the arguments of a tool call: no dialect gives its client a call that it could --------


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": False}
FIRST = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>\n'
CUT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome'
USER = {"role": "user", "content": "How is the weather?"}


@pytest.fixture
async def gateway(start_gateway: Start, tmp_path: Any) -> RunningGateway:
    folder = write_model(tmp_path / "test-model", chat_template=TEMPLATE)
    return await start_gateway(model=str(folder), tool_call_format="hermes")


# By dialect: the parameters that bound an answer, and how it tells that it ended at a stop string, or at its length.
FORCED: dict[str, Any] = {"chat": "required", "response": "required", "message": {"type": "any"}}
BOUNDS = {
    "chat": ("max_tokens", "stop"),
    "response": ("max_output_tokens", "stop"),
    "message": ("max_tokens", "stop_sequences"),
}
TOLD: dict[str, dict[str, tuple[str, str | None]]] = {
    "chat": {"stop": ("stop", "Rome"), "length": ("length", None)},
    "response": {"stop": ("incomplete", "stop"), "length": ("incomplete", "max_output_tokens")},
    "message": {"stop": ("stop_sequence", "Rome"), "length": ("max_tokens", None)},
}


def told(end: dict[str, Any]) -> tuple[str, str | None]:
    """Return why an answer ended: the part of it, or of its last events, that tells."""
    if "choices" in end:
        return end["choices"][0]["finish_reason"], end["choices"][0]["stop_reason"]
    if "output" in end:
        return end["status"], end["incomplete_details"]["reason"]
    return end["stop_reason"], end["stop_sequence"]


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("before", ["", FIRST], ids=["alone", "second"])
@pytest.mark.parametrize("name", FORCED)
async def test_half_a_call_is_no_call(gateway: RunningGateway, name: str, before: str, reason: str) -> None:
    dialect, (length, stop), text = DIALECTS[name], BOUNDS[name], before + CUT
    asked = {"tools": dialect.tools, length: len(tokens(text)), **({stop: ["Rome"]} if reason == "stop" else {})}
    async with gateway.worker(saying(text, reason, "Rome" if reason == "stop" else None)):
        whole = (await gateway.post(dialect.path, {**dialect.body, **asked})).json
        async with Events(gateway.url, dialect, **asked) as stream:
            events = [event.data for event in await stream.rest()]
    end = {"chat": events[-1], "response": events[-1].get("response"), "message": events[-2].get("delta")}[name]
    assert told(whole) == told(end) == TOLD[name][reason]
    complete = [{"city": "Bonn"}] * bool(before)
    calls = dialect.whole(whole).calls
    if name == "response":  # it has all items, each with its status
        for response in (whole, end):
            assert [item["status"] for item in response["output"]] == ["completed"] * len(complete) + ["incomplete"]
        *calls, _ = calls
    assert [json.loads(arguments) for *_, arguments in calls] == complete
    # Streamed text cannot be taken back: the reason tells that the last call is cut.
    *_, (_, _, arguments) = dialect.streamed(events).calls
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)


async def test_a_response_with_half_a_call_is_continued(gateway: RunningGateway) -> None:
    async with gateway.worker(saying(CUT, "length")) as worker:
        first = (await gateway.post("/v1/responses", {**DIALECTS["response"].body, "tools": [TOOL]})).json
        output = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "not run"}
        for given in ("Again.", [output]):
            following = {"model": MODEL, "input": given, "previous_response_id": first["id"]}
            assert (await gateway.post("/v1/responses", following)).status == 200
            assert "INVALID_JSON" in prompt_of(worker.claimed[-1])


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
