"""JSON schemas of the parameters that are grammars, for /openapi.json. `given_grammars.py` reads the parameters."""

from __future__ import annotations

from quire.gateway.api.schema_parts import ANY_OBJECT, FLAG, OBJECT_TEXT, TEXT, Schema, any_of, array, closed, or_null
from quire.shared.protocol.sampling_params import MAX_SCHEMA_LENGTH

_OBJECT_OR_TEXT = any_of(ANY_OBJECT, OBJECT_TEXT | {"maxLength": MAX_SCHEMA_LENGTH})
_GRAMMAR_TEXT: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_SCHEMA_LENGTH}

JSON = _OBJECT_OR_TEXT
REGEX = _GRAMMAR_TEXT
CHOICE = array(TEXT | {"minLength": 1}, low=1)
# EBNF has `::=`. Lark has not, and some of its directives are refused.
GRAMMAR: Schema = _GRAMMAR_TEXT | {"allOf": [any_of({"pattern": "::="}, {"not": {"pattern": "%json|%llguidance"}})]}
_STRUCTURAL_TAG = _OBJECT_OR_TEXT
_OUTPUTS: Schema = {
    "json": JSON,
    "regex": REGEX,
    "choice": CHOICE,
    "grammar": GRAMMAR,
    "json_object": FLAG,
    "structural_tag": _STRUCTURAL_TAG,
}
STRUCTURED_OUTPUTS: Schema = {
    "type": "object",
    "properties": {name: or_null(schema) for name, schema in _OUTPUTS.items()},
    "additionalProperties": {"type": "null"},
    # Exactly one of them is not null.
    "oneOf": [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in _OUTPUTS],
}
RESPONSE_FORMAT: Schema = any_of(
    closed({"type": {"enum": ["text", "json_object"]}}),
    closed(
        {
            "type": {"const": "json_schema"},
            "json_schema": closed(
                {"name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}, "schema": ANY_OBJECT},
                {"description": or_null(TEXT), "strict": or_null(FLAG)},
            ),
        }
    ),
    closed({"type": {"const": "structural_tag"}, "format": ANY_OBJECT}),
    closed(
        {
            "type": {"const": "structural_tag"},
            "structures": array(closed({"begin": TEXT, "schema": ANY_OBJECT, "end": TEXT})),
            "triggers": array(TEXT),
        }
    ),
)
