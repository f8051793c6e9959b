"""The tools of a response: functions are kept, tools of all other types are skipped with a warning.

Coding agents always send tools that their usual server runs, such as `web_search`. To refuse these would refuse the
agent. The functions of a namespace reach the model under flat names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.gateway.api.tools import CHOICES, DESCRIPTION, TOOL_NAME, read_function, tool_name
from quire.gateway.errors.api_errors import invalid, only, refused
from quire.gateway.output.tools import Tool, ToolChoice, ToolMode
from quire.shared.config.schema_parts import TEXT, any_of, array, closed, or_null, record
from quire.shared.config.validators import OneOf, shown

# Keys of a function for features of other servers.
_NO_EFFECT = ("allowed_callers", "async", "defer_loading", "output_schema")
_FUNCTION = ("name", "description", "parameters", "strict")
# Tools of all types in one call, also within namespaces; `--max-tools` bounds the functions.
MAX_GIVEN_TOOLS = 1024
NAMESPACE = "namespace"
# Of `tools` and `tool_choice`; their readers check each tool.
TOOLS_SCHEMA = array(record(type=TEXT), high=MAX_GIVEN_TOOLS)
TOOL_CHOICE_SCHEMA = any_of(
    OneOf(CHOICES),
    closed({"type": {"const": "function"}, "name": TOOL_NAME}, {"namespace": or_null(TOOL_NAME)}),
    closed({"type": {"const": "allowed_tools"}, "mode": OneOf(CHOICES[:2]), "tools": TOOLS_SCHEMA}),
)


class FunctionName(NamedTuple):
    """The name of a function for the client. namespace: empty for none."""

    namespace: str
    name: str

    @property
    def flat(self) -> str:
        """The name for the model, which knows no namespaces: two functions of one call never share it."""
        return f"{self.namespace}__{self.name}" if self.namespace else self.name


class GivenFunction(NamedTuple):
    """A function of a call. tool: with the flat name. place: in the call. echo: in the form of the answer."""

    name: FunctionName
    tool: Tool
    place: str
    echo: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GivenTools:
    """The tools of a call.

    functions: those that the model may call. namespaces: descriptions by name. skipped: the name of each parameter
    without an effect, with the reason.
    """

    functions: tuple[GivenFunction, ...] = ()
    namespaces: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(function.tool for function in self.functions)

    def echo(self) -> list[dict[str, Any]]:
        """Return the functions in the form of the answer."""
        inner: dict[str, list[dict[str, Any]]] = {"": [], **{namespace: [] for namespace in self.namespaces}}
        for function in self.functions:
            inner[function.name.namespace].append(function.echo)
        return inner[""] + [
            {"type": NAMESPACE, "name": namespace, "description": description, "tools": inner[namespace]}
            for namespace, description in self.namespaces.items()
        ]

    @classmethod
    def merged(cls, places: Iterable[GivenTools]) -> GivenTools:
        """Return the tools of several places of a call. A later function replaces one of the same name and namespace.

        Raises InvalidRequest.
        """
        functions: dict[FunctionName, GivenFunction] = {}
        namespaces: dict[str, str] = {}
        skipped: list[tuple[str, str]] = []
        for tools in places:
            for function in tools.functions:
                functions.pop(function.name, None)
                functions[function.name] = function
            namespaces.update(tools.namespaces)
            skipped += tools.skipped
        _check_names(found := tuple(functions.values()))
        return cls(found, namespaces, tuple(skipped))


def read_response_tools(name: str, value: Any) -> GivenTools:
    """Return the parameter `tools`. Raises InvalidRequest or InvalidValue, with the index of the tool."""
    functions: list[GivenFunction] = []
    namespaces: dict[str, str] = {}
    skipped: list[tuple[str, str]] = []
    count = 0
    for at, tool in _objects(name, value):
        count += 1
        if tool["type"] != NAMESPACE:
            functions += _function(at, tool, "", skipped)
            continue
        only(at, tool, ("type", "name", "description", "tools"))
        namespace = tool_name(f"{at}.name", tool.get("name"))
        if namespace in namespaces:
            raise refused(
                f"{at}.name", f"{at}.name is {namespace!r}, which is the name of another namespace; join them."
            )
        description = tool.get("description")
        if description is not None:
            DESCRIPTION(f"{at}.description", description)
        namespaces[namespace] = description or ""
        for inner, member in _objects(f"{at}.tools", tool.get("tools")):
            count += 1
            functions += _function(inner, member, namespace, skipped)
    if count > MAX_GIVEN_TOOLS:
        raise refused(name, f"{name} must have at most {MAX_GIVEN_TOOLS} tools, not {count}.")
    _check_names(functions)
    return GivenTools(tuple(_described(functions, namespaces)), namespaces, tuple(skipped))


def function_names(echo: str) -> dict[str, FunctionName]:
    """Return the functions within namespaces by the name that the model knows. echo: JSON that a response repeats."""
    if '"namespace"' not in echo:
        return {}
    spaces = [tool for tool in json.loads(echo)["tools"] if tool["type"] == NAMESPACE]
    names = [FunctionName(space["name"], function["name"]) for space in spaces for function in space["tools"]]
    return {name.flat: name for name in names}


def _objects(name: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tools of an array, each with its place."""
    if type(value) is not list:
        raise invalid(name, "an array of tools", value)
    for index, tool in enumerate(value):
        if type(tool) is not dict or type(tool.get("type")) is not str:
            raise invalid(f"{name}[{index}]", 'an object like {"type": "function", "name": ...}', tool)
        yield f"{name}[{index}]", tool


