"""Keywords for the names of properties: `propertyNames` becomes `patternProperties`, and those become `properties`."""

from __future__ import annotations

from typing import Any

from quire.shared.text.schema import patterns
from quire.shared.text.schema.document import ANNOTATIONS, Document
from quire.shared.text.schema.formats import FORMATS
from quire.shared.text.schema.words import words

_KNOWN = frozenset({"type", "format", "pattern", "minLength", "maxLength", "const", "enum"})


def write_out_names(schema: dict[str, Any], document: Document) -> None:
    """Replace `propertyNames`, in place. A keyword that cannot be replaced stays, and llguidance refuses it by name."""
    if "propertyNames" not in schema:
        return
    found = _written_out(document.resolve(schema["propertyNames"]))
    if found is None:
        return
    del schema["propertyNames"]
    named = [one | {"additionalProperties": False} for one in found]
    if named:
        schema["allOf"] = [*schema.get("allOf", []), *named]


def write_out_few_names(schema: dict[str, Any], document: Document) -> None:
    """Replace patterns that match few names by properties, in place.

    An object that has all names of a pattern must not begin another one, and llguidance forbids that for properties
    only.
    """
    patterned = schema.get("patternProperties")
    if type(patterned) is not dict or type(named := schema.get("properties", {})) is not dict:
        return
    few = {pattern: listed for pattern in patterned if (listed := words(pattern)) is not None}
    if not few:
        return
    schema["properties"] = named = dict(named)
    schema["patternProperties"] = {pattern: inner for pattern, inner in patterned.items() if pattern not in few}
    for pattern, names in few.items():
        for name in names:
            inner = document.copy(patterned[pattern])
            named[name] = {"allOf": [named[name], inner]} if name in named else inner


def _written_out(names: Any) -> list[dict[str, Any]] | None:
    """Return schemas whose properties are the only ones; None if the names are not known.

    Listed names become properties, because an object with all of them must not begin another one.
    """
    if type(names) is bool:
        return [] if names else [{}]
    if type(names) is not dict or not names.keys() <= _KNOWN | ANNOTATIONS:
        return None
    kinds = names.get("type", "string")
    if kinds != "string" and not (type(kinds) is list and "string" in kinds):
        return [{}]
    found: list[dict[str, Any]] = []
    if "const" in names or "enum" in names:
        values = [names["const"]] if "const" in names else names["enum"]
        if type(values) is not list or ("const" in names and "enum" in names):
            return None
        found.append({"properties": {value: True for value in values if type(value) is str}})
    if "pattern" in names:
        if type(names["pattern"]) is not str:
            return None
        found.append({"patternProperties": {names["pattern"]: True}})
    if "minLength" in names or "maxLength" in names:
        low, high = names.get("minLength", 0), names.get("maxLength")
        if type(low) is not int or low < 0 or not (high is None or (type(high) is int and high >= low)):
            return None
        found.append({"patternProperties": {patterns.length_between(low, high): True}})
    form = names.get("format")
    if form in FORMATS:
        if (pattern := FORMATS[form]) is None:
            return None
        found.append({"patternProperties": {pattern: True}})
    return found
