"""Tools of responses: functions, skipped types, choices."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.gateway.api.responses.tools import (
    FunctionName,
    GivenTools,
    function_names,
    read_response_tool_choice,
    read_response_tools,
)
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
    assert [(tool.name, tool.strict) for tool in tools.tools] == [("f", True), ("g", False)]
    assert tools.echo()[0] == {**FUNCTION, "description": None}
    assert [name for name, _ in tools.skipped] == ["tools[0]", "tools[2]", "tools[3]", "tools[4].defer_loading"]
    assert "web_search" in tools.skipped[0][1]


def space(name: str, *functions: str, **more: Any) -> dict[str, Any]:
    inner = [{"type": "function", "name": function, "description": f"Does {function}."} for function in functions]
    return {"type": "namespace", "name": name, "description": f"About {name}.", "tools": inner, **more}


def test_the_functions_of_a_namespace_have_flat_names_for_the_model() -> None:
    given = [space("n", "f", "g"), {"type": "function", "name": "f"}, {"type": "web_search"}]
    given[0]["tools"].append({"type": "custom", "name": "h"})
    tools = read_response_tools("tools", given)
    assert [(one.name, one.description) for one in tools.tools] == [
        ("n__f", "About n.\n\nDoes f."),
        ("n__g", "Does g."),
        ("f", ""),
    ]
    assert [one.place for one in tools.functions] == ["tools[0].tools[0]", "tools[0].tools[1]", "tools[1]"]
    assert [name for name, _ in tools.skipped] == ["tools[0].tools[2]", "tools[2]"]
    function, namespace = tools.echo()
    assert (function["name"], namespace["name"], namespace["description"]) == ("f", "n", "About n.")
    assert [one["name"] for one in namespace["tools"]] == ["f", "g"]
    names = function_names(json.dumps({"tools": tools.echo()}, separators=(",", ":")))
    assert names == {"n__f": FunctionName("n", "f"), "n__g": FunctionName("n", "g")}
    assert function_names(json.dumps({"tools": [function]})) == {}


def test_later_tools_replace_those_of_the_same_name() -> None:
    first = read_response_tools("tools", [space("n", "f"), FUNCTION])
    changed = {"type": "function", "name": "f", "description": "new"}
    both = first.followed_by(read_response_tools("input[0].tools", [space("n", "g"), changed, {"type": "mcp"}]))
    assert [(one.tool.name, one.place) for one in both.functions] == [
        ("n__f", "tools[0].tools[0]"),
        ("n__g", "input[0].tools[0].tools[0]"),
        ("f", "input[0].tools[1]"),
    ]
    assert [one["name"] for one in both.echo()[-1]["tools"]] == ["f", "g"]
    assert [name for name, _ in both.skipped] == ["input[0].tools[2]"]
    assert GivenTools().followed_by(first) == first
    with pytest.raises(InvalidRequest, match="another tool"):
        first.followed_by(read_response_tools("input[0].tools", [{"type": "function", "name": "n__f"}]))


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
        ([{"type": "web_search"}] * 1025, "tools"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}] * 1024}], "tools"),
        ([{"type": "namespace", "tools": []}], "tools[0].name"),
        ([{"type": "namespace", "name": "n"}], "tools[0].tools"),
        ([{"type": "namespace", "name": "n", "tools": [], "x": 1}], "tools[0].x"),
        ([{"type": "namespace", "name": "n", "description": 1, "tools": []}], "tools[0].description"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
        ([{"type": "namespace", "name": "n", "tools": []}] * 2, "tools[1].name"),
        # The model could not tell these apart.
        ([space("a", "b__f"), space("a__b", "f")], "tools[1].tools[0].name"),
        ([space("n", "f"), {"type": "function", "name": "n__f"}], "tools[1].name"),
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
    assert (found.choice.mode, found.allowed, found.echo) == (ToolMode.REQUIRED, (FunctionName("", "f"),), allowed)


def test_choices_of_functions_within_namespaces() -> None:
    choice = {"type": "function", "namespace": "n", "name": "f"}
    named = read_response_tool_choice("tool_choice", choice)
    assert (named.choice.name, named.echo) == ("n__f", choice)
    tools = [{"type": "namespace", "name": "m"}, choice]
    allowed = read_response_tool_choice("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": tools})
    assert allowed.echo["tools"] == tools
    names = [("n", "f"), ("n", "g"), ("m", "x"), ("", "f")]
    assert [allowed.allows(FunctionName(*name)) for name in names] == [True, False, True, False]


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
