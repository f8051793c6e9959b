"""Keywords for the names of properties: `propertyNames` becomes `patternProperties`, and those become `properties`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from quire.shared.text.schema import patterns
from quire.shared.text.schema.document import ANNOTATIONS, Document
from quire.shared.text.schema.formats import FORMATS
from quire.shared.text.schema.words import words

_KNOWN = frozenset({"type", "format", "pattern", "minLength", "maxLength", "const", "enum"})
# Keywords that list names.
_LISTS = ("properties", "required", "patternProperties")
# Any further names.
_OTHER_NAMES: dict[str, Any] = {"patternProperties": {"^": True}, "additionalProperties": False}
_CONTROL = re.compile("[\x00-\x1f\x7f]")


def write_out_names(schema: dict[str, Any], document: Document) -> None:
    """Replace `propertyNames`, in place. A keyword that cannot be replaced stays, and llguidance refuses it by name."""
    if "propertyNames" not in schema:
        return
    schemas = _written_out(document.resolve(schema["propertyNames"]))
    if schemas is None:
        return
    del schema["propertyNames"]
    named = [names | {"additionalProperties": False} for names in schemas]
    if named:
        schema["allOf"] = [*schema.get("allOf", []), *named]


def write_out_few_names(schema: dict[str, Any], document: Document) -> None:
    """Replace patterns that match few names by properties, in place.

    An object that has all names of a pattern must not begin another name, and llguidance forbids that for properties
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


def exclude_other_spellings(schemas: Sequence[dict[str, Any]]) -> bool:
    r"""Forbid names such as "\u0061" in objects that list "a", in place. Return False if this cannot be written.

    llguidance takes such a name for an additional property, so the listed property could be repeated with any value.
    The names of a pattern have one spelling only, except for control characters; but two patterns must not match the
    same name.
    """
    lists = [part for part in schemas if any(map(part.get, _LISTS)) and part.get("additionalProperties") is not False]
    if not lists:
        return True
    if any(schema.get("patternProperties") for schema in schemas) or not all(map(_has_plain_names, lists)):
        return False
    for schema in lists:
        # Before the names, because llguidance does not join keywords before and after `allOf` and its like.
        first = "properties" if "properties" in schema else "required"
        given = schema.copy()
        schema.clear()
        for keyword, inner in given.items():
            if keyword == first:
                schema |= _OTHER_NAMES
            if keyword not in _OTHER_NAMES:
                schema[keyword] = inner
    return True


def _has_plain_names(schema: dict[str, Any]) -> bool:
    """Return whether any further name may have any value, and no listed name has a control character."""
    others = schema.get("additionalProperties", True)
    lists = [listed for keyword in _LISTS if isinstance(listed := schema.get(keyword), dict | list)]
    is_plain = not any(type(name) is str and _CONTROL.search(name) for names in lists for name in names)
    return is_plain and (others is True or others == {})


def _written_out(names: Any) -> list[dict[str, Any]] | None:
    """Return schemas that list the only names of properties; None if the names are not known.

    Listed names become properties, because an object with all of them must not begin another property.
    """
    if type(names) is bool:
        return [] if names else [{}]
    if type(names) is not dict or not names.keys() <= _KNOWN | ANNOTATIONS:
        return None
    kinds = names.get("type", "string")
    if kinds != "string" and not (type(kinds) is list and "string" in kinds):
        return [{}]
    schemas: list[dict[str, Any]] = []
    if "const" in names or "enum" in names:
        values = [names["const"]] if "const" in names else names["enum"]
        if type(values) is not list or ("const" in names and "enum" in names):
            return None
        schemas.append({"properties": {value: True for value in values if type(value) is str}})
    if "pattern" in names:
        if type(names["pattern"]) is not str:
            return None
        schemas.append({"patternProperties": {names["pattern"]: True}})
    if "minLength" in names or "maxLength" in names:
        low, high = names.get("minLength", 0), names.get("maxLength")
        if type(low) is not int or low < 0 or not (high is None or (type(high) is int and high >= low)):
            return None
        schemas.append({"patternProperties": {patterns.length_between(low, high): True}})
    form = names.get("format")
    if form in FORMATS:
        if (pattern := FORMATS[form]) is None:
            return None
        schemas.append({"patternProperties": {pattern: True}})
    return schemas
