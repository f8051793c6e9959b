"""Finds the place in a JSON schema that answers cannot follow, for the error that a client reads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple

from quire.shared.text.grammar import write
from quire.shared.text.grammar_error import GrammarError

# Raises GrammarError if answers cannot follow a grammar.
Try = Callable[[str], Awaitable[None]]

# Schemas that are tried for one error: each trial is a process.
MAX_TRIALS = 24
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")


class SchemaFault(NamedTuple):
    """path: from the schema to the part that cannot be followed, such as `.properties.x`; empty for the whole."""

    path: str
    reason: str


async def find_fault(schema: Mapping[str, Any], attempt: Try) -> SchemaFault | None:
    """Return the smallest part of a schema that cannot be followed, and why; None if the schema can be followed."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found: SchemaFault | None = None
    trials = 0
    parts: Iterator[tuple[str, Mapping[str, Any]]] = iter([("", schema)])
    while trials < MAX_TRIALS:
        path, part = next(parts, ("", None))
        if part is None:
            break
        trials += 1
        if reason := await _reason({**shared, **part}, attempt):
            found = SchemaFault(path, reason)
            parts = _parts(path, part)
    return found


async def _reason(schema: Mapping[str, Any], attempt: Try) -> str:
    """Why a schema cannot be followed; empty if it can be."""
    try:
        await attempt(write("json_schema", schema))
    except GrammarError as error:
        return str(error)
    return ""


def _parts(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas directly inside a schema, with their paths."""
    for key in (*_NAMED, *_LISTED, *_SINGLE):
        value = schema.get(key)
        inner: list[tuple[str, Any]] = [(f"{path}.{key}", value)]
        if key in _NAMED and isinstance(value, dict):
            inner = [(f"{path}.{key}.{name[:80]}", one) for name, one in value.items()]
        elif key in _LISTED and isinstance(value, list):
            inner = [(f"{path}.{key}[{index}]", one) for index, one in enumerate(value)]
        yield from ((place, one) for place, one in inner if isinstance(one, dict))
