"""The Response object: the answer of the API, and the payload of the events at both ends of a stream."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

from quire.gateway.api.responses.output_items import WARM_UP, ItemStatus, ItemType, OutputItems
from quire.gateway.errors.api_errors import ApiError, Cancelled
from quire.gateway.model.served_model import ServedModel
from quire.gateway.stream import sse
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.writer import INEXACT, MARK
from quire.shared.config.schema_parts import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    NULL,
    NUMBER,
    TEXT,
    Schema,
    any_of,
    array,
    or_null,
    record,
    ref,
)
from quire.shared.config.validators import OneOf
from quire.shared.protocol.states import OutcomeName

PREFIX = "resp_"


# Why an answer is incomplete, by its finish reason.
_CUT_BY: dict[str, str] = {OutcomeName.LENGTH: "max_output_tokens", OutcomeName.REPETITION: "repetition"}


class ResponseStatus(StrEnum):
    """The status of a response."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    # The answer reached its largest number of tokens, or a stop string inside of a function call.
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ResponseBody:
    """Writes one response as JSON, in any status."""

    def __init__(self, call_id: str, model: ServedModel, metadata: CallMetadata) -> None:
        self._head = (
            f'{{"id":{sse.quote(PREFIX + call_id)},"object":"response","created_at":{metadata.created},'
            f'"completed_at":null,"model":{sse.quote(metadata.model_name(model.name))},'
        )
        # The fields that repeat the call; the answer is written around them without parsing them.
        self._tail = split_echo(metadata.echo)[0][1:]
        self._mark = ""

    def mark(self) -> None:
        """Write INEXACT into the response from now on."""
        self._mark = f"{sse.dumps(INEXACT)[1:-1]},"

    def running(self, status: ResponseStatus, output: OutputItems | None = None) -> str:
        """Return a response that has not ended."""
        return self._write(status, output)

    def ended(self, output: OutputItems, usage: dict[str, Any]) -> str:
        """Return a complete or incomplete response."""
        if output.is_warm_up:  # the one token that was computed is not in the answer
            none = {"completion_tokens": 0, "completion_tokens_details": {}, "total_tokens": usage["prompt_tokens"]}
            usage = {**usage, **none}
        return self._write(end_status(output), output, usage=sse.dumps(usage_of(usage)))

    def failed(self, output: OutputItems, error: ApiError) -> str:
        """Return a response that failed or was cancelled."""
        if isinstance(error, Cancelled):
            return self._write(ResponseStatus.CANCELLED, output)
        fault = sse.dumps({"code": "server_error", "message": error.message})
        return self._write(ResponseStatus.FAILED, output, error=fault)

    def _write(
        self, status: ResponseStatus, output: OutputItems | None, error: str = "null", usage: str = "null"
    ) -> str:
        details = "null"
        if status == ResponseStatus.INCOMPLETE and output is not None:
            # A function call may end too early for another reason.
            details = f'{{"reason":"{_CUT_BY.get(output.finish_reason, "stop")}"}}'
        items = output.json() if output is not None else "[]"
        return (
            f'{self._head}"status":"{status}","error":{error},"incomplete_details":{details},"output":{items},'
            f'"usage":{usage},{self._mark}{self._tail}'
        )


def end_status(output: OutputItems) -> ResponseStatus:
    """Return the status of a response whose answer has ended."""
    return ResponseStatus.INCOMPLETE if output.is_cut else ResponseStatus.COMPLETED


def joined_echo(fields: str, compaction: str) -> str:
    """Return what the metadata of a response has: JSON of the fields that repeat the call, and on another line the
    `compaction` of `OutputItems`, if there is one."""
    return f"{fields}\n{compaction}" if compaction else fields


def warm_up_echo(fields: str) -> str:
    """Return what the metadata of a response has that only computes its prompt."""
    return joined_echo(fields, WARM_UP)


def split_echo(echo: str) -> tuple[str, str]:
    """Return the two texts of `joined_echo`."""
    fields, _, compaction = echo.partition("\n")
    return fields, compaction


def fields_of(metadata: CallMetadata) -> dict[str, Any]:
    """Return the fields of a response that repeat its call."""
    fields: dict[str, Any] = json.loads(split_echo(metadata.echo)[0])
    return fields


def is_stored(metadata: CallMetadata) -> bool:
    """Return True if the response may be read after its own call."""
    return bool(fields_of(metadata)["store"])


def usage_of(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the token counts under the names of this API."""
    prompt, completion = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": prompt.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": completion.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }


_OUTPUT_ITEM = record({"status": OneOf(tuple(ItemStatus))}, id=TEXT, type=OneOf(tuple(ItemType)))
_USAGE = record(
    input_tokens=COUNT,
    input_tokens_details=ANY_OBJECT,
    output_tokens=COUNT,
    output_tokens_details=ANY_OBJECT,
    total_tokens=COUNT,
)
# The answers and events of the API, by their names in /openapi.json.
ANSWERS: dict[str, Schema] = {
    "Response": record(
        {"warnings": array(record(param=TEXT, message=TEXT)), **MARK},
        id=TEXT,
        object={"const": "response"},
        created_at=COUNT,
        completed_at=NULL,
        model=TEXT,
        status=OneOf(tuple(ResponseStatus)),
        error=or_null(record(code=TEXT, message=TEXT)),
        incomplete_details=or_null(record(reason=TEXT)),
        output=array(_OUTPUT_ITEM),
        usage=or_null(_USAGE),
        background=FLAG,
        conversation=or_null(record(id=TEXT)),
        frequency_penalty=NUMBER,
        instructions=or_null(TEXT),
        max_output_tokens=or_null(COUNT),
        max_tool_calls=or_null(COUNT),
        metadata={"type": "object", "additionalProperties": TEXT},
        parallel_tool_calls=FLAG,
        presence_penalty=NUMBER,
        previous_response_id=or_null(TEXT),
        prompt_cache_key=or_null(TEXT),
        reasoning=ANY_OBJECT,
        safety_identifier=or_null(TEXT),
        service_tier=TEXT,
        store=FLAG,
        temperature=NUMBER,
        text=ANY_OBJECT,
        tool_choice=any_of(TEXT, ANY_OBJECT),
        tools=array(ANY_OBJECT),
        top_logprobs=COUNT,
        top_p=NUMBER,
        truncation=OneOf(("auto", "disabled")),
        user=or_null(TEXT),
    ),
    "ResponseEvent": record(
        {
            "response": ref("Response"),
            "item": _OUTPUT_ITEM,
            "item_id": TEXT,
            "output_index": COUNT,
            "content_index": COUNT,
            "delta": TEXT,
        },
        type=TEXT,
        sequence_number=COUNT,
    ),
    "ResponseCompaction": record(
        id=TEXT,
        object={"const": "response.compaction"},
        created_at=COUNT,
        output=array(record(id=TEXT, type=TEXT)),
        usage=_USAGE,
    ),
    "ResponseTokens": record(object={"const": "response.input_tokens"}, input_tokens=COUNT),
    "ResponseDeletion": record(id=TEXT, object={"const": "response"}, deleted={"const": True}),
    "ResponseItems": record(
        object={"const": "list"},
        data=array(record(id=TEXT, type=TEXT)),
        first_id=or_null(TEXT),
        last_id=or_null(TEXT),
        has_more=FLAG,
    ),
}
