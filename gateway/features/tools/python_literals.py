"""Python literals as arguments: read as JSON, and the grammar of the arguments of a tool."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Generator, Mapping
from typing import Any

from quire.gateway.features.tools.argument_types import properties_of, required_of, resolved, types_of
from quire.gateway.features.tools.growing_text import GrowingText, MalformedCall
from quire.gateway.features.tools.tool_grammar import StrictToolError, quoted
from quire.gateway.output.tools import Tool

# Models mix the words of JSON and Python.
_JSON_WORDS = frozenset({"true", "false", "null"})
_IN_STRING = {quote: re.compile(rf"[^{quote}\\\n]*") for quote in "\"'"}
_OUTSIDE_STRING = re.compile(r"[^\"'()\[\]{},]+")
_ANNOTATIONS = frozenset({"$comment", "default", "deprecated", "description", "examples", "title"})
_EXACT = frozenset({"type", "enum", "const", "items", "anyOf", "$ref", *_ANNOTATIONS})
# Bounds of the schemas of one tool that are followed: alternatives may refer to each other.
_MAX_DEPTH = 20
_MAX_SCHEMAS = 500


def read_literal(source: GrowingText) -> Generator[None, None, str]:
    """Read a Python literal up to the comma or bracket after it; return it as JSON. Raises MalformedCall."""
    position, depth, quote = 0, 0, ""
    while True:
        text = source.unread
        while position < len(text):
            character = text[position]
            if quote:
                match = _IN_STRING[quote].match(text, position)
                assert match is not None
                position = match.end()
                if position == len(text) or text[position : position + 2] == "\\":
                    break
                if text[position] == "\n":
                    raise MalformedCall("a line ends inside a string")
                quote = "" if text[position] == quote else quote
                position += 1 if text[position] != "\\" else 2
            elif match := _OUTSIDE_STRING.match(text, position):
                position = match.end()
            elif character in ",)" and depth == 0:
                return _as_json(source.take(position))
            else:
                depth += (character in "([{") - (character in ")]}")
                if depth < 0:
                    raise MalformedCall("a bracket without its beginning")
                quote = character if character in "\"'" else ""
                position += 1
        yield from source.more()


def _as_json(text: str) -> str:
    """Return a Python literal as JSON. Raises MalformedCall for other text, and for a value that JSON lacks."""
    text = text.strip()
    if text in _JSON_WORDS:
        return text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes in strings
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise MalformedCall("no literal") from error


class PythonArguments:
    """Makes the expressions for the arguments of tools. `rules`: the rules that they use."""

    def __init__(self) -> None:
        self._count = 0
        self._schemas = 0  # of the current tool
        self.rules = [
            "python_value: python_string | PYTHON_NUMBER | PYTHON_WORD | python_list | python_dict",
            "python_string: DOUBLE_QUOTED | SINGLE_QUOTED",
            r'DOUBLE_QUOTED: /"([^"\\\x00-\x1f]|\\[\\"\'nrt]|\\u[0-9a-f]{4})*"/',
            r"SINGLE_QUOTED: /'([^'\\\x00-\x1f]|\\[\\\"'nrt]|\\u[0-9a-f]{4})*'/",
            r"PYTHON_INTEGER: /-?(0|[1-9][0-9]{0,17})/",
            r"PYTHON_NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?(e[-+]?[0-9]{1,2})?/",
            "PYTHON_WORD: /True|False|None/",
            'python_list: "[" (python_value (", " python_value)*)? "]"',
            'python_dict: "{" (python_string ": " python_value (", " python_string ": " python_value)*)? "}"',
        ]

    def of(self, tool: Tool) -> str:
        """Return the expression for the arguments of a tool, in the order of its schema, without the brackets.

        Raises StrictToolError if the tool is strict and literals cannot be made to follow its schema.
        """
        self._schemas = 0
        schema, properties = tool.parameters, properties_of(tool.parameters)
        is_plain = all(key.isidentifier() for key in properties)
        if not is_plain or not (properties or schema.get("additionalProperties") is False):
            if tool.strict:
                raise StrictToolError("strict tools name their arguments in `properties`")
            argument = "/[A-Za-z_][A-Za-z0-9_]*=/ python_value"
            return f'({argument} (", " {argument})*)?'
        required = required_of(schema)
        # `first`: no argument before this one was written. `next`: one was, so that a comma comes first.
        first, following = '""', '""'
        for key, value in reversed(list(properties.items())):
            argument = f"{quoted(key + '=')} {self._value(value, schema, tool.strict)}"
            rule = self._rule(f"{argument} {following}")
            comma = self._rule(f'", " {rule}')
            if key in required:
                first, following = rule, comma
            else:
                first, following = self._rule(f"{rule} | {first}"), self._rule(f"{comma} | {following}")
        return first

    def _rule(self, expression: str) -> str:
        self._count += 1
        self.rules.append(f"python_{self._count}: {expression}")
        return f"python_{self._count}"

    def _value(self, schema: Any, root: Mapping[str, Any], is_strict: bool, depth: int = 0) -> str:
        self._schemas += 1
        if depth > _MAX_DEPTH or self._schemas > _MAX_SCHEMAS:
            if is_strict:
                raise StrictToolError("the arguments of a strict tool may not nest so deep")
            return "python_value"
        found, types = resolved(schema, root), types_of(schema, root)
        if is_strict and (not found.keys() <= _EXACT or "object" in types):
            raise StrictToolError("strict tools have no objects and no bounds in their arguments")
        values = [found["const"]] if "const" in found else found.get("enum")
        if isinstance(values, list) and values and all(isinstance(value, str | int | None) for value in values):
            return "(" + " | ".join(quoted(_written(value)) for value in values) + ")"
        if isinstance(branches := found.get("anyOf"), list) and branches:
            return "(" + " | ".join(self._value(branch, root, is_strict, depth + 1) for branch in branches) + ")"
        options = []
        for kind in sorted(types):
            if kind == "array" and "items" in found:
                item = self._rule(self._value(found["items"], root, is_strict, depth + 1))
                options.append(f'("[" ({item} (", " {item})*)? "]")')
            else:
                options.append(_BY_TYPE.get(kind, "python_value"))
        return "(" + " | ".join(options) + ")" if options else "python_value"


_BY_TYPE = {
    "string": "python_string",
    "integer": "PYTHON_INTEGER",
    "number": "PYTHON_NUMBER",
    "boolean": '("True" | "False")',
    "null": '"None"',
    "array": "python_list",
    "object": "python_dict",
}


def _written(value: str | int | None) -> str:
    """Return the Python literal of a value as the models write it, with double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
