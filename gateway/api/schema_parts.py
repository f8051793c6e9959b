"""Parts of JSON schemas: of request bodies and of answers."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
NULL: Schema = {"type": "null"}
ANY_OBJECT: Schema = {"type": "object"}


def ref(name: str) -> Schema:
    """Return a reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def text(low: int, high: int) -> Schema:
    """Return the schema of a string of `low` to `high` characters."""
    return TEXT | ({"minLength": low} if low else {}) | {"maxLength": high}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def array(items: Schema, low: int = 0, high: int | None = None) -> Schema:
    """Return the schema of an array of `low` to `high` items."""
    bounds = ({"minItems": low} if low else {}) | ({} if high is None else {"maxItems": high})
    return {"type": "array", "items": items, **bounds}


def record(optional: Schema | None = None, **properties: Schema) -> Schema:
    """Return the schema of an object with these properties, and perhaps those in `optional`."""
    return {"type": "object", "properties": properties | (optional or {}), "required": list(properties)}


def closed(properties: Schema, optional: Schema | None = None) -> Schema:
    """Return the schema of an object with exactly these properties, and perhaps those in `optional`."""
    return record(optional, **properties) | {"additionalProperties": False}


def with_nulls(properties: Schema, optional: Schema | None = None) -> Schema:
    """Like `closed`, but a property whose value is null counts as absent: the optional ones, and any other."""
    nullable = {name: or_null(schema) for name, schema in (optional or {}).items()}
    return record(nullable, **properties) | {"additionalProperties": NULL}


# A string that is the JSON text of an object. The pattern: which strings are accepted before they are parsed.
OBJECT_TEXT: Schema = TEXT | {
    "pattern": r"^\s*\{[\s\S]*\}\s*$",
    "contentMediaType": "application/json",
    "contentSchema": ANY_OBJECT,
}
