"""Messages of a chat that are refused, by the name of the message and the key."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.gateway.api.chat_messages import read_messages
from quire.gateway.api.prompts import read_prompts
from quire.gateway.errors.api_errors import ApiError, body
from tests.support.gateway.refusals import CHAT, USER, check
from tests.support.gateway.running import RunningGateway, chat_body

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def calls(value: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": None, "tool_calls": value}]


MESSAGES: dict[str, tuple[Any, str]] = {
    "none": ([], "messages"),
    "not an array": ("Hello", "messages"),
    "an object": ({"role": "user"}, "messages"),
    "a string inside": ([USER, "Hello"], "messages[1]"),
    "no role": ([{"content": "x"}], "messages[0].role"),
    "unknown role": ([{"role": "wizard", "content": "x"}], "messages[0].role"),
    "a result without a call": ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    "a result without content": ([{"role": "tool", "tool_call_id": "1"}], "messages[0].content"),
    "a result of a user": ([{**USER, "tool_call_id": "1"}], "messages[0].tool_call_id"),
    "role of another type": ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    "no content": ([{"role": "user"}], "messages[0].content"),
    "null content": ([USER, {"role": "assistant", "content": None}], "messages[1].content"),
    "content of another type": ([{"role": "user", "content": 5}], "messages[0].content"),
    "no parts": ([{"role": "user", "content": []}], "messages[0].content"),
    "an image": (
        [{"role": "user", "content": [{"type": "image_url"}]}],
        "messages[0].content[0].type",
    ),
    "a part without text": ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    "unknown key of a part": (
        [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}],
        "messages[0].content[0].cache_control",
    ),
    "a part that is a string": ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    "calls of a user": ([{**USER, "tool_calls": [CALL]}], "messages[0].tool_calls"),
    "calls that are no array": (calls(CALL), "messages[0].tool_calls"),
    "a call that is a string": (calls(["add"]), "messages[0].tool_calls[0]"),
    "a call without an id": (calls([{**CALL, "id": None}]), "messages[0].tool_calls[0].id"),
    "a call of another type": (calls([{**CALL, "type": "custom"}]), "messages[0].tool_calls[0].type"),
    "a call without a function": (calls([{**CALL, "function": 1}]), "messages[0].tool_calls[0].function"),
    "a call with an unknown key": (calls([{**CALL, "x": 1}]), "messages[0].tool_calls[0].x"),
    "a call without a name": (
        calls([{**CALL, "function": {"arguments": "{}"}}]),
        "messages[0].tool_calls[0].function.name",
    ),
    "arguments that are an object": (
        calls([{**CALL, "function": {"name": "add", "arguments": {}}}]),
        "messages[0].tool_calls[0].function.arguments",
    ),
    "reasoning of another type": (
        [{"role": "assistant", "content": "x", "reasoning_content": 1}],
        "messages[0].reasoning_content",
    ),
    "reasoning of a user": ([{**USER, "reasoning_content": "x"}], "messages[0].reasoning_content"),
    "a value of its own among the copies": (
        [{"role": "assistant", "content": "x", "provider_specific_fields": {"refusal": None, "content": "y"}}],
        "messages[0].provider_specific_fields",
    ),
    "copies of a user": ([{**USER, "provider_specific_fields": {}}], "messages[0].provider_specific_fields"),
    "copies that are no object": (
        [{"role": "assistant", "content": "x", "provider_specific_fields": ["x"]}],
        "messages[0].provider_specific_fields",
    ),
    "unknown key": ([{**USER, "surprise": 1}], "messages[0].surprise"),
    "name of another type": ([{**USER, "name": 1}], "messages[0].name"),
}


@pytest.mark.parametrize(("messages", "param"), MESSAGES.values(), ids=MESSAGES)
async def test_messages_that_are_none(server: RunningGateway, messages: Any, param: str) -> None:
    await check(server, CHAT, chat_body(messages=messages), 400, param, param)


def test_copies_of_the_values_of_a_message_are_left_out() -> None:
    """litellm sends such an object back with each message of the assistant."""
    message = {"role": "assistant", "content": "x", "reasoning_content": "r"}
    copies = {"refusal": None, "reasoning_content": "r"}
    assert read_messages([{**message, "provider_specific_fields": copies}]) == read_messages([message])


async def test_a_content_without_parts_is_called_empty(server: RunningGateway) -> None:
    body = chat_body(messages=[{"role": "user", "content": []}])
    await check(server, CHAT, body, 400, "messages[0].content", "is an empty array; send at least one text part")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def refused(act: Callable[[], object]) -> dict[str, Any] | None:
    """The error as a client would get it; any other exception is a fault of the gateway."""
    try:
        act()
    except ApiError as error:
        found: dict[str, Any] = json.loads(body(error))["error"]
        return found
    return None


@given(values)
def test_any_messages_and_prompts_are_accepted_or_refused_by_name(value: Any) -> None:
    for read in (read_messages, lambda prompt: read_prompts(prompt, 8, 100)):
        refusal = refused(lambda read=read: read(value))
        assert refusal is None or refusal["param"] is not None
