"""JSON schemas of the answers. `tests/gateway/test_api_fuzz.py` compares answers with these schemas.

Their parts may be checks (`schema_parts`). `server/app.py` adds the schemas of the Messages API, of the Responses API
and of batches.
"""

from __future__ import annotations

from quire.gateway.errors.api_errors import ERROR_TYPES
from quire.gateway.stream.call_metadata import TIERS
from quire.gateway.stream.transcript import TOOL_CALLS
from quire.gateway.stream.writer import MARK
from quire.shared.config.schema_parts import (
    COUNT,
    FLAG,
    NULL,
    NUMBER,
    TEXT,
    Schema,
    any_of,
    array,
    closed,
    or_null,
    record,
    ref,
)
from quire.shared.config.validators import OneOf
from quire.shared.protocol.states import COMPLETE

LABELS: Schema = {
    "service_tier": OneOf(TIERS),
    "metadata": {"type": "object", "additionalProperties": TEXT},
    **MARK,
}
FINISH_REASON = OneOf(COMPLETE)
CHAT_FINISH_REASON = OneOf((*FINISH_REASON.choices, TOOL_CALLS))
STOP_REASON = any_of(TEXT, COUNT, NULL)
SCORE: Schema = {"score": NUMBER | {"description": "what the choices are ranked by, if they are"}}
TOKEN_IDS: Schema = {"token_ids": array(COUNT)}
_TOKEN = {"token": TEXT, "logprob": NUMBER, "bytes": or_null(array(COUNT))}
# The first token of an echoed prompt has no log-probability.
_COMPLETION_LOGPROBS = record(
    tokens=array(TEXT),
    token_logprobs=array(or_null(NUMBER)),
    top_logprobs=array(or_null({"type": "object", "additionalProperties": NUMBER})),
    text_offset=array(COUNT),
)
# By token id: of the token itself, and of the most probable ones in its place.
_PROMPT_TOKEN: Schema = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": record(logprob=NUMBER, rank=COUNT, decoded_token=TEXT),
}
PROMPT: Schema = {"prompt_logprobs": array(or_null(_PROMPT_TOKEN)), "prompt_token_ids": array(COUNT)}
_USAGE: Schema = {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT}
_DETAILS = ("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
_COMPLETION_DETAILS: Schema = {"completion_tokens_details": record(dict.fromkeys(_DETAILS, COUNT))}
_CALL: Schema = {"id": TEXT, "type": {"const": "function"}}
_TOOL_CALL = record(**_CALL, function=record(name=TEXT, arguments=TEXT))
# The first delta of a call has its id and name, the others have parts of its arguments.
_TOOL_CALL_DELTA = record(_CALL, index=COUNT, function=record({"name": TEXT}, arguments=TEXT))
_DELTA = closed(
    {},
    {
        "role": {"const": "assistant"},
        "content": TEXT,
        "reasoning_content": TEXT,
        "tool_calls": array(_TOOL_CALL_DELTA, low=1),
    },
)
_STREAM_LABELS = LABELS | {"usage": or_null(ref("UsageSoFar"))}


def _call(kind: str, choices: Schema, optional: Schema, **more: Schema) -> Schema:
    return record(
        optional,
        id=TEXT,
        object={"const": kind},
        created=COUNT,
        model=TEXT,
        system_fingerprint=TEXT,
        choices=array(choices),
        **more,
    )


SCHEMAS: Schema = {
    "Error": closed(
        {
            "error": closed(
                {
                    "message": TEXT,
                    "type": OneOf(tuple(ERROR_TYPES)),
                    "param": or_null(TEXT),
                    "code": or_null(TEXT),
                }
            )
        }
    ),
    "Usage": record(_COMPLETION_DETAILS, **_USAGE, prompt_tokens_details=record(cached_tokens=COUNT)),
    "UsageSoFar": record({"prompt_tokens_details": record(cached_tokens=COUNT)} | _COMPLETION_DETAILS, **_USAGE),
    "ChatLogprobs": record(
        content=or_null(array(record(**_TOKEN, top_logprobs=array(record(**_TOKEN))))), refusal=NULL
    ),
    "ChatMessage": record(
        {"reasoning_content": TEXT, "tool_calls": array(_TOOL_CALL, low=1)},
        role={"const": "assistant"},
        content=or_null(TEXT),
        refusal=NULL,
        annotations={"type": "array", "maxItems": 0},
    ),
    "ChatCompletion": _call(
        "chat.completion",
        record(
            SCORE | TOKEN_IDS,
            index=COUNT,
            message=ref("ChatMessage"),
            logprobs=or_null(ref("ChatLogprobs")),
            finish_reason=CHAT_FINISH_REASON,
            stop_reason=STOP_REASON,
        ),
        LABELS | PROMPT,
        usage=ref("Usage"),
    ),
    "ChatCompletionChunk": _call(
        "chat.completion.chunk",
        record(
            TOKEN_IDS | {"stop_reason": STOP_REASON},
            index=COUNT,
            delta=_DELTA,
            logprobs=or_null(ref("ChatLogprobs")),
            finish_reason=or_null(CHAT_FINISH_REASON),
        ),
        _STREAM_LABELS | {"prompt_token_ids": array(COUNT)},
    ),
    "Completion": _call(
        "text_completion",
        record(
            SCORE | TOKEN_IDS | PROMPT,
            index=COUNT,
            text=TEXT,
            logprobs=or_null(_COMPLETION_LOGPROBS),
            finish_reason=FINISH_REASON,
            stop_reason=STOP_REASON,
        ),
        LABELS,
        usage=ref("Usage"),
    ),
    "CompletionChunk": _call(
        "text_completion",
        record(
            TOKEN_IDS | {"stop_reason": STOP_REASON, "prompt_token_ids": array(COUNT)},
            index=COUNT,
            text=TEXT,
            logprobs=or_null(_COMPLETION_LOGPROBS),
            finish_reason=or_null(FINISH_REASON),
        ),
        _STREAM_LABELS,
    ),
    "Cancellation": record(id=TEXT, cancelled=FLAG),
    "Parking": record(id=TEXT, parked=FLAG, ended=FLAG, expires_at=or_null(COUNT)),
    "UsageList": record(
        object={"const": "list"},
        data=array(
            record(
                date=TEXT,
                key=TEXT,
                model=TEXT,
                requests=COUNT,
                prompt_tokens=COUNT,
                completion_tokens=COUNT,
                cost=NUMBER,
            )
        ),
    ),
    "Model": record(
        id=TEXT,
        object={"const": "model"},
        created=COUNT,
        owned_by=TEXT,
        root=TEXT,
        parent=NULL,
        max_model_len=COUNT,
        max_num_seqs=COUNT,
        vocab_size=COUNT,
        max_n=COUNT,
        max_prompts=COUNT,
        max_choices=COUNT,
        max_images=or_null(COUNT),
        max_image_bytes=or_null(COUNT),
        max_image_pixels=or_null(COUNT),
        capabilities=array(TEXT),
        tool_call_format=or_null(TEXT),
        reasoning_format=or_null(TEXT),
        sampling_defaults={"type": "object", "additionalProperties": NUMBER},
        permission=array({"type": "object"}),
    ),
    "ModelList": record(object={"const": "list"}, data=array(ref("Model"))),
    "Tokens": record(count=COUNT, max_model_len=COUNT, tokens=array(COUNT), token_strs=or_null(array(TEXT))),
    "Detokenized": record(prompt=TEXT),
    "TokenizerInfo": {
        "type": "object",
        "properties": {"tokenizer_class": TEXT, "chat_template": TEXT},
        "required": ["tokenizer_class"],
    },
    "Version": record(version=TEXT),
    "Liveness": record(status={"const": "ok"}),
    "Readiness": record(ready=FLAG, workers=COUNT, problems=array(TEXT)),
    "Status": record(redis=FLAG, workers=COUNT, responding=COUNT, silent_s=or_null(NUMBER)),
    "EngineWorkers": record(model=TEXT, models=array(TEXT), workers=array({"type": "object"})),
    "EmbeddingList": record(
        object={"const": "list"},
        data=array(
            record(
                object={"const": "embedding"},
                index=COUNT,
                embedding=any_of(TEXT, array(NUMBER)),
            )
        ),
        model=TEXT,
        usage=record(prompt_tokens=COUNT, total_tokens=COUNT),
    ),
}
