"""Parameters of POST /v1/responses, refused with their names."""

from __future__ import annotations

from typing import Any

import pytest

from quire.gateway.api.responses.parameters import REFUSED, RESPONSES
from quire.shared.sampling_params import PARAMETERS
from tests.support.gateway.response_calls import create
from tests.support.gateway.running import RunningGateway

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
WRONG: list[tuple[str, Any, str]] = [
    ("model", "other", "model"),
    ("model", None, "model"),
    ("input", 5, "input"),
    ("input", None, "input"),
    ("instructions", 5, "instructions"),
    ("previous_response_id", "", "previous_response_id"),
    ("previous_response_id", 5, "previous_response_id"),
    ("max_output_tokens", 0, "max_output_tokens"),
    ("tool_choice", "required", "tool_choice"),
    ("tool_choice", {"type": "function", "name": "f"}, "tool_choice"),
    (
        "tool_choice",
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "tool_choice.tools",
    ),
    ("parallel_tool_calls", 1, "parallel_tool_calls"),
    ("text", {"format": {"type": "xml"}}, "text.format.type"),
    ("text", {"format": {"type": "json_schema", "schema": SCHEMA}}, "text.format.name"),
    ("text", {"format": {"type": "json_schema", "name": "a", "schema": 5}}, "text.format.schema"),
    ("text", {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}, "text.format.schema"),
    ("text", {"format": {"type": "json_schema", "json_schema": {}}}, "text.format.json_schema"),
    ("text", {"verbosity": "loud"}, "text.verbosity"),
    ("text", {"other": 1}, "text.other"),
    ("reasoning", {"effort": "huge"}, "reasoning.effort"),
    ("reasoning", {"summary": "long"}, "reasoning.summary"),
    ("reasoning", {"mode": "pro"}, "reasoning.mode"),
    ("include", ["everything"], "include[0]"),
    ("include", "x", "include"),
    ("top_logprobs", 21, "top_logprobs"),
    ("truncation", "middle", "truncation"),
    ("store", "yes", "store"),
    ("stream", "yes", "stream"),
    ("stream_options", {}, "stream_options"),
    ("max_tool_calls", -1, "max_tool_calls"),
    ("metadata", {"a": 5}, "metadata.a"),
    ("service_tier", "scale", "service_tier"),
    ("user", 5, "user"),
    ("temperature", 3, "temperature"),
    ("n", 2, "n"),
    ("messages", [], "messages"),
    ("max_tokens", 5, "max_tokens"),
    ("response_format", {"type": "text"}, "response_format"),
    ("nonsense", 1, "nonsense"),
]


@pytest.mark.parametrize(("name", "value", "param"), WRONG, ids=[f"{name}-{value}"[:60] for name, value, _ in WRONG])
async def test_a_wrong_value_is_refused_with_its_name(
    gateway: RunningGateway, name: str, value: Any, param: str
) -> None:
    reply = await create(gateway, **{name: value})
    assert reply.status == (404 if (name, value) == ("model", "other") else 400)
    assert reply.error["param"] == param
    assert param in reply.error["message"]
    assert await gateway.accepted() == 0


@pytest.mark.parametrize("name", REFUSED)
async def test_what_this_server_lacks_is_refused_by_name(gateway: RunningGateway, name: str) -> None:
    reply = await create(gateway, **{name: {"id": "x"}})
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, name, "unsupported_parameter")


async def test_background_needs_store(gateway: RunningGateway) -> None:
    reply = await create(gateway, background=True, store=False)
    assert (reply.status, reply.error["param"]) == (400, "store")


async def test_obfuscation_is_refused(gateway: RunningGateway) -> None:
    reply = await create(gateway, stream=True, stream_options={"include_obfuscation": True})
    assert (reply.status, reply.error["param"]) == (400, "stream_options.include_obfuscation")


def test_each_parameter_of_sampling_is_a_parameter_or_has_a_reason_not_to_be() -> None:
    """A response is one answer, and a grammar may say where it ends."""
    left_out = set(PARAMETERS) - set(RESPONSES)
    assert left_out >= {"n", "best_of", "beam_width", "length_penalty", "early_stopping", "grammar", "max_tokens"}
    assert {"logprobs", "min_tokens", "ignore_eos"} <= left_out
