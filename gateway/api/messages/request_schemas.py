"""JSON schemas of the parameters of the Messages API that have readers of their own, for /openapi.json."""

from __future__ import annotations

from quire.gateway.api.messages.content import MAX_ID_LENGTH, MAX_MESSAGES, MAX_NAME_LENGTH
from quire.gateway.api.schema_parts import (
    ANY_OBJECT,
    FLAG,
    TEXT,
    Schema,
    any_of,
    array,
    closed,
    or_null,
    text,
    with_nulls,
)
from quire.shared.protocol.sampling_params import MAX_OUTPUT_TOKENS

EFFORTS = ("low", "medium", "high", "xhigh", "max")
CLEAR_THINKING = "clear_thinking_20251015"
MAX_USER_LENGTH = 512

CACHE_CONTROL = closed(
    {}, {"type": {"const": "ephemeral"}, "ttl": {"enum": ["5m", "1h", None]}, "scope": or_null(TEXT)}
)
# The server does not read `citations`.
_ANYTHING: Schema = {}


def _block(kind: str, required: Schema, optional: Schema | None = None) -> Schema:
    """Return the schema of a block of a content. Keys whose values are null count as absent."""
    return with_nulls({"type": {"const": kind}, **required}, {"cache_control": CACHE_CONTROL} | (optional or {}))


_ID, _NAME = text(1, MAX_ID_LENGTH), text(1, MAX_NAME_LENGTH)
TEXT_BLOCK = _block("text", {"text": TEXT}, {"citations": _ANYTHING})
_TEXTS = any_of(TEXT, array(TEXT_BLOCK))
_RESULT = any_of(TEXT, array(any_of(TEXT_BLOCK, _block("tool_reference", {"tool_name": _NAME}))))
_OF_USER = any_of(TEXT_BLOCK, _block("tool_result", {"tool_use_id": _ID}, {"content": _RESULT, "is_error": FLAG}))
_OF_ASSISTANT = any_of(
    TEXT_BLOCK,
    _block("thinking", {"thinking": TEXT}, {"signature": TEXT}),
    _block("redacted_thinking", {}, {"data": _ANYTHING}),
    _block(
        "tool_use", {"id": _ID, "name": _NAME, "input": ANY_OBJECT}, {"caller": closed({"type": {"const": "direct"}})}
    ),
)
SYSTEM = _TEXTS
MESSAGES = array(
    any_of(
        with_nulls({"role": {"const": "user"}, "content": any_of(TEXT, array(_OF_USER))}),
        with_nulls({"role": {"const": "assistant"}, "content": any_of(TEXT, array(_OF_ASSISTANT))}),
        with_nulls({"role": {"const": "system"}, "content": _TEXTS}),
    ),
    low=1,
    high=MAX_MESSAGES,
)
_OF_EVERY_TOOL: Schema = {
    "cache_control": CACHE_CONTROL,
    "strict": FLAG,
    "defer_loading": FLAG,
    "allowed_callers": {"type": "array", "contains": {"const": "direct"}},
    "input_examples": array(ANY_OBJECT),
}
TOOLS = array(
    any_of(
        with_nulls(
            {
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,128}$"},
                "input_schema": {"type": "object", "properties": {"type": {"const": "object"}}, "required": ["type"]},
            },
            _OF_EVERY_TOOL | {"type": {"const": "custom"}, "description": TEXT, "eager_input_streaming": FLAG},
        ),
        # Tools of Anthropic, which the server knows by their types, or skips.
        {"type": "object", "properties": {"type": TEXT | {"not": {"const": "custom"}}}, "required": ["type"]},
    )
)
_PARALLEL: Schema = {"disable_parallel_tool_use": FLAG}
TOOL_CHOICE = any_of(
    with_nulls({"type": {"enum": ["auto", "any"]}}, _PARALLEL),
    with_nulls({"type": {"const": "tool"}, "name": TEXT}, _PARALLEL),
    with_nulls({"type": {"const": "none"}}),
)
_DISPLAY: Schema = {"display": {"enum": ["summarized", "omitted"]}}


def _budget(low: int) -> Schema:
    return {"budget_tokens": {"type": "integer", "minimum": low, "maximum": MAX_OUTPUT_TOKENS}}


THINKING = any_of(
    with_nulls({"type": {"const": "enabled"}}, _budget(1) | _DISPLAY),
    with_nulls({"type": {"const": "adaptive"}}, _budget(0) | _DISPLAY),
    with_nulls({"type": {"const": "disabled"}}),
)
OUTPUT_FORMAT = with_nulls({"type": {"const": "json_schema"}, "schema": ANY_OBJECT})
OUTPUT_CONFIG = with_nulls({}, {"effort": {"enum": list(EFFORTS)}, "format": OUTPUT_FORMAT})
METADATA = with_nulls({}, {"user_id": text(0, MAX_USER_LENGTH)})
_TURNS: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_MESSAGES}
_KEEP = any_of(
    {"const": "all"},
    closed({"type": {"const": "all"}}),
    closed({"type": {"const": "thinking_turns"}, "value": _TURNS}),
)
CONTEXT_MANAGEMENT = with_nulls({}, {"edits": array(with_nulls({"type": {"const": CLEAR_THINKING}}, {"keep": _KEEP}))})
