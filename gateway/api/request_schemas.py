"""JSON schemas of the parameters that have readers of their own, for /openapi.json."""

from __future__ import annotations

from quire.gateway.api.chat_messages import MAX_CALL_ID_LENGTH, MAX_MESSAGES, MAX_NAME_LENGTH, MAX_TOOL_CALLS
from quire.gateway.api.schema_parts import (
    ANY_OBJECT,
    FLAG,
    OBJECT_TEXT,
    TEXT,
    Schema,
    any_of,
    array,
    closed,
    or_null,
    text,
    with_nulls,
)
from quire.gateway.api.tools import MAX_DESCRIPTION_LENGTH
from quire.shared.protocol.keys import PRIORITY_CLASSES
from quire.shared.protocol.sampling_params import MAX_SCHEMA_LENGTH

# Variables of a chat template that the server sets.
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "chat_template")
MAX_TEMPLATE_VARIABLES = 32

FUNCTION_NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"}
_CALL_ID = text(1, MAX_CALL_ID_LENGTH)
_TOOL_CALLS = array(
    closed(
        {"id": _CALL_ID, "function": closed({"name": FUNCTION_NAME, "arguments": TEXT})},
        {"type": {"const": "function"}, "index": {"type": "integer"}},
    ),
    high=MAX_TOOL_CALLS,
)
_CONTENT = any_of(TEXT, array(with_nulls({"type": {"const": "text"}, "text": TEXT}), low=1))
# Keys of answers, which clients send back with the conversation.
_EMPTY: Schema = {name: {"enum": [None, []]} for name in ("refusal", "audio", "annotations", "function_call")}
_TEXT_LATER: Schema = TEXT | {"minLength": 1}


def _message(role: Schema, required: Schema, optional: Schema) -> Schema:
    """A message. Keys whose values are null count as absent."""
    message = with_nulls({"role": role, **required}, {"name": text(1, MAX_NAME_LENGTH)} | optional)
    message["properties"] = _EMPTY | {"tool_calls": {"enum": [None, []]}} | message["properties"]
    return message


_OF_ASSISTANT: Schema = {"content": _CONTENT, "tool_calls": _TOOL_CALLS, "reasoning_content": TEXT, "reasoning": TEXT}


def _assistant(name: str, schema: Schema) -> Schema:
    """A message of the assistant that has at least this property."""
    return _message({"const": "assistant"}, {name: schema}, {k: v for k, v in _OF_ASSISTANT.items() if k != name})


MESSAGES = array(
    any_of(
        _message({"enum": ["system", "developer", "user"]}, {"content": _CONTENT}, {}),
        _message({"const": "tool"}, {"content": _CONTENT, "tool_call_id": _CALL_ID}, {}),
        _assistant("content", _CONTENT),
        _assistant("tool_calls", _TOOL_CALLS | {"minItems": 1}),
        _assistant("reasoning_content", _TEXT_LATER),
        _assistant("reasoning", _TEXT_LATER),
    ),
    low=1,
    high=MAX_MESSAGES,
)
TOOLS = array(
    closed(
        {
            "type": {"const": "function"},
            "function": closed(
                {"name": FUNCTION_NAME},
                {
                    "description": or_null(text(0, MAX_DESCRIPTION_LENGTH)),
                    "parameters": or_null(ANY_OBJECT | {"properties": {"type": {"const": "object"}}}),
                    "strict": or_null(FLAG),
                },
            ),
        }
    )
)
TOOL_CHOICE = any_of(
    {"enum": ["auto", "required", "none"]},
    closed({"type": {"const": "function"}, "function": closed({"name": FUNCTION_NAME})}),
)
TEMPLATE_KWARGS: Schema = {
    "type": "object",
    "maxProperties": MAX_TEMPLATE_VARIABLES,
    "propertyNames": {"pattern": r"^[^\W\d_]\w*$", "not": {"enum": list(RESERVED_VARIABLES)}},
}
_TOKEN_IDS = array({"type": "integer", "minimum": 0}, low=1)
_ONE_PROMPT = [TEXT | {"minLength": 1}, _TOKEN_IDS]
PROMPT = any_of(*_ONE_PROMPT, array(any_of(*_ONE_PROMPT), low=1))
_STATISTICS = "continuous_usage_stats"
STREAM_OPTIONS: Schema = closed(
    {}, {"include_usage": or_null(FLAG), _STATISTICS: or_null(FLAG), "include_obfuscation": {"enum": [False, None]}}
) | {
    "if": {"properties": {_STATISTICS: {"const": True}}, "required": [_STATISTICS]},
    "then": {"properties": {"include_usage": {"const": True}}, "required": ["include_usage"]},
}
PRIORITY = any_of({"enum": list(PRIORITY_CLASSES)}, {"type": "integer", "minimum": -(2**63) + 1, "maximum": 2**63 - 1})
TIMEOUT: Schema = {"type": "number", "exclusiveMinimum": 0}

# Grammars. `given_grammars.py` reads them.
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
