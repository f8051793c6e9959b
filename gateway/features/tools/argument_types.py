"""The JSON types of the arguments of a tool, for formats in which the text of a value does not tell its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
# Bound of the references that are followed, one after the other.
_MAX_REFERENCES = 20
# The schema of a reference to nothing.
_NOTHING: Mapping[str, Any] = {}


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema, or the definition in `root` to which it refers; empty for any other value."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for name in reference[2:].split("/"):
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) and "$ref" not in schema else _NOTHING


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that the values of a schema may have; empty if the schema does not name any."""
    found: set[str] = set()
    waiting, seen = [schema], set()
    while waiting:
        one = resolved(waiting.pop(), root)
        if id(one) in seen:  # alternatives may refer to each other
            continue
        seen.add(id(one))
        named = one.get("type")
        values = [one["const"]] if "const" in one else one.get("enum")
        if isinstance(named, str):
            found.add(named)
        elif isinstance(named, list):
            found.update(name for name in named if isinstance(name, str))
        elif isinstance(values, list):
            found.update(_TYPES.get(type(value), "null") for value in values)
        else:
            for keyword in ("anyOf", "oneOf", "allOf"):
                branches = one.get(keyword)
                waiting += branches if isinstance(branches, list) else []
    return frozenset(found)


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the properties that a schema of arguments names."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def required_of(schema: Mapping[str, Any]) -> list[Any]:
    """Return the names of the arguments that a schema requires."""
    required = schema.get("required")
    return required if isinstance(required, list) else []
