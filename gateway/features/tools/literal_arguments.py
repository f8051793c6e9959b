"""The grammar of arguments that are literals of some language, of one tool after the other: `LiteralArguments`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from quire.gateway.features.tools.argument_types import properties_of, required_of, resolved, types_of
from quire.gateway.features.tools.tool_grammar import StrictToolError, quoted
from quire.gateway.output.tools import Tool

_ANNOTATIONS = frozenset({"$comment", "default", "deprecated", "description", "examples", "title"})
_EXACT = frozenset({"type", "enum", "const", "items", "anyOf", "$ref", *_ANNOTATIONS})
# Bounds of the schemas of one tool that are followed: alternatives may refer to each other.
_MAX_DEPTH = 20
_MAX_SCHEMAS = 500
# The rules of every language: its own rules use these, and have the prefix `literal_`, too.
_RULES = (
    "LITERAL_INTEGER: /-?(0|[1-9][0-9]{0,17})/",
    r"LITERAL_NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?(e[-+]?[0-9]{1,2})?/",
)
Value = str | int | None


class Syntax(NamedTuple):
    """The literals of a language.

    assign: the text between the name of an argument and its value. comma: the text between arguments, and between the
    items of a list. types: the expression for the values of a JSON type. written: returns the expression for a value.
    any_name: the expression for the name of any argument. rules: those that the expressions use, `literal_value` among
    them. is_sorted: arguments come in the order of their names, instead of that of the schema.
    """

    assign: str
    comma: str
    types: Mapping[str, str]
    written: Callable[[Value], str]
    any_name: str
    rules: Sequence[str]
    is_sorted: bool = False


class LiteralArguments:
    """Makes the expressions for the arguments of tools. `rules`: the rules that they use."""

    def __init__(self, syntax: Syntax) -> None:
        self._syntax, self._comma = syntax, quoted(syntax.comma)
        self._count = 0
        self._schemas = 0  # of the current tool
        self.rules = [*_RULES, *syntax.rules]

    def of(self, tool: Tool) -> str:
        """Return the expression for the arguments of a tool, in the order of its schema, without the brackets.

        Raises StrictToolError if the tool is strict and literals cannot be made to follow its schema.
        """
        self._schemas = 0
        schema, properties = tool.parameters, properties_of(tool.parameters)
        if self._syntax.is_sorted:
            properties = dict(sorted(properties.items(), key=lambda item: item[0].lower()))
        is_plain = all(key.isidentifier() for key in properties)
        if not is_plain or not (properties or schema.get("additionalProperties") is False):
            if tool.strict:
                raise StrictToolError("strict tools name their arguments in `properties`")
            argument = f"{self._syntax.any_name} {quoted(self._syntax.assign)} literal_value"
            return f"({argument} ({self._comma} {argument})*)?"
        required = required_of(schema)
        # `first`: no argument before this one was written. `next`: one was, so that a comma comes first.
        first, following = '""', '""'
        for key, value in reversed(list(properties.items())):
            argument = f"{quoted(key + self._syntax.assign)} {self._value(value, schema, tool.strict)}"
            rule = self._rule(f"{argument} {following}")
            comma = self._rule(f"{self._comma} {rule}")
            if key in required:
                first, following = rule, comma
            else:
                first, following = self._rule(f"{rule} | {first}"), self._rule(f"{comma} | {following}")
        return first

    def _rule(self, expression: str) -> str:
        self._count += 1
        self.rules.append(f"literal_{self._count}: {expression}")
        return f"literal_{self._count}"

    def _value(self, schema: Any, root: Mapping[str, Any], is_strict: bool, depth: int = 0) -> str:
        self._schemas += 1
        if depth > _MAX_DEPTH or self._schemas > _MAX_SCHEMAS:
            if is_strict:
                raise StrictToolError("the arguments of a strict tool may not nest so deep")
            return "literal_value"
        definition, types = resolved(schema, root), types_of(schema, root)
        if is_strict and (not definition.keys() <= _EXACT or "object" in types):
            raise StrictToolError("strict tools have no objects and no bounds in their arguments")
        values = [definition["const"]] if "const" in definition else definition.get("enum")
        if isinstance(values, list) and values and all(isinstance(value, str | int | None) for value in values):
            return "(" + " | ".join(map(self._syntax.written, values)) + ")"
        if isinstance(branches := definition.get("anyOf"), list) and branches:
            return "(" + " | ".join(self._value(branch, root, is_strict, depth + 1) for branch in branches) + ")"
        alternatives = []
        for kind in sorted(types):
            if kind == "array" and "items" in definition:
                item = self._rule(self._value(definition["items"], root, is_strict, depth + 1))
                alternatives.append(f'("[" ({item} ({self._comma} {item})*)? "]")')
            else:
                alternatives.append(self._syntax.types.get(kind, "literal_value"))
        return "(" + " | ".join(alternatives) + ")" if alternatives else "literal_value"
