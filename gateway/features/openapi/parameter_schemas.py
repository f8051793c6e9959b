"""JSON schemas of request bodies, from the declarations of their parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import singledispatch
from typing import Any

from quire.gateway.api.labels import JsonObject, Metadata
from quire.gateway.api.parameters import UNSUPPORTED
from quire.gateway.api.prompt_parameters import TruncatedLength
from quire.gateway.api.schema_parts import Schema, or_null
from quire.gateway.stream.call_metadata import MAX_METADATA_KEY, MAX_METADATA_PAIRS, MAX_METADATA_VALUE
from quire.shared.config.validators import Flag, Integer, Number, OneOf, Text, Texts, TokenIds
from quire.shared.protocol.sampling_params import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_OUTPUT_TOKENS,
    Converted,
    EarlyStopping,
    LogitBias,
    OneOrMoreTexts,
    Parameter,
    Words,
)


@singledispatch
def schema_of(check: object) -> Schema:
    """Return the JSON schema of the values that a check accepts; {} for a check of an unknown class."""
    return {}


@schema_of.register
def _(check: Integer) -> Schema:
    return {"type": "integer", "minimum": check.low, "maximum": check.high}


@schema_of.register
def _(check: Number) -> Schema:
    return {"type": "number", "minimum": check.low, "maximum": check.high}


@schema_of.register
def _(check: Flag) -> Schema:
    return {"type": "boolean"}


@schema_of.register
def _(check: OneOf) -> Schema:
    return {"type": "string", "enum": list(check.choices)}


@schema_of.register
def _(check: Text) -> Schema:
    return {"type": "string"} if check.high is None else _bounded("string", "Length", check.low, check.high)


@schema_of.register
def _(check: Texts) -> Schema:
    return {"type": "array", "maxItems": check.most, "items": _bounded("string", "Length", check.low, check.high)}


@schema_of.register
def _(check: Words) -> Schema:
    schema = schema_of(check.texts)
    return schema | {"items": schema["items"] | {"pattern": r"\S"}}


@schema_of.register
def _(check: OneOrMoreTexts) -> Schema:
    texts = schema_of(check.texts)
    return {"anyOf": [texts["items"], texts]}


@schema_of.register
def _(check: TokenIds) -> Schema:
    high = {} if check.high is None else {"maximum": check.high}
    return {"type": "array", "maxItems": check.most, "items": {"type": "integer", "minimum": 0, **high}}


@schema_of.register
def _(check: Converted) -> Schema:
    return schema_of(check.check)


@schema_of.register
def _(check: EarlyStopping) -> Schema:
    return {"enum": [True, False, "never"]}


@schema_of.register
def _(check: LogitBias) -> Schema:
    return {
        "type": "object",
        "maxProperties": MAX_BIASES,
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    }


@schema_of.register
def _(check: Metadata) -> Schema:
    return {
        "type": "object",
        "maxProperties": MAX_METADATA_PAIRS,
        "propertyNames": {"minLength": 1, "maxLength": MAX_METADATA_KEY},
        "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
    }


@schema_of.register
def _(check: TruncatedLength) -> Schema:
    return {"type": "integer", "minimum": -1, "maximum": MAX_OUTPUT_TOKENS, "not": {"const": 0}}


@schema_of.register
def _(check: JsonObject) -> Schema:
    return {"type": "object"}


def _bounded(kind: str, what: str, low: int, high: int) -> Schema:
    return {"type": kind, **({f"min{what}": low} if low else {}), f"max{what}": high}


def parameter_schema(parameter: Parameter) -> Schema:
    """Return the JSON schema of one parameter: its values, its default and its meaning. Null counts as absent."""
    schema: Schema = dict(parameter.schema) if parameter.schema is not None else schema_of(parameter.read)
    if not parameter.required:
        schema = _nullable(schema)
    schema["description"] = _plain(parameter.help)
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
