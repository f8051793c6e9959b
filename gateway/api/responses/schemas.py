"""JSON schemas of the Responses API for /openapi.json: of parameters, answers and events."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_FLAG: Schema = {"type": "boolean"}
_NUMBER: Schema = {"type": "number"}
_OBJECT: Schema = {"type": "object"}


def _record(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


# Parameters.
INPUT: Schema = {"anyOf": [_TEXT, {"type": "array", "maxItems": 10_000, "items": _OBJECT}]}
TOOLS: Schema = {"type": "array", "maxItems": 1024, "items": _record(("type",), type=_TEXT)}
TOOL_CHOICE: Schema = {
    "anyOf": [
        _one_of("auto", "required", "none"),
        _record(("type", "name"), type={"const": "function"}, name=_TEXT, namespace=_TEXT),
        _record(
            ("type", "mode", "tools"), type={"const": "allowed_tools"}, mode=_one_of("auto", "required"), tools=TOOLS
        ),
    ]
}
TEXT_OPTIONS = _record(
    format=_or_null(_record(("type",), type=_one_of("text", "json_object", "json_schema"))),
    verbosity=_or_null(_one_of("low", "medium", "high")),
)
REASONING = _record(
    effort=_or_null(_one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")),
    summary=_or_null(_one_of("auto", "concise", "detailed")),
)
INCLUDE = _array(_TEXT)
STREAM_OPTIONS = _record(include_obfuscation={"enum": [False, None]})
MAX_TOOL_CALLS: Schema = _COUNT | {"maximum": 2**31 - 1}

# Answers.
_ITEM = _record(("id", "type"), id=_TEXT, type=_TEXT)
_OUTPUT_ITEM = _record(
    ("id", "type", "status"),
    id=_TEXT,
    type=_one_of("message", "reasoning", "function_call"),
    status=_one_of("in_progress", "completed", "incomplete"),
)
_USAGE = _record(
    ("input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"),
    input_tokens=_COUNT,
    input_tokens_details=_OBJECT,
    output_tokens=_COUNT,
    output_tokens_details=_OBJECT,
    total_tokens=_COUNT,
)
_FIELDS: dict[str, Schema] = {
    "id": _TEXT,
    "object": {"const": "response"},
    "created_at": _COUNT,
    "completed_at": {"type": "null"},
    "model": _TEXT,
    "status": _one_of("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
    "error": _or_null(_record(("code", "message"), code=_TEXT, message=_TEXT)),
    "incomplete_details": _or_null(_record(("reason",), reason=_TEXT)),
    "output": _array(_OUTPUT_ITEM),
    "usage": _or_null(_USAGE),
    "background": _FLAG,
    "frequency_penalty": _NUMBER,
    "instructions": _or_null(_TEXT),
    "max_output_tokens": _or_null(_COUNT),
    "max_tool_calls": _or_null(_COUNT),
    "metadata": {"type": "object", "additionalProperties": _TEXT},
    "parallel_tool_calls": _FLAG,
    "presence_penalty": _NUMBER,
    "previous_response_id": _or_null(_TEXT),
    "prompt_cache_key": _or_null(_TEXT),
    "reasoning": _OBJECT,
    "safety_identifier": _or_null(_TEXT),
    "service_tier": _TEXT,
    "store": _FLAG,
    "temperature": _NUMBER,
    "text": _OBJECT,
    "tool_choice": {"anyOf": [_TEXT, _OBJECT]},
    "tools": _array(_OBJECT),
    "top_logprobs": _COUNT,
    "top_p": _NUMBER,
    "truncation": _one_of("auto", "disabled"),
    "user": _or_null(_TEXT),
}
_RESPONSE: Schema = _record(
    tuple(_FIELDS),
    **_FIELDS,
    warnings=_array(_record(("param", "message"), param=_TEXT, message=_TEXT)),
)
ANSWERS: dict[str, Schema] = {
    "Response": _RESPONSE,
    "ResponseEvent": _record(
        ("type", "sequence_number"),
        type=_TEXT,
        sequence_number=_COUNT,
        response={"$ref": "#/components/schemas/Response"},
        item=_OUTPUT_ITEM,
        item_id=_TEXT,
        output_index=_COUNT,
        content_index=_COUNT,
        delta=_TEXT,
    ),
    "ResponseTokens": _record(
        ("object", "input_tokens"), object={"const": "response.input_tokens"}, input_tokens=_COUNT
    ),
    "ResponseDeletion": _record(
        ("id", "object", "deleted"), id=_TEXT, object={"const": "response"}, deleted={"const": True}
    ),
    "ResponseItems": _record(
        ("object", "data", "first_id", "last_id", "has_more"),
        object={"const": "list"},
        data=_array(_ITEM),
        first_id=_or_null(_TEXT),
        last_id=_or_null(_TEXT),
        has_more=_FLAG,
    ),
}
