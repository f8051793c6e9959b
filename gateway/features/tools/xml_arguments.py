"""The grammar of arguments in XML, of one tool after the other: `XmlArguments`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.gateway.features.tools.argument_types import properties_of, required_of, resolved, types_of
from quire.gateway.features.tools.tool_grammar import StrictToolError, lark_json, quoted
from quire.gateway.output.tools import Tool

PARAMETER_START, PARAMETER_END = "<parameter=", "</parameter>"

_ANNOTATIONS = frozenset({"$comment", "default", "deprecated", "description", "examples", "format", "title"})
# The keywords of a schema of arguments whose meaning is in the sequence of its properties.
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"})


class XmlArguments:
    """Makes the expressions for the arguments of tools. `rules`: the rules that they use."""

    def __init__(self) -> None:
        self.rules = [
            # Lazy: a string ends at the first end tag.
            "raw_text[lazy]: RAW_TEXT",
            "RAW_TEXT: /(?s:.*)<\\/parameter>/",
            f'any_argument: "{PARAMETER_START}" /[^>\\n]+/ ">\\n" raw_text "\\n"',
        ]

    def of(self, tool: Tool) -> str:
        """Return the expression for the arguments of a tool, in the order of its schema.

        Raises StrictToolError if the tool is strict and XML cannot be made to follow its schema.
        """
        schema = tool.parameters
        properties = properties_of(schema)
        is_plain = schema.keys() <= _OBJECT | _ANNOTATIONS and not any(">" in key or "\n" in key for key in properties)
        closed = properties or schema.get("additionalProperties") is False
        if not is_plain or not closed:
            if tool.strict:
                raise StrictToolError("strict tools name their arguments in `properties`")
            return "any_argument*"
        required = required_of(schema)
        arguments = []
        for key, value in properties.items():
            begin = quoted(f"{PARAMETER_START}{key}>\n")
            argument = f'{begin} {self._value(key, value, schema, tool.strict)} "\\n"'
            arguments.append(argument if key in required else f"({argument})?")
        return " ".join(arguments)

    def _value(self, key: str, schema: Any, root: Mapping[str, Any], is_strict: bool) -> str:
        """Return the expression for a value and its end tag."""
        types, definition = types_of(schema, root), resolved(schema, root)
        end = quoted("\n" + PARAMETER_END)
        values = [definition["const"]] if "const" in definition else definition.get("enum")
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            return "(" + " | ".join(quoted(value) for value in values) + f") {end}"
        if types and "string" not in types:
            definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
            return f"{lark_json({**definition, **definitions})} {end}"
        if is_strict and not (types == {"string"} and definition.keys() <= {"type"} | _ANNOTATIONS - {"format"}):
            raise StrictToolError(f"the argument {key!r} of a strict tool has type string only")
        return "raw_text"
