"""Facts about JSON schemas that hold for all values: types, constants, and whether two schemas exclude each other."""

from __future__ import annotations

from typing import Any

from quire.shared.text.schema.document import Document

SCALARS = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}
KINDS = frozenset({"array", "object", *SCALARS.values()})
# Bound of the search for branches that exclude each other.
_MAX_BRANCHES = 100


def are_disjoint(branches: list[Any], document: Document) -> bool:
    """Return whether types, constants and required properties prove that no value matches two of the branches."""
    if len(branches) > _MAX_BRANCHES:
        return False
    resolved = [document.resolve(branch) for branch in branches]
    return all(_exclude(schema, other, document) for index, schema in enumerate(resolved) for other in resolved[:index])


def _exclude(first: Any, second: Any, document: Document) -> bool:
    """Return whether no value matches both schemas. Look at required properties of objects, and no deeper."""
    if _differ(first, second):
        return True
    if kinds(first) != {"object"} or kinds(second) != {"object"}:
        return False
    fields, others = first.get("properties"), second.get("properties")
    if type(fields) is not dict or type(others) is not dict:
        return False
    required = [name for part in (first, second) if type(part.get("required")) is list for name in part["required"]]
    return any(
        type(name) is str
        and name in fields
        and name in others
        and _differ(document.resolve(fields[name]), document.resolve(others[name]))
        for name in required
    )


def _differ(first: Any, second: Any) -> bool:
    """Return whether two schemas have no type in common, or no constant."""
    if kinds(first).isdisjoint(kinds(second)):
        return True
    values, others = constants(first), constants(second)
    return values is not None and others is not None and values.isdisjoint(others)


def kinds(schema: Any) -> frozenset[str]:
    """Return the types that a schema may allow; an integer counts as a number."""
    if schema is False:
        return frozenset()
    if not isinstance(schema, dict):
        return KINDS
    named = schema.get("type")
    allowed = [named] if type(named) is str else named
    known = KINDS
    if type(allowed) is list and all(type(kind) is str for kind in allowed):
        known = frozenset("number" if kind == "integer" else kind for kind in allowed)
    values = constants(schema)
    return known if values is None else known & {kind for kind, _ in values}


def kind_of(value: Any) -> str:
    """Return the type of a value; an integer is a number."""
    return SCALARS.get(type(value), "array" if type(value) is list else "object")


def constants(schema: Any) -> frozenset[tuple[str, Any]] | None:
    """Return the values that `const` or `enum` allows, each with its type; None without them or with a non-scalar."""
    if not isinstance(schema, dict) or ("const" not in schema and "enum" not in schema):
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if type(values) is not list or not all(type(value) in SCALARS for value in values):
        return None
    return frozenset((SCALARS[type(value)], value) for value in values)
