"""The schemas of answers describe real answers, and refuse others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.gateway.api.openapi.answers import SCHEMAS
from quire.gateway.api.schema_parts import ref
from quire.gateway.errors.api_errors import ModelNotFound, QueueIsFull, body
from tests.gateway.api.test_prompt_parameters import answering, report
from tests.gateway.conftest import Start
from tests.support.gateway.agents import ANSWER, TEMPLATE, WEATHER, saying
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, RunningGateway, chat_body, tokens, write_model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({**ref(name), "components": {"schemas": SCHEMAS}})


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one_and_refuses_an_empty_object(name: str) -> None:
    Draft202012Validator.check_schema(SCHEMAS[name])
    assert not validator(name).is_valid({})


def test_errors_have_exactly_four_fields() -> None:
    check = validator("Error")
    for error in (ModelNotFound("x", param="model"), QueueIsFull("x")):
        found: Any = json.loads(body(error))
        assert check.is_valid(found)
        found["error"]["more"] = 1
        assert not check.is_valid(found)


async def test_answers_and_events_of_a_call(gateway: RunningGateway) -> None:
    labels = {"metadata": {"a": "b"}, "service_tier": "auto"}
    async with gateway.worker(emit(tokens("ab"), "stop")):
        for path, name, base in (
            (CHAT, "ChatCompletion", chat_body()),
            (COMPLETIONS, "Completion", {"model": "test-model", "prompt": "x"}),
        ):
            validator(name).validate((await gateway.post(path, {**base, **labels, "n": 2})).json)
            streamed = {**base, **labels, "stream": True, "stream_options": {"include_usage": True}}
            for event in await gateway.events(path, streamed):
                if event.data != "[DONE]":
                    validator(f"{name}Chunk").validate(event.data)


async def validated(gateway: RunningGateway, path: str, name: str, asked: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The whole answer to a call, and the events of its stream, which the schemas accept."""
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    # The log-probabilities of a prompt cannot be streamed.
    streamed.pop("prompt_logprobs", None)
    whole = (await gateway.post(path, asked)).json
    validator(name).validate(whole)
    events = [event.data for event in await gateway.events(path, streamed) if event.data != "[DONE]"]
    for event in events:
        validator(f"{name}Chunk").validate(event)
    return whole, events


def refuses(name: str, answer: Any, choice: dict[str, Any]) -> bool:
    """True if a schema refuses an answer whose choice has other values."""
    return not validator(name).is_valid({**answer, "choices": [{**answer["choices"][0], **choice}]})


async def test_tool_calls_and_reasoning(start_gateway: Start, tmp_path: Path) -> None:
    gateway = await start_gateway(model=str(write_model(tmp_path / MODEL, chat_template=TEMPLATE)))
    function = {"name": WEATHER["name"], "parameters": WEATHER["input_schema"]}
    asked = chat_body(tools=[{"type": "function", "function": function}], return_token_ids=True)
    async with gateway.worker(saying(ANSWER), report=report):
        whole, events = await validated(gateway, CHAT, "ChatCompletion", asked)
    [choice] = whole["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message.keys() >= {"reasoning_content", "tool_calls"}
    deltas = [one["delta"].keys() for event in events for one in event["choices"]]
    assert {"reasoning_content", "content", "tool_calls"} <= set().union(*deltas)
    assert any("prompt_token_ids" in event for event in events)
    for wrong in ({"tool_calls": []}, {"reasoning_content": None}, {"tool_calls": [{"id": "x"}]}):
        assert refuses("ChatCompletion", whole, {"message": {**message, **wrong}})
    assert refuses("ChatCompletion", whole, {"finish_reason": "content_filter"})


@pytest.mark.parametrize(
    ("path", "name", "more"),
    [
        (CHAT, "ChatCompletion", {**chat_body(), "logprobs": True, "top_logprobs": 2}),
        (COMPLETIONS, "Completion", {"model": MODEL, "prompt": "ab", "logprobs": 2, "echo": True}),
    ],
)
async def test_scores(gateway: RunningGateway, path: str, name: str, more: dict[str, Any]) -> None:
    async with gateway.worker(answering, report=report):
        asked = {**more, "prompt_logprobs": 1, "return_token_ids": True}
        whole, events = await validated(gateway, path, name, asked)
    [choice] = whole["choices"]
    of_prompt = whole if name == "ChatCompletion" else choice
    assert of_prompt["prompt_logprobs"][0] is None
    assert of_prompt["prompt_token_ids"]
    assert choice["token_ids"] == [one for event in events for c in event["choices"] for one in c.get("token_ids", [])]
    assert refuses(name, whole, {"token_ids": ["x"]})
    assert refuses(name, whole, {"logprobs": {}})
    assert refuses(name, whole, {"stop_reason": []})
    if name == "Completion":
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert refuses(name, whole, {"prompt_logprobs": [{"x": {}}]})


async def test_usage_has_cached_tokens_and_stop_reasons_are_texts_or_tokens(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("ab"), "stop"), report=report):
        whole = (await gateway.chat()).json
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    check = validator("ChatCompletion")
    for reason in ("x", 5, None):
        assert not refuses("ChatCompletion", whole, {"stop_reason": reason})
    for lacking in ("system_fingerprint", "usage"):
        assert not check.is_valid({name: value for name, value in whole.items() if name != lacking})
    assert not check.is_valid({**whole, "usage": {**whole["usage"], "prompt_tokens_details": None}})
