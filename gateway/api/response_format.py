"""The parameter `response_format`: it becomes the text of a JSON schema that the answer must follow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.gateway.api.errors import invalid, of_check, refused
from quire.shared.sampling_params import MAX_SCHEMA_LENGTH
from quire.shared.text import json_schema
from quire.shared.validators import Flag, InvalidValue, Text

KINDS = ("text", "json_object", "json_schema")


def response_format(name: str, value: Any) -> str:
    """The JSON schema, as text; empty if any text will do. Raises InvalidRequest."""
    if type(value) is not dict:
        raise invalid(name, "an object", value)
    kind = value.get("type")
    if kind not in KINDS:
        raise invalid(f"{name}.type", "text, json_object or json_schema", kind)
    only(name, value, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "json_schema":
        return _schema(f"{name}.json_schema", value.get("json_schema"))
    return json_schema.ANY_OBJECT if kind == "json_object" else ""


def _schema(name: str, value: Any) -> str:
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
    schema = value.get("schema")
    name = f"{name}.schema"
    if type(schema) is not dict:
        raise invalid(name, "an object", schema)
    try:
        written = json_schema.canonical(schema)
    except RecursionError:
        raise invalid(name, "an object that is not nested so deeply", schema) from None
    if len(written) > MAX_SCHEMA_LENGTH:
        raise refused(name, f"{name} has {len(written)} characters; at most {MAX_SCHEMA_LENGTH} are allowed.")
    return written


def only(name: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuse keys of an object that are not known. Raises InvalidRequest."""
    for key in value:
        if key not in known:
            raise refused(
                f"{name}.{key[:80]}",
                f"{name}.{key[:80]} is not supported; {name} has {', '.join(known)} only.",
                code="unsupported_parameter",
            )
