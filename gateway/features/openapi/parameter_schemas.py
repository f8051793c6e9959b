"""JSON schemas of request bodies, from the declarations of their parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.gateway.api.parameters import UNSUPPORTED
from quire.shared.config.schema_parts import FLAG, TEXT, Schema, array, map_of, or_null
from quire.shared.config.validators import Flag, Integer, Number, OneOf, Text, Texts, TokenIds
from quire.shared.protocol.sampling_params import (
    MAX_BIAS,
    MAX_BIASES,
    TOKEN_ID_KEY,
    Converted,
    EarlyStopping,
    LogitBias,
    OneOrMoreTexts,
    Parameter,
    Words,
)


def schema_of(part: Any) -> Any:
    """Return the JSON schema of the values that a check or a pattern accepts; {} for a check that tells none.

    A check of the gateway tells its schema in the attribute `schema`. In a schema, checks and patterns are replaced by
    their schemas.
    """
    match part:
        case dict():
            return {name: schema_of(inner) for name, inner in part.items()}
        case list():
            return [schema_of(inner) for inner in part]
        case re.Pattern():
            return TEXT | {"pattern": f"^{part.pattern}$"}
        case Flag():
            return FLAG
        case Integer(low, high):
            return {"type": "integer", "minimum": low, "maximum": high}
        case Number(low, high):
            return {"type": "number", "minimum": low, "maximum": high}
        case OneOf(choices):
            return TEXT | {"enum": list(choices)}
        case Text(low, high):
            return TEXT | ({"minLength": low} if low else {}) | ({} if high is None else {"maxLength": high})
        case Texts(most, low, high):
            return array(schema_of(Text(low, high)), high=most)
        case Words(Texts(most, low, high)):
            return array(schema_of(Text(low, high)) | {"pattern": r"\S"}, high=most)
        case OneOrMoreTexts(texts):
            return {"anyOf": [schema_of(texts)["items"], schema_of(texts)]}
        case TokenIds(most, high):
            return array({"type": "integer", "minimum": 0} | ({} if high is None else {"maximum": high}), high=most)
        case Converted(check):
            return schema_of(check)
        case EarlyStopping():
            return {"enum": [True, False, "never"]}
        case LogitBias():
            return schema_of(map_of(MAX_BIASES, TOKEN_ID_KEY, Number(-MAX_BIAS, MAX_BIAS)))
    return schema_of(getattr(part, "schema", {})) if callable(part) else part


def parameter_schema(parameter: Parameter) -> Schema:
    """Return the JSON schema of one parameter: its values, its default and its meaning. Null counts as absent."""
    schema: Schema = schema_of(parameter.read if parameter.schema is None else parameter.schema)
    if not parameter.required:
        schema = _nullable(schema)
    schema = schema | {"description": _plain(parameter.help)}
    if (default := parameter.documented_default).startswith("`"):
        schema["default"] = json.loads(default.strip("`"))
    return schema


def body_schema(
    table: Mapping[str, Parameter], model: str, unsupported: Mapping[str, tuple[Any, ...]] = UNSUPPORTED
) -> Schema:
    """Return the JSON schema of the body of a call with these parameters.

    model: the name that is served. unsupported: parameters that are not honoured, each with the values that ask for
    nothing.
    """
    properties = {name: parameter_schema(parameter) for name, parameter in table.items()}
    if "model" in table:
        properties["model"] = properties["model"] | {"enum": [model] if table["model"].required else [model, None]}
    for name, neutral in unsupported.items():
        if name not in table:
            what = "Not supported: only values that ask for nothing are accepted."
            properties[name] = {"enum": [*neutral, None], "description": what}
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name, parameter in table.items() if parameter.required],
        "additionalProperties": False,
        "dependentSchemas": {name: _required_with(name, table) for name in table if table[name].requires},
    }


def _required_with(name: str, table: Mapping[str, Parameter]) -> Schema:
    """Return the schema of bodies with a parameter that requires another one, unless its value asks for nothing.

    A required flag must be true.
    """
    parameter = table[name]
    given = {"const": True} if isinstance(table[parameter.requires].read, Flag) else {"not": {"type": "null"}}
    return {
        "if": {"properties": {name: {"enum": [*parameter.neutral, None]}}},
        "else": {"properties": {parameter.requires: given}, "required": [parameter.requires]},
    }


def _nullable(schema: Schema) -> Schema:
    """Return a schema that accepts null, too; in the shortest form, because people read it."""
    if "enum" in schema:
        kind = {"type": [schema["type"], "null"]} if "type" in schema else {}
        return schema | kind | {"enum": [*schema["enum"], None]}
    if isinstance(schema.get("type"), str) and "oneOf" not in schema:
        return schema | {"type": [schema["type"], "null"]}
    return or_null(schema)


def _plain(text: str) -> str:
    """Return the text of the documentation without its links, which lead to other places of docs/api/."""
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text).replace("\\|", "|")
