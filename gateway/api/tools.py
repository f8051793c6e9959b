"""The parameters `tools` and `tool_choice` of a chat."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from quire.gateway.errors.api_errors import invalid, only, refused
from quire.gateway.output.tools import ANY_ARGUMENTS, Tool, ToolChoice, ToolMode
from quire.shared.config.validators import Flag, Text

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}", re.ASCII)
NAME_FORM = "1 to 64 of the characters a-z, A-Z, 0-9, _, - and ."
MAX_DESCRIPTION_LENGTH = 65_536
# Made once: json.dumps with these arguments makes an encoder for each call.
_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def read_tools(name: str, value: Any) -> tuple[Tool, ...]:
    """The tools of a call. Raises InvalidRequest or InvalidValue, with the index of the tool."""
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
    only(name, value, ("type", "function"))
    return read_function(f"{name}.function", value.get("function"))


def read_function(name: str, value: Any) -> Tool:
    """The function of a tool: name, description, JSON schema of its arguments, strict. Raises InvalidRequest."""
    if type(value) is not dict:
        raise invalid(name, "an object with the name of the function", value)
    only(name, value, ("name", "description", "parameters", "strict"))
    title = tool_name(f"{name}.name", value.get("name"))
    description, strict = value.get("description"), value.get("strict")
    if description is not None:
        description = Text(0, MAX_DESCRIPTION_LENGTH)(f"{name}.description", description)
    if strict is not None:
        Flag()(f"{name}.strict", strict)
    return Tool(title, description or "", arguments_schema(f"{name}.parameters", value.get("parameters")), bool(strict))


def tool_name(name: str, value: Any) -> str:
    """The name of a function. Raises InvalidRequest."""
    if type(value) is not str or not _NAME.fullmatch(value):
        raise invalid(name, NAME_FORM, value)
    return value


def arguments_schema(name: str, value: Any) -> Any:
    """The JSON schema of the arguments of a tool; absent, they may be any object. Raises InvalidRequest."""
    if value is None:
        return ANY_ARGUMENTS
    if type(value) is not dict:
        raise invalid(name, "an object: the JSON schema of the arguments", value)
    if value.get("type", "object") != "object":
        raise invalid(f"{name}.type", "object: arguments have names", value["type"])
    return value if "type" in value else {**value, "type": "object"}


def read_tool_choice(name: str, value: Any) -> ToolChoice:
    """`auto`, `required`, `none`, or an object that names a function. Raises InvalidRequest."""
    forms = 'auto, required, none or {"type": "function", "function": {"name": ...}}'
    if type(value) is str:
        if value not in (ToolMode.AUTO, ToolMode.REQUIRED, ToolMode.NONE):
            raise invalid(name, forms, value)
        return ToolChoice(ToolMode(value))
    if type(value) is not dict or value.get("type") != "function":
        raise invalid(name, forms, value)
    only(name, value, ("type", "function"))
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
    """The size of JSON schemas in characters of JSON, and how deeply their objects and arrays are nested."""
    try:
        size = len(_compact(schema))
    except RecursionError:
        return 0, sys.maxsize
    depth = 0
    level: list[Any] = [schema]  # parsed JSON: dicts and lists
    while level:
        depth += 1
        inner = [value for one in level for value in (one.values() if isinstance(one, dict) else one)]
        level = [value for value in inner if isinstance(value, (dict, list))]
    return size, depth
