"""The parameters `tools` and `tool_choice` of a chat."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from quire.gateway.errors.api_errors import invalid, only, refused
from quire.gateway.output.tools import ANY_ARGUMENTS, Tool, ToolChoice, ToolMode
from quire.shared.config.schema_parts import ANY_OBJECT, any_of, array, closed, or_null
from quire.shared.config.validators import Flag, OneOf, Text

TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}", re.ASCII)
NAME_FORM = "1 to 64 of the characters a-z, A-Z, 0-9, _, - and ."
DESCRIPTION = Text(0, 65_536)
# Made once: json.dumps with these arguments makes an encoder for each call.
_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

CHOICES = (ToolMode.AUTO, ToolMode.REQUIRED, ToolMode.NONE)
_FUNCTION = closed(
    {"name": TOOL_NAME},
    {
        "description": or_null(DESCRIPTION),
        "parameters": or_null(ANY_OBJECT | {"properties": {"type": {"const": "object"}}}),
        "strict": or_null(Flag()),
    },
)
_TOOL = closed({"type": {"const": "function"}, "function": _FUNCTION})
_NAMED = closed({"type": {"const": "function"}, "function": closed({"name": TOOL_NAME})})
# What `read_tools` and `read_tool_choice` accept.
TOOLS_SCHEMA, TOOL_CHOICE_SCHEMA = array(_TOOL), any_of(OneOf(CHOICES), _NAMED)


def read_tools(name: str, value: Any) -> tuple[Tool, ...]:
    """Return the tools of a call. Raises InvalidRequest or InvalidValue, with the index of the tool."""
    if type(value) is not list:
        raise invalid(name, "an array of tools", value)
    tools = tuple(_tool(f"{name}[{index}]", tool) for index, tool in enumerate(value))
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise refused(
                f"{name}[{index}].function.name",
                f"{name}[{index}].function.name is {tool.name!r}, which is the name of another tool; give each tool a "
                "name of its own.",
            )
        seen.add(tool.name)
    return tools


def _tool(name: str, value: Any) -> Tool:
    if type(value) is not dict:
        raise invalid(name, 'an object like {"type": "function", "function": {...}}', value)
    if value.get("type") != "function":
        raise invalid(f"{name}.type", "function: this server runs no tools of its own", value.get("type"))
    only(name, value, _TOOL["properties"])
    return read_function(f"{name}.function", value.get("function"))


def read_function(name: str, value: Any) -> Tool:
    """Return the function of a tool: name, description, JSON schema of its arguments, strict. Raises InvalidRequest."""
    if type(value) is not dict:
        raise invalid(name, "an object with the name of the function", value)
    only(name, value, _FUNCTION["properties"])
    title = tool_name(f"{name}.name", value.get("name"))
    description, strict = value.get("description"), value.get("strict")
    if description is not None:
        description = DESCRIPTION(f"{name}.description", description)
    if strict is not None:
        Flag()(f"{name}.strict", strict)
    return Tool(title, description or "", arguments_schema(f"{name}.parameters", value.get("parameters")), bool(strict))


def tool_name(name: str, value: Any) -> str:
    """Return the name of a function. Raises InvalidRequest."""
    if type(value) is not str or not TOOL_NAME.fullmatch(value):
        raise invalid(name, NAME_FORM, value)
    return value


def arguments_schema(name: str, value: Any) -> Any:
    """Return the JSON schema of the arguments of a tool; absent, they may be any object. Raises InvalidRequest."""
    if value is None:
        return ANY_ARGUMENTS
    if type(value) is not dict:
        raise invalid(name, "an object: the JSON schema of the arguments", value)
    if value.get("type", "object") != "object":
        raise invalid(f"{name}.type", "object: arguments have names", value["type"])
    return value if "type" in value else {**value, "type": "object"}


def read_tool_choice(name: str, value: Any) -> ToolChoice:
    """Read `auto`, `required`, `none`, or an object that names a function. Raises InvalidRequest."""
    forms = 'auto, required, none or {"type": "function", "function": {"name": ...}}'
    if type(value) is str:
        if value not in CHOICES:
            raise invalid(name, forms, value)
        return ToolChoice(ToolMode(value))
    if type(value) is not dict or value.get("type") != "function":
        raise invalid(name, forms, value)
    only(name, value, _NAMED["properties"])
    function = value.get("function")
    if type(function) is not dict:
        raise invalid(f"{name}.function", "an object with the name of a tool", function)
    only(f"{name}.function", function, ("name",))
    return ToolChoice(ToolMode.NAMED, tool_name(f"{name}.function.name", function.get("name")))


def check_choice(tools: tuple[Tool, ...], choice: ToolChoice, param: str = "tool_choice") -> None:
    """Check that a choice fits the tools of its call. Raises InvalidRequest."""
    if choice.mode == ToolMode.REQUIRED and not tools:
        raise refused(param, f"{param} is 'required', but the call has no tools; give it tools.")
    if choice.mode == ToolMode.NAMED and choice.name not in {tool.name for tool in tools}:
        raise refused(param, f"{param} names the function {choice.name!r}, which is not among the tools of the call.")


def schema_size(schema: Mapping[str, Any] | list[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the size of JSON schemas in characters of JSON, and how deeply their objects and arrays are nested."""
    try:
        size = len(_compact(schema))
    except RecursionError:
        return 0, sys.maxsize
    depth = 0
    level: list[Any] = [schema]  # parsed JSON: dicts and lists
    while level:
        depth += 1
        inner = [
            value for container in level for value in (container.values() if isinstance(container, dict) else container)
        ]
        level = [value for value in inner if isinstance(value, (dict, list))]
    return size, depth
