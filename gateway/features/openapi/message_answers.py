"""JSON schemas of the answers and events of the Messages API."""

from __future__ import annotations

from quire.gateway.api.schema_parts import ANY_OBJECT, COUNT, NULL, TEXT, Schema, any_of, array, closed, or_null, ref

ERROR_TYPES = (
    "invalid_request_error",
    "authentication_error",
    "billing_error",
    "permission_error",
    "not_found_error",
    "conflict_error",
    "request_too_large",
    "rate_limit_error",
    "overloaded_error",
    "timeout_error",
    "api_error",
)
STOP_REASONS = ("end_turn", "stop_sequence", "tool_use", "max_tokens", "model_context_window_exceeded")


def _typed(kind: str, /, **properties: Schema) -> Schema:
    """Return the schema of an object with this `type` and these properties."""
    return closed({"type": {"const": kind}, **properties})


def _end(reason: Schema) -> Schema:
    """Return the schemas of the properties that say why an answer ended."""
    return {"stop_reason": reason, "stop_sequence": or_null(TEXT), "stop_details": NULL, "container": NULL}


def _message(content: Schema, reason: Schema) -> Schema:
    about = {"id": TEXT, "role": {"const": "assistant"}, "model": TEXT}
    return _typed("message", **about, content=content, **_end(reason), usage=ref("MessageUsage"))


_USAGE: Schema = {
    "input_tokens": COUNT,
    "cache_creation_input_tokens": COUNT,
    "cache_read_input_tokens": COUNT,
    "output_tokens": COUNT,
    "output_tokens_details": NULL,
    "server_tool_use": NULL,
}
_CREATED = closed({"ephemeral_5m_input_tokens": COUNT, "ephemeral_1h_input_tokens": COUNT})
_STOP_REASON: Schema = {"enum": list(STOP_REASONS)}
_DELTAS = any_of(
    _typed("text_delta", text=TEXT),
    _typed("thinking_delta", thinking=TEXT),
    _typed("signature_delta", signature=TEXT),
    _typed("input_json_delta", partial_json=TEXT),
)

SCHEMAS: Schema = {
    "Message": _message(array(ref("MessageBlock")), _STOP_REASON),
    "MessageBlock": any_of(
        _typed("text", text=TEXT, citations=array(TEXT) | {"maxItems": 0}),
        _typed("thinking", thinking=TEXT, signature=TEXT),
        _typed("tool_use", id=TEXT, name=TEXT, input=ANY_OBJECT, caller=_typed("direct")),
    ),
    "MessageUsage": closed(
        {
            **_USAGE,
            "cache_creation": _CREATED,
            "service_tier": {"enum": ["priority", "standard", "batch"]},
            "inference_geo": NULL,
        }
    ),
    "MessageEvent": any_of(
        _typed("message_start", message=_message(array(ref("MessageBlock"), high=0), NULL)),
        _typed("ping"),
        _typed("content_block_start", index=COUNT, content_block=ref("MessageBlock")),
        _typed("content_block_delta", index=COUNT, delta=_DELTAS),
        _typed("content_block_stop", index=COUNT),
        _typed("message_delta", delta=closed(_end(_STOP_REASON)), usage=closed(_USAGE)),
        _typed("message_stop"),
        ref("MessageError"),
    ),
    "MessageCount": closed({"input_tokens": COUNT}),
    "MessageError": _typed(
        "error",
        error=closed(
            {
                "type": {"enum": list(ERROR_TYPES)},
                "message": TEXT,
                "details": closed({}, {"error_code": TEXT, "param": TEXT}),
            }
        ),
        request_id=TEXT,
    ),
}
