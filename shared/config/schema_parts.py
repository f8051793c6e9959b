"""Parts of JSON schemas: of request bodies and of answers.

A part may be a check of `quire.shared.config.validators` or a compiled pattern, so that a bound is written once, where
it is checked. The gateway replaces checks and patterns by their schemas when it writes /openapi.json.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def or_null(part: Any) -> Schema:
    return {"anyOf": [part, NULL]}


def any_of(*parts: Any) -> Schema:
    return {"anyOf": list(parts)}


def array(items: Any, low: int = 0, high: int | None = None) -> Schema:
    """Return the schema of an array of `low` to `high` items."""
    bounds = ({"minItems": low} if low else {}) | ({} if high is None else {"maxItems": high})
    return {"type": "array", "items": items, **bounds}


def request_parameter(place: str, name: str, schema: Any, what: str) -> Schema:
    """Return a parameter of requests for /openapi.json. place: `path`, `query` or `header`."""
    required = {"required": True} if place == "path" else {}
    return {"name": name, "in": place, "schema": schema, "description": what, **required}


def id_parameter(prefix: str) -> Schema:
    """Return the parameter of paths with an id of 32 hexadecimal digits behind `prefix`."""
    return request_parameter(
        "path", "id", TEXT | {"pattern": f"^{prefix}[0-9a-f]{{32}}$"}, "the id, as answers have it"
    )


def map_of(most: int, key: Any, value: Any) -> Schema:
    """Return the schema of an object with at most `most` names."""
    return {"type": "object", "maxProperties": most, "propertyNames": key, "additionalProperties": value}


def record(optional: Schema | None = None, **properties: Any) -> Schema:
    """Return the schema of an object with these properties, and perhaps those in `optional`."""
    return {"type": "object", "properties": properties | (optional or {}), "required": list(properties)}


def closed(properties: Schema, optional: Schema | None = None) -> Schema:
    """Return the schema of an object with exactly these properties, and perhaps those in `optional`."""
    return record(optional, **properties) | {"additionalProperties": False}


def options(checks: Mapping[str, Any]) -> Schema:
    """Return the schema of an object that may have these properties, also as null, and no others."""
    return closed({}, {name: or_null(check) for name, check in checks.items()})


def with_nulls(properties: Schema, optional: Mapping[str, Any] | None = None) -> Schema:
    """Like `closed`, but a property whose value is null counts as absent: the optional ones, and any other."""
    nullable = {name: or_null(schema) for name, schema in (optional or {}).items()}
    return record(nullable, **properties) | {"additionalProperties": NULL}