def _function(
    at: str, tool: Mapping[str, Any], namespace: str, skipped: list[tuple[str, str]]
) -> Iterator[GivenFunction]:
    """Yield the function that a tool is, or skip the tool."""
    if tool["type"] != "function":
        skipped.append((at, f"this server runs no tool of the type {shown(tool['type'])}; the model may not use it"))
        return
    only(at, tool, ("type", *_FUNCTION, *_NO_EFFECT))
    skipped += [
        (f"{at}.{key}", "it has no effect on this server") for key in _NO_EFFECT if tool.get(key) not in (None, False)
    ]
    function = read_function(at, {key: tool[key] for key in _FUNCTION if key in tool})
    name = FunctionName(namespace, function.name)
    echo = {"type": "function", **{key: tool.get(key) for key in _FUNCTION}}
    yield GivenFunction(name, function._replace(name=name.flat), at, echo)


def _check_names(functions: Sequence[GivenFunction]) -> None:
    """Check that the model can tell the functions apart. Raises InvalidRequest that names the second one."""
    seen: set[str] = set()
    for function in functions:
        if function.tool.name in seen:
            own = f"{function.name.name!r}, with its namespace " if function.name.namespace else ""
            raise refused(
                f"{function.place}.name",
                f"{function.place}.name is {own}{function.tool.name!r}, which is the name of another tool; "
                "give each tool a name of its own.",
            )
        seen.add(function.tool.name)


def _described(functions: Sequence[GivenFunction], namespaces: Mapping[str, str]) -> Iterator[GivenFunction]:
    """Yield the functions; the description of a namespace begins that of its first function."""
    left = dict(namespaces)
    for function in functions:
        about = left.pop(function.name.namespace, "")
        texts = "\n\n".join(filter(None, (about, function.tool.description)))
        yield function._replace(tool=function.tool._replace(description=texts))


@dataclass(frozen=True, slots=True)
class GivenChoice:
    """The parameter `tool_choice`. allowed: the functions that may be called; one without a name stands for all of its
    namespace. None for all functions."""

    choice: ToolChoice
    echo: Any
    allowed: tuple[FunctionName, ...] | None = None

    def allows(self, name: FunctionName) -> bool:
        """Return True if the model may call a function."""
        return self.allowed is None or name in self.allowed or name._replace(name="") in self.allowed


def read_response_tool_choice(name: str, value: Any) -> GivenChoice:
    """Read `auto`, `required`, `none`, a function, or a set of allowed functions. Raises InvalidRequest."""
    forms = 'auto, required, none, {"type": "function", "name": ...} or {"type": "allowed_tools", ...}'
    if value in CHOICES:
        return GivenChoice(ToolChoice(ToolMode(value)), value)
    if type(value) is not dict:
        raise invalid(name, forms, value)
    if value.get("type") == "function":
        only(name, value, ("type", "name", "namespace"))
        function = _named(name, value)
        return GivenChoice(ToolChoice(ToolMode.NAMED, function.flat), _echo(function))
    if value.get("type") != "allowed_tools":
        raise refused(
            f"{name}.type", f"{name} must be {forms}: this server runs no tools.", code="unsupported_parameter"
        )
    only(name, value, ("type", "mode", "tools"))
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in CHOICES[:2]:
        raise invalid(f"{name}.mode", "auto or required", mode)
    if type(tools) is not list or len(tools) > MAX_GIVEN_TOOLS:
        raise invalid(f"{name}.tools", f"an array of at most {MAX_GIVEN_TOOLS} tools", tools)
    allowed = []
    for at, tool in _objects(f"{name}.tools", tools):
        if tool["type"] == "function":
            allowed.append(_named(at, tool))
        elif tool["type"] == NAMESPACE:
            allowed.append(FunctionName(tool_name(f"{at}.name", tool.get("name")), ""))
    echo = {"type": "allowed_tools", "mode": mode, "tools": [_echo(function) for function in allowed]}
    return GivenChoice(ToolChoice(ToolMode(mode)), echo, tuple(allowed))


def _named(at: str, value: Mapping[str, Any]) -> FunctionName:
    namespace = value.get("namespace")
    return FunctionName(
        tool_name(f"{at}.namespace", namespace) if namespace is not None else "",
        tool_name(f"{at}.name", value.get("name")),
    )


def _echo(function: FunctionName) -> dict[str, str]:
    if not function.name:
        return {"type": NAMESPACE, "name": function.namespace}
    named = {"type": "function", "name": function.name}
    return named | ({"namespace": function.namespace} if function.namespace else {})
