"""Tools of the Messages API, and the schemas of its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.gateway.api.messages.content import MESSAGES_SCHEMA, SYSTEM_SCHEMA, read_messages, read_system
from quire.gateway.api.messages.tools import TOOL_CHOICE_SCHEMA, TOOLS_SCHEMA, read_tool_choice, read_tools
from quire.gateway.errors.api_errors import ApiError
from quire.gateway.features.openapi.parameter_schemas import schema_of
from quire.gateway.output.tools import ANY_ARGUMENTS, Tool, ToolChoice, ToolMode
from quire.shared.config.schema_parts import Schema

# --- Tools and the choice among them ----------------------------------------------------------------------------------


SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"name": "read", "description": "Reads a file.", "input_schema": SCHEMA}
TOOL = Tool("read", "Reads a file.", SCHEMA)


def read_all(value: Any) -> list[Tool]:
    return list(read_tools(value, []).values())


def test_a_custom_tool() -> None:
    no_effect: list[str] = []
    more = {"type": "custom", "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}
    assert read_tools([READ, {**READ, **more, "name": "write", "strict": True}], no_effect) == {
        0: TOOL,
        1: TOOL._replace(name="write", strict=True),
    }
    assert no_effect == []


def test_a_tool_without_description() -> None:
    [tool] = read_all([{"name": "now", "input_schema": {"type": "object"}}])
    assert tool == Tool("now", "", {"type": "object"})


def test_examples_of_the_input_are_in_the_description() -> None:
    [tool] = read_all([{**READ, "input_examples": [{"path": "a"}, {"path": "b"}]}])
    assert tool.description == 'Reads a file.\nExamples of the input: {"path": "a"}, {"path": "b"}'


def test_a_tool_that_the_client_runs_gets_a_schema() -> None:
    no_effect: list[str] = []
    editor = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 10_000}
    tools = list(read_tools([{"type": "bash_20250124", "name": "bash"}, editor], no_effect).values())
    assert [tool.name for tool in tools] == ["bash", "str_replace_based_edit_tool"]
    assert "command" in tools[0].parameters["properties"]
    assert no_effect == ["tools.max_characters"]


def test_tools_of_anthropics_servers_are_skipped_and_named() -> None:
    no_effect: list[str] = []
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8, "allowed_domains": ["example.com"]}
    assert read_tools([search, {**READ, "defer_loading": True}, {"type": "mcp_\r\ntoolset"}], no_effect) == {1: TOOL}
    assert no_effect == ["tools.web_search_20250305", "tools.defer_loading", "tools.mcp_toolset"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice(ToolMode.REQUIRED)),
        ({"type": "tool", "name": "read"}, ToolChoice(ToolMode.NAMED, "read")),
        ({"type": "none"}, ToolChoice(ToolMode.NONE)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False)),
        ({"type": "any", "disable_parallel_tool_use": False}, ToolChoice(ToolMode.REQUIRED)),
    ],
)
def test_the_choice(value: Any, expected: ToolChoice) -> None:
    assert read_tool_choice(value, [TOOL]) == expected


REFUSED: dict[str, tuple[Any, str]] = {
    "not an array": ({}, "tools"),
    "a string": (["read"], "tools[0]"),
    "no name": ([{"input_schema": SCHEMA}], "tools[0].name"),
    "a wrong name": ([{**READ, "name": "read file"}], "tools[0].name"),
    "a name of 129 characters": ([{**READ, "name": "x" * 129}], "tools[0].name"),
    "a name that occurs twice": ([READ, READ], "tools[1].name"),
    "no schema": ([{"name": "read"}], "tools[0].input_schema"),
    "a schema of another type": ([{**READ, "input_schema": {"type": "string"}}], "tools[0].input_schema.type"),
    "a description of another type": ([{**READ, "description": 1}], "tools[0].description"),
    "unknown key": ([{**READ, "color": "red"}], "tools[0].color"),
    "strict of another type": ([{**READ, "strict": "yes"}], "tools[0].strict"),
    "a type of another type": ([{**READ, "type": 1}], "tools[0].type"),
    "a cache marker of another type": ([{**READ, "cache_control": 1}], "tools[0].cache_control"),
    "callers without direct": ([{**READ, "allowed_callers": ["code"]}], "tools[0].allowed_callers"),
    "examples of another type": ([{**READ, "input_examples": ["x"]}], "tools[0].input_examples"),
    "another name of a client tool": ([{"type": "bash_20250124", "name": "sh"}], "tools[0].name"),
    "a schema of a client tool": ([{"type": "bash_20250124", "input_schema": SCHEMA}], "tools[0].input_schema"),
}


@pytest.mark.parametrize(("value", "param"), REFUSED.values(), ids=REFUSED)
def test_tools_that_are_refused(value: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_tools(value, [])
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("auto", "tool_choice"),
        ({"type": "required"}, "tool_choice.type"),
        ({"type": "tool"}, "tool_choice.name"),
        ({"type": "tool", "name": "write"}, "tool_choice.name"),
        ({"type": "auto", "name": "read"}, "tool_choice.name"),
        ({"type": "none", "disable_parallel_tool_use": True}, "tool_choice.disable_parallel_tool_use"),
        ({"type": "auto", "disable_parallel_tool_use": 1}, "tool_choice.disable_parallel_tool_use"),
    ],
)
def test_choices_that_are_refused(value: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_tool_choice(value, [TOOL])
    assert caught.value.param == param


@pytest.mark.parametrize("value", [{"type": "any"}, {"type": "tool", "name": "web_search"}])
def test_a_choice_that_needs_a_tool_is_refused_without_tools(value: Any) -> None:
    with pytest.raises(ApiError, match="needs at least one tool"):
        read_tool_choice(value, [])


# --- Schemas of the parameters of the Messages API, against their readers. --------------------------------------------


TEXT = {"type": "text", "text": "x"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
THINKING = {"type": "thinking", "thinking": "hm"}
OWN_TOOL = {"name": "f", "input_schema": {"type": "object"}}


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
    [OWN_TOOL],
    [{}],
    [{"name": "f"}],
    *([{**OWN_TOOL, "name": value}] for value in ("", "a b", "a.b", "x" * 128, "x" * 129, 5)),
    *([{**OWN_TOOL, "type": value}] for value in ("custom", None, 5, "web_search_20250305")),
    *([{**OWN_TOOL, "input_schema": value}] for value in (None, {}, {"type": "string"}, {"type": "object", "x": 1})),
    *([{**OWN_TOOL, "description": value}] for value in ("", None, 5)),
    *([{**OWN_TOOL, name: True}] for name in ("strict", "defer_loading", "eager_input_streaming", "other")),
    *([{**OWN_TOOL, "strict": value}] for value in (1, None)),
    *([{**OWN_TOOL, "allowed_callers": value}] for value in (["direct"], ["code", "direct"], [], ["code"], "direct")),
    *([{**OWN_TOOL, "input_examples": value}] for value in ([], [{}], [5], None)),
    [{**OWN_TOOL, "other": None}],
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
    (schema_of(SYSTEM_SCHEMA), lambda value: read_system(value, []), OF_SYSTEM),
    (schema_of(MESSAGES_SCHEMA), lambda value: read_messages(value, []), OF_MESSAGES),
    (schema_of(TOOLS_SCHEMA), lambda value: read_tools(value, []), OF_TOOLS),
    (
        schema_of(TOOL_CHOICE_SCHEMA),
        lambda value: read_tool_choice(value, [Tool("f", "", ANY_ARGUMENTS, False)]),
        OF_TOOL_CHOICE,
    ),
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
