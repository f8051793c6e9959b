"""/v1/responses, created through the OpenAI SDK and a plain HTTP client: bodies, events, errors."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from tests.gateway.api.test_conversation import answering
from tests.support.gateway.fake_worker import Steps
from tests.support.gateway.response_calls import PATH, TEXT, TOOL, WHOLE, create, events_of, prompt, raw_events
from tests.support.gateway.response_fixtures import client, folder, gateway
from tests.support.gateway.running import MODEL, RunningGateway, tokens

__all__ = ["client", "folder", "gateway"]


async def test_the_sdk_gets_a_response_in_one_piece(gateway: RunningGateway, client: Any) -> None:
    async with gateway.worker(answering(TEXT)) as worker:
        response = await client.responses.create(
            model=MODEL,
            input="Hello",
            instructions="Be kind",
            metadata={"a": "b"},
            temperature=0.5,
            prompt_cache_key="key",
            user="me",
        )
    assert response.id.startswith("resp_")
    assert (response.object, response.status, response.model) == ("response", "completed", MODEL)
    assert response.output_text == TEXT
    [message] = response.output
    assert (message.type, message.status, message.role) == ("message", "completed", "assistant")
    assert (response.instructions, response.metadata, response.temperature) == ("Be kind", {"a": "b"}, 0.5)
    assert (response.prompt_cache_key, response.user, response.top_p) == ("key", "me", 1.0)
    assert response.usage is not None
    [request] = worker.claimed
    told = "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(request) == told
    assert request.sampling.temperature == 0.5
    assert response.usage.input_tokens == len(request.prompt)
    assert response.usage.output_tokens == len(tokens(TEXT)) + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


@pytest.mark.parametrize("step", [1, 1000])
async def test_stream_whole_body_and_stored_body_are_equal(gateway: RunningGateway, client: Any, step: int) -> None:
    asked = {"model": MODEL, "input": "Hello", "tools": [TOOL], "metadata": {"k": "v"}}
    async with gateway.worker(answering(WHOLE, step)):
        events = await raw_events(gateway, PATH, {**asked, "stream": True})
        whole = (await gateway.post(PATH, asked)).json
    streamed = events[-1]["response"]
    assert streamed == (await gateway.get(f"{PATH}/{streamed['id']}")).json
    assert whole == (await gateway.get(f"{PATH}/{whole['id']}")).json
    neutral = json.dumps(streamed).replace(streamed["id"][5:], whole["id"][5:])
    calls = [item["call_id"] for item in whole["output"] if item["type"] == "function_call"]
    other = [item["call_id"] for item in streamed["output"] if item["type"] == "function_call"]
    for one, two in zip(other, calls, strict=True):
        neutral = neutral.replace(one, two)
    assert {**json.loads(neutral), "created_at": whole["created_at"]} == whole
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, first, second = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hmm 😀."}]
    assert message["content"][0]["text"] == "Let me see."
    assert (first["name"], json.loads(first["arguments"])) == ("weather", {"city": "Köln"})
    assert json.loads(second["arguments"]) == {"city": "Bonn"}
    assert {item["status"] for item in whole["output"]} == {"completed"}
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": len(tokens("<think>\nHmm 😀."))}
    # The SDK reads each event and puts the same response together.
    async with gateway.worker(answering(WHOLE, step)), client.responses.stream(**asked) as stream:
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == [item["type"] for item in whole["output"]]
    assert final.output_text == "Let me see."


async def test_events_are_numbered_and_typed(gateway: RunningGateway, client: Any) -> None:
    async with gateway.worker(answering(WHOLE)):
        stream = await client.responses.create(model=MODEL, input="Hello", tools=[TOOL], stream=True)
        events = await events_of(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    # Without repeated deltas.
    order = [kinds[0]] + [after for before, after in pairwise(kinds) if after != before]
    message = [
        "output_item.added",
        "content_part.added",
        "{}.delta",
        "{}.done",
        "content_part.done",
        "output_item.done",
    ]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert order == [
        "created",
        "in_progress",
        *(name.format("reasoning_text") for name in message),
        *(name.format("output_text") for name in message),
        *call,
        *call,
        "completed",
    ]
    for kind, done, item in (
        ("output_text", "text", 1),
        ("reasoning_text", "text", 0),
        ("function_call_arguments", "arguments", 2),
    ):
        deltas = [
            event.delta for event in events if event.type == f"response.{kind}.delta" and event.output_index == item
        ]
        [end] = [event for event in events if event.type == f"response.{kind}.done" and event.output_index == item]
        assert len(deltas) > 2
        assert "".join(deltas) == getattr(end, done)
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []


async def test_parse_with_a_text_format(gateway: RunningGateway, client: Any) -> None:
    class Answer(BaseModel):
        city: str
        degrees: int

    async with gateway.worker(answering('{"city": "Köln", "degrees": 7}')) as worker:
        response = await client.responses.parse(model=MODEL, input="Hello", text_format=Answer)
    assert response.output_parsed == Answer(city="Köln", degrees=7)
    assert '"degrees"' in worker.claimed[0].sampling.grammar
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"


async def test_effort_and_verbosity_reach_the_template(gateway: RunningGateway) -> None:
    async with gateway.worker(answering("x")) as worker:
        reply = await create(gateway, reasoning={"effort": "low"}, text={"verbosity": "high"})
    assert reply.status == 200
    assert prompt(worker.claimed[0]).endswith("lowhigh")
    assert reply.json["reasoning"] == {"effort": "low", "summary": None}


async def test_the_tokens_of_the_input_are_counted(gateway: RunningGateway, client: Any) -> None:
    asked = {"model": MODEL, "input": "Hello", "instructions": "Be kind", "tools": [TOOL]}
    async with gateway.worker(answering("x")):
        response = await client.responses.create(**asked)
    counted = await client.responses.input_tokens.count(**asked)
    assert counted.input_tokens == response.usage.input_tokens
    assert await gateway.accepted() == 1


async def test_other_paths_are_unknown(gateway: RunningGateway) -> None:
    for path in ["other", "resp_/x"]:
        reply = await gateway.post(f"{PATH}/{path}", {"model": MODEL, "input": "Hello"})
        assert (reply.status, reply.error["code"]) == (404, "not_found")
        assert f"There is nothing at {PATH}/{path}." in reply.error["message"]


async def test_the_input_may_be_absent_only_after_a_previous_response(gateway: RunningGateway) -> None:
    async with gateway.worker(answering("x")):
        first = await gateway.post(PATH, {"model": MODEL, "input": "Hello"})
        for body in ({}, {"input": None}):
            reply = await gateway.post(PATH, {"model": MODEL, **body})
            assert (reply.status, reply.error["param"]) == (400, "input")
            following = await gateway.post(PATH, {"model": MODEL, "previous_response_id": first.json["id"], **body})
            assert following.status == 200, following.json
        none = await gateway.post(PATH, {"model": MODEL, "previous_response_id": None})
    assert (none.status, none.error["param"]) == (400, "input")


HARD_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "x-guidance": {}}


async def test_a_function_that_is_not_strict_follows_its_schema_as_given(gateway: RunningGateway) -> None:
    for strict in [{}, {"strict": None}, {"strict": False}]:
        easy = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
        grammars = []
        for schema, flags in (
            (easy, strict),
            (easy, {"strict": True}),
            (HARD_SCHEMA, strict),
            ({"type": "object"}, strict),
        ):
            tool = {"type": "function", "name": "f", "parameters": schema, **flags}
            async with gateway.worker(answering("x")) as worker:
                reply = await gateway.post(PATH, {"model": MODEL, "input": "Hello", "tools": [tool]})
                assert reply.status == 200, reply.json
                assert reply.json["tools"][0]["strict"] == flags.get("strict")
                assert reply.json["tools"][0]["parameters"] == schema
            [claimed] = worker.claimed
            grammars.append(claimed.sampling.grammar)
        as_given, as_strict, hard, any_object = grammars
        assert as_given == as_strict != any_object == hard


async def test_a_strict_function_that_no_grammar_can_follow_is_refused(gateway: RunningGateway) -> None:
    tool = {"type": "function", "name": "f", "parameters": HARD_SCHEMA, "strict": True}
    reply = await gateway.post(PATH, {"model": MODEL, "input": "Hello", "tools": [tool]})
    assert (reply.status, reply.error["param"]) == (400, "tools[0].parameters")
    assert "x-guidance" in reply.error["message"]


async def test_a_failed_response(gateway: RunningGateway, client: Any) -> None:
    async def failing(request: GenerationRequest) -> Steps:
        yield (Delta(0, tuple(tokens("abc"))),), None
        yield (), Outcome("error", "the engine failed")

    async with gateway.worker(failing):
        *_, last = await events_of(await client.responses.create(model=MODEL, input="Hello", stream=True))
        with pytest.raises(openai.InternalServerError, match="the engine failed"):
            await client.responses.create(model=MODEL, input="Hello")
    assert last.type == "response.failed"
    assert (last.response.status, last.response.error.code) == ("failed", "server_error")
    assert last.response.error.message == "the engine failed"
    [message] = last.response.output
    assert (message.status, message.content[0].text) == ("incomplete", "abc")
    stored = await gateway.get(f"{PATH}/{last.response.id}")
    assert Response.model_validate(stored.json) == last.response


async def test_what_has_no_effect_is_a_warning(gateway: RunningGateway) -> None:
    hard = {"type": "function", "name": "f", "parameters": HARD_SCHEMA}
    tools = [{"type": "web_search"}, {**TOOL, "name": "g"}, hard]
    body = {
        "model": MODEL,
        "input": [{"role": "user", "content": "x"}, {"type": "custom_tool_call", "call_id": "c", "input": "y"}],
        "tools": tools,
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "chat_template_kwargs": {"unknown": 1},
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "max_tool_calls": 3,
    }
    async with gateway.worker(answering("x")):
        assert "warnings" not in (await create(gateway)).json
        reply = await gateway.post(PATH, body)
        stream = await raw_events(gateway, PATH, {**body, "stream": True})
    assert reply.status == 200, reply.json
    names = ["input[1]", "tools[0]", "include[1]", "reasoning.summary", "max_tool_calls"]
    names += ["chat_template_kwargs.unknown", "tools[2].parameters"]
    assert [one["param"] for one in reply.json["warnings"]] == names
    assert all(one["message"].startswith(one["param"]) for one in reply.json["warnings"])
    assert reply.headers["x-quire-no-effect"] == ", ".join(names)
    assert stream[-1]["response"]["warnings"] == reply.json["warnings"]


async def test_store_is_checked_also_where_nothing_is_stored(gateway: RunningGateway) -> None:
    path = f"{PATH}/input_tokens"
    wrong = await gateway.post(path, {"model": MODEL, "input": "Hello", "store": {}})
    assert (wrong.status, wrong.error["param"]) == (400, "store")
    for store in (None, True, False):
        assert (await gateway.post(path, {"model": MODEL, "input": "Hello", "store": store})).status == 200
    assert (await gateway.post(path, {"model": MODEL, "input": "Hello", "background": True})).status == 200
