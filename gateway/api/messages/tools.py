"""The parameters `tools` and `tool_choice` of the Messages API.

A tool of Anthropic that the client runs (bash, text editor, memory) gets the schema that the request leaves out. Tools
that Anthropic's servers run, such as the web search, are skipped and named in `no_effect`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from quire.gateway.api.messages.client_tools import client_tool
from quire.gateway.api.messages.content import CACHE_CONTROL, check_cache_control, only_known
from quire.gateway.errors.api_errors import invalid, refused
from quire.gateway.output.tools import Tool, ToolChoice, ToolMode
from quire.shared.config.schema_parts import ANY_OBJECT, FLAG, TEXT, Schema, any_of, array, with_nulls
from quire.shared.config.validators import shown

MAX_NAME_LENGTH = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}", re.ASCII)

# What every tool may have.
_COMMON: Schema = {
    "cache_control": CACHE_CONTROL,
    "strict": FLAG,
    "defer_loading": FLAG,
    "allowed_callers": {"type": "array", "contains": {"const": "direct"}},
    "input_examples": array(ANY_OBJECT),
}
_CUSTOM_SCHEMA = with_nulls(
    {
        "name": _NAME,
        "input_schema": {"type": "object", "properties": {"type": {"const": "object"}}, "required": ["type"]},
    },
    # `eager_input_streaming`: the input is always streamed as it is generated.
    _COMMON | {"type": {"const": "custom"}, "description": TEXT, "eager_input_streaming": FLAG},
)
_CUSTOM = frozenset(_CUSTOM_SCHEMA["properties"])
_CLIENT = frozenset(("type", "name", "max_characters", *_COMMON))
_FLAGS = ("strict", "defer_loading", "eager_input_streaming")

_MODES = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "tool": ToolMode.NAMED, "none": ToolMode.NONE}
_PARALLEL: Schema = {"disable_parallel_tool_use": FLAG}
# What `read_tools` and `read_tool_choice` accept.
TOOLS_SCHEMA = array(
    any_of(
        _CUSTOM_SCHEMA,
        # Tools of Anthropic, which the server knows by their types, or skips.
        {"type": "object", "properties": {"type": TEXT | {"not": {"const": "custom"}}}, "required": ["type"]},
    )
)
TOOL_CHOICE_SCHEMA = any_of(
    with_nulls({"type": {"enum": ["auto", "any"]}}, _PARALLEL),
    with_nulls({"type": {"const": "tool"}, "name": TEXT}, _PARALLEL),
    with_nulls({"type": {"const": "none"}}),
)


def read_tools(value: Any, no_effect: list[str]) -> dict[int, Tool]:
    """Return the tools that the model may call, by place in `tools`. Raises InvalidRequest that names the tool."""
    if type(value) is not list:
        raise invalid("tools", "an array of tools", value)
    tools: dict[int, Tool] = {}
    names: set[str] = set()
    for index, item in enumerate(value):
        tool = _tool(f"tools[{index}]", item, no_effect)
        if tool is None:
            continue
        if tool.name in names:
            raise refused(f"tools[{index}].name", f"tools[{index}].name {shown(tool.name)} occurs twice.")
        names.add(tool.name)
        tools[index] = tool
    return tools


def read_tool_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Return which of the tools the model may or must call. Raises InvalidRequest."""
    if type(value) is not dict:
        raise invalid("tool_choice", 'an object like {"type": "auto"}', value)
    kind = value.get("type")
    if type(kind) is not str or kind not in _MODES:
        raise invalid("tool_choice.type", "auto, any, tool or none", kind)
    known = {"type"} | ({"name"} if kind == "tool" else set())
    if kind != "none":
        known.add("disable_parallel_tool_use")
    only_known("tool_choice", value, known)
    single = value.get("disable_parallel_tool_use")
    if type(single) not in (bool, type(None)):
        raise invalid("tool_choice.disable_parallel_tool_use", "true or false", single)
    if kind in ("any", "tool") and not tools:
        raise refused("tool_choice", f"tool_choice {kind!r} needs at least one tool that this server knows in tools.")
    name = value.get("name")
    if kind == "tool" and (type(name) is not str or all(name != tool.name for tool in tools)):
        raise invalid("tool_choice.name", "the name of one of the tools", name)
    return ToolChoice(_MODES[kind], name or "", parallel=not single)


def _tool(name: str, value: Any, no_effect: list[str]) -> Tool | None:
    if type(value) is not dict:
        raise invalid(name, "an object with name and input_schema", value)
    kind = value.get("type")
    if kind in (None, "custom"):
        return _custom_tool(name, value, no_effect)
    if type(kind) is not str:
        raise invalid(f"{name}.type", "a string", kind)
    client = client_tool(kind)
    if client is None:
        no_effect.append(f"tools.{re.sub('[^a-zA-Z0-9_.-]', '', kind)[:80]}")
        return None
    _check_keys(name, value, _CLIENT, no_effect)
    if value.get("name", client.name) != client.name:
        raise invalid(f"{name}.name", client.name, value["name"])
    return Tool(client.name, client.description, client.input_schema, value.get("strict") is True)


def _custom_tool(name: str, value: dict[str, Any], no_effect: list[str]) -> Tool:
    _check_keys(name, value, _CUSTOM, no_effect)
    title = value.get("name")
    if type(title) is not str or not _NAME.fullmatch(title):
        raise invalid(f"{name}.name", f"1 to {MAX_NAME_LENGTH} of the characters a-z, A-Z, 0-9, _ and -", title)
    description = value.get("description")
    if not isinstance(description, str | None):
        raise invalid(f"{name}.description", "a string", description)
    schema = value.get("input_schema")
    if type(schema) is not dict:
        raise invalid(f"{name}.input_schema", "an object", schema)
    if schema.get("type") != "object":
        raise invalid(f"{name}.input_schema.type", "object", schema.get("type"))
    text = "\n".join(part for part in (description, _examples(value.get("input_examples"))) if part)
    return Tool(title, text, schema, value.get("strict") is True)


def _check_keys(name: str, value: dict[str, Any], known: frozenset[str], no_effect: list[str]) -> None:
    only_known(name, value, known)
    for key in _FLAGS:
        if type(value.get(key)) not in (bool, type(None)):
            raise invalid(f"{name}.{key}", "true or false", value[key])
    if (marker := value.get("cache_control")) is not None:
        check_cache_control(f"{name}.cache_control", marker)
    callers = value.get("allowed_callers")
    if callers is not None and (type(callers) is not list or "direct" not in callers):
        raise invalid(f"{name}.allowed_callers", 'an array with "direct"', callers)
    examples = value.get("input_examples")
    if examples is not None and (type(examples) is not list or any(type(example) is not dict for example in examples)):
        raise invalid(f"{name}.input_examples", "an array of objects", examples)
    for key in ("defer_loading", "max_characters"):
        if value.get(key):
            no_effect.append(f"tools.{key}")


def _examples(examples: list[dict[str, Any]] | None) -> str:
    """Return the examples of a tool's input as a line of its description, where every chat template shows them."""
    return "Examples of the input: " + ", ".join(map(json.dumps, examples)) if examples else ""
