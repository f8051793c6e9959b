"""The tools of a response: functions are kept, tools of all other types are skipped with a warning.

Coding agents always send tools that their usual server runs, such as `web_search`. To refuse these would refuse the
agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.gateway.api.given_grammars import only
from quire.gateway.api.tools import read_function, tool_name
from quire.gateway.errors.api_errors import invalid, refused
from quire.gateway.output.tools import Tool, ToolChoice, ToolMode
from quire.shared.validators import shown

# Keys of a function for features of other servers.
_NO_EFFECT = ("allowed_callers", "async", "defer_loading", "output_schema")
_FUNCTION = ("name", "description", "parameters", "strict")
# Tools of all types in one call; `--max-tools` bounds the functions.
MAX_GIVEN_TOOLS = 1024


@dataclass(frozen=True, slots=True)
class GivenTools:
    """The tools of a call.

    functions: those that the model may call. echo: the functions in the form of the answer. skipped: the name of each
    parameter without an effect, with the reason. places: the index of each function in the call, by its name.
    """

    functions: tuple[Tool, ...] = ()
    echo: tuple[dict[str, Any], ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    places: Mapping[str, int] = field(default_factory=dict)


def read_response_tools(name: str, value: Any) -> GivenTools:
    """The parameter `tools`. Raises InvalidRequest or InvalidValue, with the index of the tool."""
    if type(value) is not list:
        raise invalid(name, "an array of tools", value)
    if len(value) > MAX_GIVEN_TOOLS:
        raise refused(name, f"{name} must have at most {MAX_GIVEN_TOOLS} tools, not {len(value)}.")
    functions: dict[str, Tool] = {}
    places: dict[str, int] = {}
    echo, skipped = [], []
    for index, tool in enumerate(value):
        at = f"{name}[{index}]"
        if type(tool) is not dict or type(tool.get("type")) is not str:
            raise invalid(at, 'an object like {"type": "function", "name": ...}', tool)
        if tool["type"] != "function":
            skipped.append(
                (at, f"this server runs no tool of the type {shown(tool['type'])}; the model may not use it")
            )
            continue
        only(at, tool, ("type", *_FUNCTION, *_NO_EFFECT))
        skipped += [
            (f"{at}.{key}", "it has no effect on this server")
            for key in _NO_EFFECT
            if tool.get(key) not in (None, False)
        ]
        function = read_function(at, {key: tool[key] for key in _FUNCTION if key in tool})
        if function.name in functions:
            raise refused(
                f"{at}.name",
                f"{at}.name is {function.name!r}, which is the name of another tool; give each tool a name of its own.",
            )
        functions[function.name], places[function.name] = function, index
        echo.append({"type": "function", **{key: tool.get(key) for key in _FUNCTION}})
    return GivenTools(tuple(functions.values()), tuple(echo), tuple(skipped), places)


@dataclass(frozen=True, slots=True)
class GivenChoice:
    """The parameter `tool_choice`. allowed: the names of the tools that may be called; None for all of them."""

    choice: ToolChoice
    echo: Any
    allowed: tuple[str, ...] | None = None


def read_response_tool_choice(name: str, value: Any) -> GivenChoice:
    """`auto`, `required`, `none`, a function, or a set of allowed functions. Raises InvalidRequest."""
    forms = 'auto, required, none, {"type": "function", "name": ...} or {"type": "allowed_tools", ...}'
    if value in (ToolMode.AUTO, ToolMode.REQUIRED, ToolMode.NONE):
        return GivenChoice(ToolChoice(ToolMode(value)), value)
    if type(value) is not dict:
        raise invalid(name, forms, value)
    if value.get("type") == "function":
        only(name, value, ("type", "name"))
        function = tool_name(f"{name}.name", value.get("name"))
        return GivenChoice(ToolChoice(ToolMode.NAMED, function), {"type": "function", "name": function})
    if value.get("type") != "allowed_tools":
        raise refused(
            f"{name}.type", f"{name} must be {forms}: this server runs no tools.", code="unsupported_parameter"
        )
    only(name, value, ("type", "mode", "tools"))
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in (ToolMode.AUTO, ToolMode.REQUIRED):
        raise invalid(f"{name}.mode", "auto or required", mode)
    if type(tools) is not list or len(tools) > MAX_GIVEN_TOOLS:
        raise invalid(f"{name}.tools", f"an array of at most {MAX_GIVEN_TOOLS} tools", tools)
    names = []
    for index, tool in enumerate(tools):
        if type(tool) is not dict or type(tool.get("type")) is not str:
            raise invalid(f"{name}.tools[{index}]", 'an object like {"type": "function", "name": ...}', tool)
        if tool["type"] == "function":
            names.append(tool_name(f"{name}.tools[{index}].name", tool.get("name")))
    echo = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": one} for one in names]}
    return GivenChoice(ToolChoice(ToolMode(mode)), echo, tuple(names))
