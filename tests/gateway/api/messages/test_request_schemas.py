"""Schemas of the parameters of the Messages API, against their readers.

`../openapi/test_parameter_schemas.py` compares the parameters that are read without the rest of the body.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.gateway.api.messages.content import read_messages, read_system
from quire.gateway.api.messages.request_schemas import MESSAGES, SYSTEM, TOOL_CHOICE, TOOLS
from quire.gateway.api.messages.tools import read_tool_choice, read_tools
from quire.gateway.api.schema_parts import Schema
from quire.gateway.errors.api_errors import ApiError
from quire.gateway.output.tools import ANY_ARGUMENTS, Tool

TEXT = {"type": "text", "text": "x"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
THINKING = {"type": "thinking", "thinking": "hm"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def says(role: str, *blocks: Any) -> list[Any]:
    return [{"role": role, "content": list(blocks)}]


OF_SYSTEM: list[Any] = [
    "",
    "x",
    [],
    [TEXT],
    [{**TEXT, "cache_control": {"type": "ephemeral", "ttl": "1h"}, "citations": [], "other": None}],
    None,
    5,
    [5],
    [{"type": "text"}],
    [{**TEXT, "text": 5}],
    [{**TEXT, "other": 1}],
    [{**TEXT, "cache_control": {"type": "x"}}],
    [{**TEXT, "cache_control": {"other": None}}],
    [USE],
]
OF_MESSAGES: list[Any] = [
    None,
    [],
    [5],
    *([{"role": role, "content": "x"}] for role in ("user", "assistant", "system", "tool", None)),
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": "x", "other": None}],
    [{"role": "user", "content": "x", "other": 1}],
    *(says(role, block) for role in ("user", "assistant", "system") for block in (TEXT, USE, RESULT, THINKING)),
    *(says("user", {**RESULT, **more}) for more in ({"content": "x"}, {"content": None}, {"content": [TEXT]})),
    *(says("user", {**RESULT, **more}) for more in ({"content": []}, {"is_error": True}, {"is_error": 1})),
    *(says("user", {**RESULT, "tool_use_id": value}) for value in ("", "x" * 256, "x" * 257, None)),
    says("user", {**RESULT, "content": [{"type": "tool_reference", "tool_name": "f"}]}),
    says("user", {**RESULT, "content": [{"type": "tool_reference"}]}),
    says("user", {**RESULT, "content": [{"type": "image"}]}),
    says("user", {"type": "image", "source": {}}),
    *(says("assistant", {**USE, "caller": value}) for value in (None, {"type": "direct"}, {"type": "code"}, "direct")),
    *(says("assistant", {**USE, "input": value}) for value in ({"a": 1}, None, "{}", [])),
    *(says("assistant", {**USE, "name": value}) for value in ("a b", "", "x" * 128, "x" * 129)),
    says("assistant", {"type": "redacted_thinking", "data": "x"}),
    says("assistant", {**THINKING, "signature": ""}),
    says("assistant", {**THINKING, "signature": 5}),
    says("assistant", {"type": "thinking"}),
]
OF_TOOLS: list[Any] = [
    None,
    [],
    [5],
    [TOOL],
    [{}],
    [{"name": "f"}],
    *([{**TOOL, "name": value}] for value in ("", "a b", "a.b", "x" * 128, "x" * 129, 5)),
    *([{**TOOL, "type": value}] for value in ("custom", None, 5, "web_search_20250305")),
    *([{**TOOL, "input_schema": value}] for value in (None, {}, {"type": "string"}, {"type": "object", "x": 1})),
    *([{**TOOL, "description": value}] for value in ("", None, 5)),
    *([{**TOOL, name: True}] for name in ("strict", "defer_loading", "eager_input_streaming", "other")),
    *([{**TOOL, "strict": value}] for value in (1, None)),
    *([{**TOOL, "allowed_callers": value}] for value in (["direct"], ["code", "direct"], [], ["code"], "direct")),
    *([{**TOOL, "input_examples": value}] for value in ([], [{}], [5], None)),
    [{**TOOL, "other": None}],
    [{"type": "bash_20250124", "name": "bash"}],
    [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}],
]
OF_TOOL_CHOICE: list[Any] = [
    None,
    "auto",
    {},
    *({"type": kind} for kind in ("auto", "any", "none", "tool", "x", None)),
    *(
        {"type": kind, name: value}
        for kind in ("auto", "any", "none", "tool")
        for name in ("disable_parallel_tool_use", "other")
        for value in (True, None, 1)
    ),
    {"type": "tool", "name": "f"},
    {"type": "tool", "name": "f", "disable_parallel_tool_use": False},
    {"type": "auto", "name": "f"},
    {"type": "tool", "name": 5},
]
Reader = Callable[[Any], object]
READERS: list[tuple[Schema, Reader, list[Any]]] = [
    (SYSTEM, lambda value: read_system(value, []), OF_SYSTEM),
    (MESSAGES, lambda value: read_messages(value, []), OF_MESSAGES),
    (TOOLS, lambda value: read_tools(value, []), OF_TOOLS),
    (TOOL_CHOICE, lambda value: read_tool_choice(value, [Tool("f", "", ANY_ARGUMENTS, False)]), OF_TOOL_CHOICE),
]


def accepts(reader: Reader, value: Any) -> bool:
    try:
        reader(value)
    except ApiError:
        return False
    return True


@pytest.mark.parametrize(
    ("schema", "reader", "value"), [(schema, reader, value) for schema, reader, values in READERS for value in values]
)
def test_a_schema_accepts_what_its_reader_accepts(schema: Schema, reader: Reader, value: Any) -> None:
    assert Draft202012Validator(schema).is_valid(value) == accepts(reader, value)


@pytest.mark.parametrize(("schema", "reader", "values"), READERS)
def test_some_values_are_accepted_and_some_refused(schema: Schema, reader: Reader, values: list[Any]) -> None:
    Draft202012Validator.check_schema(schema)
    assert {accepts(reader, value) for value in values} == {True, False}
