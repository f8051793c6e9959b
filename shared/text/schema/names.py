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


def exclude_other_spellings(schemas: Sequence[dict[str, Any]]) -> bool:
    r"""Forbid names such as "\u0061" in objects that list "a", in place. Returns False if this cannot be written.

    llguidance takes such a name for an additional one, so the listed one could be repeated with any value. The names of
    a pattern have one spelling only, except for control characters; but two patterns must not match the same name.
    """
    lists = [one for one in schemas if any(map(one.get, _LISTS)) and one.get("additionalProperties") is not False]
    if not lists:
        return True
    if any(one.get("patternProperties") for one in schemas) or not all(map(_has_plain_names, lists)):
        return False
    for one in lists:
        # Before the names, because llguidance does not join keywords before and after `allOf` and its like.
        first = "properties" if "properties" in one else "required"
        given = one.copy()
        one.clear()
        for keyword, inner in given.items():
            if keyword == first:
                one |= _OTHER_NAMES
            if keyword not in _OTHER_NAMES:
                one[keyword] = inner
    return True


def _has_plain_names(schema: dict[str, Any]) -> bool:
    """True if any further name may have any value, and no listed name has a control character."""
    others = schema.get("additionalProperties", True)
    lists = [found for keyword in _LISTS if isinstance(found := schema.get(keyword), dict | list)]
    is_plain = not any(type(name) is str and _CONTROL.search(name) for names in lists for name in names)
    return is_plain and (others is True or others == {})


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
