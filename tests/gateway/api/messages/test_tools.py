"""Tools and the choice among them."""

from __future__ import annotations

from typing import Any

import pytest

from quire.gateway.api.messages.tools import read_tool_choice, read_tools
from quire.gateway.errors.api_errors import ApiError
from quire.gateway.output.tools import Tool, ToolChoice, ToolMode

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
