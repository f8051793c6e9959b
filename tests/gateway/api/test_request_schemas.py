"""Schemas of parameters with readers of their own, against the readers of a gateway."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.gateway.api.chat_messages import read_messages
from quire.gateway.api.completions import read_prompts
from quire.gateway.api.request_schemas import MESSAGES, PROMPT
from quire.gateway.errors.api_errors import InvalidRequest

USER = {"role": "user", "content": "x"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
ASSISTANT = {"role": "assistant", "content": None}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "5"}


def call(**changes: Any) -> list[Any]:
    """A conversation with a tool call in which some keys have other values."""
    return [{**ASSISTANT, "tool_calls": [{**CALL, **changes}]}]


GOOD_MESSAGES: list[Any] = [
    [USER],
    [{"role": "developer", "content": [{"type": "text", "text": ""}]}, {**USER, "name": "n"}],
    [{**USER, "name": None, "tool_calls": None}],
    [{**USER, "content": [{"type": "text", "text": "x", "other": None}], "refusal": None, "annotations": []}],
    [{**ASSISTANT, "tool_calls": [CALL]}, RESULT],
    [{"role": "assistant", "tool_calls": [CALL, {**CALL, "index": 1}]}, {**RESULT, "name": "f"}],
    [{**ASSISTANT, "content": "x", "tool_calls": [], "reasoning_content": "r"}],
    [{**ASSISTANT, "reasoning_content": "r"}],
    [{**ASSISTANT, "reasoning": "r"}],
    call(function={"name": "f", "arguments": ""}),
    call(function={"name": "f", "arguments": " "}),
    call(function={"name": "f", "arguments": '{"a": "cut'}),
    [{"role": "assistant", "tool_calls": [{"id": "1", "function": CALL["function"]}] * 128}],
]
BAD_MESSAGES: list[Any] = [
    None,
    "x",
    [],
    ["x"],
    [{"role": "robot", "content": "x"}],
    [{"role": "user"}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{**USER, "name": ""}],
    [{**USER, "name": "x" * 257}],
    [{**USER, "content": [{"type": "text", "text": "x", "other": 1}]}],
    [{**USER, "refusal": "no"}],
    [{**USER, "reasoning_content": "r"}],
    [{**USER, "tool_calls": [CALL]}],
    [{**USER, "tool_call_id": "call_1"}],
    [{**USER, "other": []}],
    [ASSISTANT],
    [{**ASSISTANT, "tool_calls": []}],
    [{**ASSISTANT, "reasoning_content": ""}],
    [{**ASSISTANT, "content": "x", "reasoning_content": 5}],
    [{"role": "assistant", "tool_calls": [CALL] * 129}],
    call(id=""),
    call(type=None),
    call(other=None),
    call(function=None),
    call(function={"name": "f"}),
    call(function={"name": "a b", "arguments": "{}"}),
    call(function={"name": "f", "arguments": {}}),
    call(function={"name": "f", "arguments": "{}", "other": None}),
    [{**RESULT, "tool_call_id": None}],
    [{**RESULT, "content": None}],
    [{"role": "tool", "content": "x"}],
]
GOOD_PROMPTS: list[Any] = ["x", [1, 2], ["x", "y"], [[1], "x"]]
BAD_PROMPTS: list[Any] = [None, "", 5, [], [""], [[]], [-1], [[1.5]], [{}], [None]]


@pytest.mark.parametrize("value", GOOD_MESSAGES + BAD_MESSAGES)
def test_messages(value: Any) -> None:
    good = value in GOOD_MESSAGES
    assert Draft202012Validator(MESSAGES).is_valid(value) == good
    if good:
        read_messages(value)
    else:
        with pytest.raises(InvalidRequest):
            read_messages(value)


@pytest.mark.parametrize("value", GOOD_PROMPTS + BAD_PROMPTS)
def test_prompts(value: Any) -> None:
    good = value in GOOD_PROMPTS
    assert Draft202012Validator(PROMPT).is_valid(value) == good
    if good:
        read_prompts(value, 8, 100)
    else:
        with pytest.raises(InvalidRequest):
            read_prompts(value, 8, 100)
