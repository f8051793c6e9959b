"""The complement of a JSON schema, as far as it can be written without `not`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from quire.shared.text.schema import patterns
from quire.shared.text.schema.document import Document
from quire.shared.text.schema.facts import KINDS, kind_of

# Depth of schemas and references, beyond which a complement is not searched.
_MAX_DEPTH = 12

Schema = dict[str, Any]


class Complement(NamedTuple):
    """Schemas, one of which matches each value found to be outside of a schema.

    is_whole: there are no other values outside of the schema. Otherwise some are missing.
    """

    branches: list[Schema]
    is_whole: bool


_NOTHING = Complement([], True)
_UNKNOWN = Complement([], False)


def complement(schema: Any, document: Document, depth: int = 0) -> Complement:
    """Return schemas for values that do not match a schema. Raise GrammarError if they become too large."""
    if schema is True:
        return _NOTHING
    if schema is False:
        return Complement([{}], True)
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return _UNKNOWN
    branches: list[Schema] = []
    is_whole = True
    for keyword, value in schema.items():
        if keyword in _COMPLEMENTS:
            try:
                outside = _COMPLEMENTS[keyword](value, schema, document, depth + 1)
            except (
                AttributeError,
                KeyError,
                TypeError,
                ValueError,
            ):  # a value of the wrong type, which llguidance reports
                outside = _UNKNOWN
            branches += outside.branches
            is_whole = is_whole and outside.is_whole
        elif keyword in _WITHOUT:
            is_whole = False
    return Complement([document.copy(branch) for branch in branches], is_whole)


def _type(value: Any, schema: Schema, document: Document, depth: int) -> Complement:
    named = {value} if type(value) is str else set(value)
    others = KINDS - named
    if "integer" in named:
        others = others - {"number"}
    return Complement([{"type": sorted(others)}] if others else [], "integer" not in named or "number" in named)


def _enum(value: Any, schema: Schema, document: Document, depth: int) -> Complement:
    named = {kind_of(constant) for constant in value}
    branches: list[Schema] = [{"type": sorted(KINDS - named)}] if KINDS - named else []
    is_whole = True
    if "boolean" in named and (others := [flag for flag in (True, False) if not any(flag is other for other in value)]):
        branches.append({"enum": others})
    if "number" in named:
        numbers = sorted(number for number in value if type(number) in (int, float))
        branches.append({"type": "number", "exclusiveMaximum": numbers[0]})
        branches += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
            for low, high in itertools.pairwise(numbers)
            if low < high
        ]
        branches.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    if "string" in named:
        pattern = patterns.none_of(text for text in value if type(text) is str)
        branches += [{"type": "string", "pattern": pattern}] if pattern else []
        is_whole = pattern is not None
    if "array" in named:
        branches.append({"type": "array", "minItems": 1 + max(len(array) for array in value if type(array) is list)})
        is_whole = False
    if "object" in named:
        objects = [constant for constant in value if type(constant) is dict]
        if len(objects) == 1:
            branches += [_absent(name) for name in objects[0]]
        branches += [{"type": "object", "minProperties": 1}] if objects == [{}] else []
        is_whole = False
    return Complement(branches, is_whole)


def _const(value: Any, schema: Schema, document: Document, depth: int) -> Complement:
    return _enum([value], schema, document, depth)


def _absent(name: str) -> Schema:
    """Return the schema of objects without a property."""
    return {"type": "object", "properties": {name: False}}


def _required(value: Any, schema: Schema, document: Document, depth: int) -> Complement:
    return Complement([_absent(name) for name in value], True)


def _properties(value: Any, schema: Schema, document: Document, depth: int) -> Complement:
    branches: list[Schema] = []
    is_whole = True
    for name, inner in value.items():
        outside = complement(inner, document, depth)
        is_whole = is_whole and outside.is_whole
        if outside.branches:
            branches.append({"type": "object", "properties": {name: _any_of(outside.branches)}, "required": [name]})
    return Complement(branches, is_whole)


def _items(value: Any, schema: Schema, document: Document, depth: int) -> Complement:
    outside = complement(value, document, depth)
    before = len(schema.get("prefixItems", []))
    # Only the first of the items is looked at.
    return Complement([_item(before, outside.branches)] if outside.branches else [], outside == _NOTHING)


def _prefix_items(value: Any, schema: Schema, document: Document, depth: int) -> Complement:
    complements = [complement(inner, document, depth) for inner in value]
    branches = [_item(place, outside.branches) for place, outside in enumerate(complements) if outside.branches]
    return Complement(branches, all(outside.is_whole for outside in complements))


def _item(place: int, branches: list[Schema]) -> Schema:
    """Return the schema of arrays with an item that matches one of the schemas at a place."""
    return {"type": "array", "prefixItems": [True] * place + [_any_of(branches)], "minItems": place + 1}


def _contains(value: Any, schema: Schema, document: Document, depth: int) -> Complement:
    if not schema.get("minContains", 1):
        return _UNKNOWN
    outside = complement(value, document, depth)
    branches: list[Schema] = [{"type": "array", "items": _any_of(outside.branches)}] if outside.branches else []
    if value is True:
        branches = [{"type": "array", "maxItems": 0}]
    return Complement(branches, False)


def _all_of(value: Any, schema: Schema, document: Document, depth: int) -> Complement:
    complements = [complement(inner, document, depth) for inner in value]
    branches = [branch for outside in complements for branch in outside.branches]
    return Complement(branches, all(outside.is_whole for outside in complements))


def _any_of_keyword(value: Any, schema: Schema, document: Document, depth: int) -> Complement:
    complements = [complement(inner, document, depth) for inner in value]
    is_whole = all(outside.is_whole for outside in complements)
    if any(not outside.branches for outside in complements):
        return Complement([], is_whole)
    return Complement([{"allOf": [_any_of(outside.branches) for outside in complements]}], is_whole)


def _one_of(value: Any, schema: Schema, document: Document, depth: int) -> Complement:
    # Values that match two of the branches are missing.
    return _any_of_keyword(value, schema, document, depth)._replace(is_whole=False)


def _not(value: Any, schema: Schema, document: Document, depth: int) -> Complement:
    return Complement([value if isinstance(value, dict) else {"allOf": [value]}], True)


def _if(value: Any, schema: Schema, document: Document, depth: int) -> Complement:
    outside = complement(value, document, depth)
    against_then = complement(schema.get("then", True), document, depth)
    against_else = complement(schema.get("else", True), document, depth)
    branches: list[Schema] = [{"allOf": [value, branch]} for branch in against_then.branches]
    branches += [{"allOf": [_any_of(outside.branches), branch]} for branch in against_else.branches if outside.branches]
    return Complement(branches, outside.is_whole and against_then.is_whole and against_else.is_whole)


def _dependent_required(value: Any, schema: Schema, document: Document, depth: int) -> Complement:
    branches = [
        {"type": "object", "required": [name], "properties": {other: False}}
        for name, others in value.items()
        for other in others
    ]
    return Complement(branches, True)


def _dependent_schemas(value: Any, schema: Schema, document: Document, depth: int) -> Complement:
    branches: list[Schema] = []
    is_whole = True
    for name, inner in value.items():
        outside = complement(inner, document, depth)
        branches += [{"type": "object", "required": [name], "allOf": [branch]} for branch in outside.branches]
        is_whole = is_whole and outside.is_whole
    return Complement(branches, is_whole)


def _ref(value: Any, schema: Schema, document: Document, depth: int) -> Complement:
    target = document.target(value)
    return _UNKNOWN if target is None else complement(target, document, depth)


def _limit(kind: str, opposite: str, step: int) -> Callable[[Any, Schema, Document, int], Complement]:
    """Return the complement of a keyword for a bound: beyond it, by `step`, the opposite keyword begins."""

    def beyond(value: Any, schema: Schema, document: Document, depth: int) -> Complement:
        if step and (int(value) != value or value + step < 0):
            return _NOTHING if value + step < 0 else _UNKNOWN
        return Complement([{"type": kind, opposite: int(value) + step if step else value}], True)

    return beyond


_COMPLEMENTS: dict[str, Callable[[Any, Schema, Document, int], Complement]] = {
    "$ref": _ref,
    "allOf": _all_of,
    "anyOf": _any_of_keyword,
    "const": _const,
    "contains": _contains,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "enum": _enum,
    "exclusiveMaximum": _limit("number", "minimum", 0),
    "exclusiveMinimum": _limit("number", "maximum", 0),
    "if": _if,
    "items": _items,
    "maxItems": _limit("array", "minItems", 1),
    "maxLength": _limit("string", "minLength", 1),
    "maxProperties": _limit("object", "minProperties", 1),
    "maximum": _limit("number", "exclusiveMinimum", 0),
    "minItems": _limit("array", "maxItems", -1),
    "minLength": _limit("string", "maxLength", -1),
    "minProperties": _limit("object", "maxProperties", -1),
    "minimum": _limit("number", "exclusiveMaximum", 0),
    "not": _not,
    "oneOf": _one_of,
    "prefixItems": _prefix_items,
    "properties": _properties,
    "required": _required,
    "type": _type,
}
# Keywords that exclude values, although their complements are not written.
_WITHOUT = frozenset(
    {
        "$dynamicRef",
        "additionalProperties",
        "dependencies",
        "format",
        "maxContains",
        "multipleOf",
        "pattern",
        "patternProperties",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)


def _any_of(branches: list[Schema]) -> Schema:
    return branches[0] if len(branches) == 1 else {"anyOf": branches}
