"""Tools of responses: functions, skipped types, choices."""

from __future__ import annotations

from typing import Any

import pytest

from quire.gateway.api.responses.tools import read_response_tool_choice, read_response_tools
from quire.gateway.errors.api_errors import InvalidRequest
from quire.gateway.output.tools import ToolMode
from quire.shared.validators import InvalidValue

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def test_functions_are_kept_and_other_types_are_skipped() -> None:
    given = [
        {"type": "web_search", "search_context_size": "low"},
        FUNCTION,
        {"type": "mcp", "server_label": "x"},
        {"type": "custom", "name": "apply_patch"},
        {"type": "function", "name": "g", "defer_loading": True},
    ]
    tools = read_response_tools("tools", given)
    assert [(tool.name, tool.strict) for tool in tools.functions] == [("f", True), ("g", False)]
    assert tools.echo[0] == {**FUNCTION, "description": None}
    assert [name for name, _ in tools.skipped] == ["tools[0]", "tools[2]", "tools[3]", "tools[4].defer_loading"]
    assert "web_search" in tools.skipped[0][1]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        ([5], "tools[0]"),
        ([{"name": "f"}], "tools[0]"),
        ([{"type": "function"}], "tools[0].name"),
        ([{"type": "function", "function": {"name": "f"}}], "tools[0].function"),
        ([{**FUNCTION, "parameters": {"type": "array"}}], "tools[0].parameters.type"),
        ([{**FUNCTION, "strict": 1}], "tools[0].strict"),
        ([FUNCTION, FUNCTION], "tools[1].name"),
        ([FUNCTION] * 1025, "tools"),
    ],
)
def test_wrong_tools_are_refused(tools: Any, param: str) -> None:
    with pytest.raises((InvalidRequest, InvalidValue)) as caught:
        read_response_tools("tools", tools)
    assert getattr(caught.value, "param", None) == param or getattr(caught.value, "name", None) == param


def test_choices() -> None:
    assert read_response_tool_choice("tool_choice", "required").choice.mode == ToolMode.REQUIRED
    named = read_response_tool_choice("tool_choice", {"type": "function", "name": "f"})
    assert (named.choice.mode, named.choice.name) == (ToolMode.NAMED, "f")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    found = read_response_tool_choice("tool_choice", {**allowed, "tools": [*allowed["tools"], {"type": "mcp"}]})
    assert (found.choice.mode, found.allowed, found.echo) == (ToolMode.REQUIRED, ("f",), allowed)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (5, "tool_choice"),
        ("named", "tool_choice"),
        ({"type": "web_search"}, "tool_choice.type"),
        ({"type": "function"}, "tool_choice.name"),
        ({"type": "function", "function": {"name": "f"}}, "tool_choice.function"),
        ({"type": "allowed_tools", "mode": "none", "tools": []}, "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"),
    ],
)
def test_wrong_choices_are_refused(choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_response_tool_choice("tool_choice", choice)
    assert caught.value.param == param
