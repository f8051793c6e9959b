"""Bodies that were read: warnings, options, the fields that the answer repeats."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.api.responses.parameters import RESPONSES
from quire.gateway.api.responses.request import read_request
from quire.gateway.errors.api_errors import ApiError, InvalidRequest
from tests.gateway.api.test_conversation import answering
from tests.support.gateway.response_calls import TOOL, create, prompt
from tests.support.gateway.running import MODEL, RunningGateway

# Words that give a random body the shape of a real one.
KEYS = "type role content text name id status call_id output arguments format tools mode summary schema effort"
TYPES = (
    "function message reasoning function_call function_call_output item_reference json_schema allowed_tools input_text"
)
WORDS = st.sampled_from((*RESPONSES, *KEYS.split(), *TYPES.split(), "user", "assistant", "auto", "required", "{}"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=5),
    max_leaves=12,
)


async def test_what_has_no_effect_is_named_in_the_answer_and_in_a_header(gateway: RunningGateway) -> None:
    async with gateway.worker(answering("x")):
        reply = await create(
            gateway,
            tools=[{"type": "web_search"}, TOOL],
            include=["message.output_text.logprobs", "reasoning.encrypted_content"],
            reasoning={"effort": "low", "summary": "auto"},
            max_tool_calls=3,
            prompt_cache_key="k",
        )
    assert reply.status == 200
    names = ["tools[0]", "include[1]", "reasoning.summary", "max_tool_calls", "prompt_cache_key"]
    assert [warning["param"] for warning in reply.json["warnings"]] == names
    assert all(warning["message"].startswith(warning["param"]) for warning in reply.json["warnings"])
    assert reply.headers["x-quire-no-effect"] == ", ".join(names)
    assert [tool["name"] for tool in reply.json["tools"]] == ["weather"]


async def test_a_plain_call_has_no_warnings(gateway: RunningGateway) -> None:
    async with gateway.worker(answering("x")):
        reply = await create(gateway)
    assert "warnings" not in reply.json
    assert "x-quire-no-effect" not in reply.headers


async def test_a_plain_answer_has_every_field_of_the_api(gateway: RunningGateway) -> None:
    async with gateway.worker(answering("x")):
        body = (await create(gateway)).json
    # Fields that clients read without a check for null (Open Responses).
    expected: dict[str, Any] = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "top_logprobs": 0,
        "temperature": 1.0,
        "top_p": 1.0,
        "tool_choice": "auto",
        "truncation": "disabled",
        "background": False,
        "service_tier": "default",
        "tools": [],
        "parallel_tool_calls": True,
        "store": True,
        "metadata": {},
        "text": {"format": {"type": "text"}},
    }
    assert {name: body[name] for name in expected} == expected
    nulls = {
        "completed_at",
        "error",
        "incomplete_details",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "previous_response_id",
        "prompt_cache_key",
        "safety_identifier",
        "user",
    }
    assert {name for name, value in body.items() if value is None} == nulls


@pytest.mark.parametrize(
    ("given", "priority_class"), [({"service_tier": "flex"}, "batch"), ({"priority": "interactive"}, "interactive")]
)
async def test_labels_choose_the_class(gateway: RunningGateway, given: dict[str, str], priority_class: str) -> None:
    reply = await create(gateway, background=True, **given)
    keys, redis = gateway.gateway.broker.keys, gateway.gateway.broker.client
    assert await redis.hget(keys.request(reply.json["id"][5:]), "class") == priority_class.encode()
    assert reply.json["service_tier"] == given.get("service_tier", "default")


async def test_allowed_tools_are_those_that_the_model_is_told_about(gateway: RunningGateway) -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    async with gateway.worker(answering("x")) as worker:
        reply = await create(gateway, tools=[{**TOOL, "name": "other"}, TOOL], tool_choice=allowed)
    told = prompt(worker.claimed[0])
    assert '"name": "weather"' in told
    assert "other" not in told
    assert reply.json["tool_choice"] == allowed
    assert len(reply.json["tools"]) == 2


async def test_fields_that_are_too_long_to_be_repeated_are_refused(gateway: RunningGateway) -> None:
    reply = await create(
        gateway, tools=[{**TOOL, "description": "\n" * 65_000, "name": f"t{index}"} for index in range(9)]
    )
    assert (reply.status, reply.error["param"]) == (400, "tools")


LIMITS = RequestLimits(
    model=MODEL,
    max_model_len=512,
    max_num_seqs=8,
    vocab_size=500,
    max_n=4,
    max_prompts=4,
    max_choices=8,
    max_tools=8,
    max_schema_bytes=1000,
    max_schema_depth=8,
    special_tokens={},
    sampling_defaults={},
)


@settings(max_examples=200, deadline=None)
@given(body=st.dictionaries(st.sampled_from(tuple(RESPONSES)), VALUES, max_size=6))
def test_any_body_is_read_or_refused(body: dict[str, Any]) -> None:
    refusal = ApiError("none", param="none")
    try:
        request = read_request({"model": MODEL, "input": "x", **body}, LIMITS)
        request.echo()
        request.conversation([item for item in request.items if item["type"] != "item_reference"])
    except InvalidRequest as error:
        refusal = error
    assert refusal.param
