"""`tools` and `tool_choice` that are refused, by the name of the tool and the key."""

from __future__ import annotations

from typing import Any

import pytest

from quire.gateway.api.tools import check_choice, read_tool_choice, read_tools, schema_size
from quire.gateway.errors.api_errors import InvalidRequest
from quire.gateway.output.tools import Tool, ToolChoice, ToolMode
from quire.shared.validators import InvalidValue


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", **fields}}


def test_a_tool_has_defaults_for_all_but_its_name() -> None:
    [tool] = read_tools("tools", [function()])
    assert tool == Tool("add", "", {"type": "object"}, strict=False)
    [tool] = read_tools("tools", [function(description="d", parameters={"properties": {}}, strict=True)])
    assert tool == Tool("add", "d", {"properties": {}, "type": "object"}, strict=True)


TOOLS: dict[str, tuple[Any, str]] = {
    "no array": ({}, "tools"),
    "a string": (["add"], "tools[0]"),
    "another type": ([{"type": "web_search"}], "tools[0].type"),
    "no type": ([{"function": {"name": "add"}}], "tools[0].type"),
    "no function": ([{"type": "function"}], "tools[0].function"),
    "unknown key": ([{**function(), "surprise": 1}], "tools[0].surprise"),
    "unknown key of the function": ([function(surprise=1)], "tools[0].function.surprise"),
    "no name": ([function(), {"type": "function", "function": {}}], "tools[1].function.name"),
    "a name with spaces": ([function(name="a b")], "tools[0].function.name"),
    "a long name": ([function(name="a" * 65)], "tools[0].function.name"),
    "the same name": ([function(), function()], "tools[1].function.name"),
    "description of another type": ([function(description=1)], "tools[0].function.description"),
    "strict of another type": ([function(strict="yes")], "tools[0].function.strict"),
    "parameters of another type": ([function(parameters=[])], "tools[0].function.parameters"),
    "parameters that are no object": ([function(parameters={"type": "string"})], "tools[0].function.parameters.type"),
}


@pytest.mark.parametrize(("value", "name"), TOOLS.values(), ids=TOOLS)
def test_tools_that_are_refused(value: Any, name: str) -> None:
    with pytest.raises((InvalidRequest, InvalidValue)) as caught:
        read_tools("tools", value)
    error = caught.value
    assert (error.param if isinstance(error, InvalidRequest) else error.name) == name


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        ("auto", ToolChoice(ToolMode.AUTO)),
        ("required", ToolChoice(ToolMode.REQUIRED)),
        ("none", ToolChoice(ToolMode.NONE)),
        (function(), ToolChoice(ToolMode.NAMED, "add")),
    ],
)
def test_a_choice(value: Any, choice: ToolChoice) -> None:
    assert read_tool_choice("tool_choice", value) == choice


CHOICES: dict[str, tuple[Any, str]] = {
    "another word": ("any", "tool_choice"),
    "the name of a mode": ("named", "tool_choice"),
    "a number": (1, "tool_choice"),
    "another type": ({"type": "custom"}, "tool_choice"),
    "no function": ({"type": "function"}, "tool_choice.function"),
    "no name": ({"type": "function", "function": {}}, "tool_choice.function.name"),
    "unknown key": ({**function(), "mode": "auto"}, "tool_choice.mode"),
}


@pytest.mark.parametrize(("value", "name"), CHOICES.values(), ids=CHOICES)
def test_choices_that_are_refused(value: Any, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_tool_choice("tool_choice", value)
    assert caught.value.param == name


def test_a_choice_must_fit_the_tools() -> None:
    tools = (Tool("add"),)
    for choice in (ToolChoice(ToolMode.REQUIRED), ToolChoice(ToolMode.NAMED, "add"), ToolChoice(ToolMode.NONE)):
        check_choice(tools, choice)
    check_choice((), ToolChoice())
    with pytest.raises(InvalidRequest, match="the call has no tools"):
        check_choice((), ToolChoice(ToolMode.REQUIRED))
    with pytest.raises(InvalidRequest, match="'sub', which is not among the tools"):
        check_choice(tools, ToolChoice(ToolMode.NAMED, "sub"))


def test_the_size_of_a_schema_is_its_json_and_its_nesting() -> None:
    assert schema_size({}) == (2, 1)
    assert schema_size({"a": [{"b": {}}]}) == (len('{"a":[{"b":{}}]}'), 4)
    endless: dict[str, Any] = {}
    for _ in range(100_000):
        endless = {"a": endless}
    assert schema_size(endless)[1] > 1000
