"""The parameter `response_format`: it becomes a grammar that the answer must follow."""

from __future__ import annotations

import re
from typing import Any

from quire.gateway.api.given_grammars import GivenGrammar, only, read_schema, read_structural_tag
from quire.gateway.errors.api_errors import invalid, of_check
from quire.shared.config.validators import Flag, InvalidValue, Text
from quire.shared.text import grammar

# The fields of each type.
FIELDS = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "json_schema"),
    "structural_tag": ("type", "format", "structures", "triggers"),
}


def response_format(name: str, value: Any) -> GivenGrammar | tuple[()]:
    """Return the grammar of a response format; empty if any text will do. Raises InvalidRequest."""
    if type(value) is not dict:
        raise invalid(name, "an object", value)
    kind = value.get("type")
    if type(kind) is not str or kind not in FIELDS:
        raise invalid(f"{name}.type", "text, json_object, json_schema or structural_tag", kind)
    only(name, value, FIELDS[kind])
    if kind == "json_schema":
        return read_json_schema(f"{name}.json_schema", value.get("json_schema"))
    if kind == "structural_tag":
        return read_structural_tag(name, value)
    return GivenGrammar(name, grammar.ANY_OBJECT) if kind == "json_object" else ()


def read_json_schema(name: str, value: Any) -> GivenGrammar:
    """Return the grammar of an object with name, schema, description and strict. Raises InvalidRequest."""
    if type(value) is not dict:
        raise invalid(name, "an object", value)
    only(name, value, ("name", "description", "schema", "strict"))
    try:
        title = Text()(f"{name}.name", value.get("name"))
        for key, check in (("description", Text()), ("strict", Flag())):
            if value.get(key) is not None:
                check(f"{name}.{key}", value[key])
    except InvalidValue as error:
        raise of_check(error) from None
    if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", title):
        raise invalid(f"{name}.name", "1 to 64 of the characters a-z, A-Z, 0-9, _ and -", title)
    return read_schema(f"{name}.schema", value.get("schema"))
