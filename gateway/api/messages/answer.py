"""POST /v1/messages: reads calls, and renders their answers, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from multidict import CIMultiDictProxy

from quire.gateway.api.call import Call
from quire.gateway.api.conversation import read_call, render_prompt
from quire.gateway.api.dialect import Dialect
from quire.gateway.api.messages.events import BlockWriter, blocks, error_event, event
from quire.gateway.api.messages.headers import check_headers
from quire.gateway.api.messages.parameters import COUNT_TOKENS, CREATE
from quire.gateway.api.messages.request import read_request
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.errors.api_errors import ApiError
from quire.gateway.errors.message_errors import ERROR_TYPES
from quire.gateway.model.renderer import Renderer
from quire.gateway.model.served_model import ServedModel
from quire.gateway.output.parts import AnswerPart, PartKind
from quire.gateway.stream import sse
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.choice_text import ScoredTokens
from quire.gateway.stream.prompt_text import PromptText
from quire.gateway.stream.transcript import TOOL_CALLS, Choice
from quire.gateway.stream.writer import INEXACT, MARK, ChoiceFormat
from quire.shared.config.schema_parts import ANY_OBJECT, COUNT, NULL, TEXT, Schema, any_of, array, closed, or_null, ref
from quire.shared.config.validators import OneOf
from quire.shared.protocol.states import OutcomeName

# The priority classes as the tiers of this API.
TIERS = {"interactive": "priority", "standard": "standard", "batch": "batch"}


class MessageDialect(Dialect):
    """The Messages API."""

    name = "message"
    prefix = "msg_"

    def check_headers(self, headers: CIMultiDictProxy[str]) -> list[str]:
        return check_headers(headers)

    async def read(self, body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> Call:
        """Check and tokenize a call. Raises ApiError."""
        request = read_request(body, CREATE, renderer.model)
        call = request.call(limits.sampling_defaults)
        call.check(limits)
        max_tokens = request.given["max_tokens"]
        echo = {
            "max_tokens": max_tokens,
            "hides_thinking": request.given.get("thinking", {}).get("is_hidden", False),
            "tier": TIERS[call.priority],
        }
        try:
            # A call with max_tokens 0 computes its prompt, and one token that is not in the answer.
            call = await read_call(
                request.conversation,
                call,
                limits,
                renderer,
                sse.dumps(echo),
                default_max_tokens=max(max_tokens, 1),
                probes=request.probes(body),
                ttls_s=[ttl_s for _, ttl_s in request.breakpoints],
            )
        except ApiError as error:
            raise request.renamed(error) from error
        return call.without_effect([f"tools[{request.tool_places[index]}].input_schema" for index in call.loosened])

    def form(self, call_id: str, model: ServedModel, metadata: CallMetadata) -> MessageAnswer:
        return MessageAnswer(self.prefix + call_id, call_id, model, metadata)


async def count_tokens(body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> tuple[int, tuple[str, ...]]:
    """Count the tokens of a prompt, which may be longer than the context. Raises ApiError.

    Returns the count, and names of fields without effect.
    """
    request = read_request(body, COUNT_TOKENS, renderer.model)
    limits.check_model(request.given["model"])
    try:
        limits.check_tools(request.conversation.tools)
        prompt = await render_prompt(request.conversation, limits, renderer)
    except ApiError as error:
        raise request.renamed(error) from error
    return len(prompt.token_ids), request.no_effect


class MessageAnswer(ChoiceFormat):
    """Renders the answer to one call, and each event of its stream without the event's id.

    `message_start` is written with the first item, which has the counts of cached and pinned tokens.
    """

    opens_late = True

    def __init__(self, public_id: str, call_id: str, model: ServedModel, metadata: CallMetadata) -> None:
        echo = json.loads(metadata.echo)
        self._call_id = call_id
        self._max_tokens: int = echo["max_tokens"]
        self._tier: str = echo["tier"]
        self._hides_thinking: bool = echo["hides_thinking"]
        name = metadata.model_name(model.name)
        self._message: dict[str, Any] = {"id": public_id, "type": "message", "role": "assistant", "model": name}
        self._blocks = BlockWriter(self._hides_thinking)
        self._reason = ""
        self._stop_reason: str | int | None = None
        self._mark: Mapping[str, Any] = {}

    def opening(self, usage: dict[str, Any]) -> list[str]:
        message = {**self._message, "content": [], **_ended(None), "usage": self._whole_usage(usage)}
        return [
            event("message_start", sse.dumps({"type": "message_start", "message": message})),
            event("ping", '{"type":"ping"}'),
        ]

    def text(self, index: int, text: str, logprobs: ScoredTokens | None = None) -> str:
        return "".join(self.parts(index, [AnswerPart(PartKind.CONTENT, text)]))

    def parts(self, index: int, parts: Sequence[AnswerPart], logprobs: ScoredTokens | None = None) -> list[str]:
        return self._blocks.parts(parts) if self._max_tokens else []

    def prompt(self, first_choice: int, prompt: PromptText) -> Iterator[str]:
        """Return no events: a message has no field for its prompt."""
        return iter(())

    def finish(self, index: int, reason: str, stop_reason: str | int | None = None) -> list[str]:
        self._reason, self._stop_reason = reason, stop_reason
        return self._blocks.close()

    def mark(self) -> None:
        self._mark = INEXACT

    def ending(self, usage: Mapping[str, Any]) -> list[str]:
        """Return the reason of the end, the usage and the last event."""
        delta = self._end(self._reason, self._stop_reason, usage)
        data = {"type": "message_delta", "delta": delta, "usage": self._usage(usage), **self._mark}
        return [event("message_delta", sse.dumps(data)), event("message_stop", '{"type":"message_stop"}')]

    def failure(self, error: ApiError) -> list[str]:
        """Return the event of an error, which no `message_stop` follows."""
        return [error_event(error, self._call_id)]

    def full(self, choices: list[Choice], usage: Mapping[str, Any]) -> Iterator[str]:
        """Yield the whole answer as JSON."""
        [choice] = choices
        content = blocks(choice.parts, self._hides_thinking) if self._max_tokens else []
        end = self._end(choice.finish_reason, choice.stop_reason, usage)
        yield sse.dumps({**self._message, "content": content, **end, "usage": self._whole_usage(usage), **self._mark})

    def _end(self, reason: str, stop_reason: str | int | None, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the answer that say why it ended."""
        if not self._max_tokens:
            return _ended("max_tokens")
        if reason == TOOL_CALLS:
            return _ended("tool_use")
        if reason == OutcomeName.LENGTH:
            is_asked = usage["completion_tokens"] >= self._max_tokens
            return _ended("max_tokens" if is_asked else "model_context_window_exceeded")
        if reason == OutcomeName.REPETITION:
            return _ended(reason)
        return _ended("stop_sequence", stop_reason) if isinstance(stop_reason, str) else _ended("end_turn")

    def _usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the usage in the names of this API: the input tokens are those that were neither cached nor pinned."""
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        created = sum(usage.get("pinned_tokens", ()))
        thinking = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"] - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"] if self._max_tokens else 0,
            "output_tokens_details": {"thinking_tokens": thinking} if thinking else None,
            "server_tool_use": None,
        }

    def _whole_usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the usage with the fields that do not change while the answer grows."""
        short, long = usage.get("pinned_tokens", (0, 0))
        return {
            **self._usage(usage),
            "cache_creation": {"ephemeral_5m_input_tokens": short, "ephemeral_1h_input_tokens": long},
            "service_tier": self._tier,
            "inference_geo": None,
        }


def _ended(reason: str | None, sequence: str | None = None) -> dict[str, Any]:
    """Return the fields that say why an answer ended. Clients require those that are always null here."""
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None, "container": None}


STOP_REASONS = ("end_turn", "stop_sequence", "tool_use", "max_tokens", "model_context_window_exceeded", "repetition")


def _typed(kind: str, optional: Schema | None = None, /, **properties: Schema) -> Schema:
    """Return the schema of an object with this `type` and these properties, and perhaps those in `optional`."""
    return closed({"type": {"const": kind}, **properties}, optional)


def _end_schema(reason: Any) -> Schema:
    """Return the schemas of the properties that say why an answer ended."""
    return {"stop_reason": reason, "stop_sequence": or_null(TEXT), "stop_details": NULL, "container": NULL}


def _message_schema(content: Schema, reason: Any) -> Schema:
    about = {"id": TEXT, "role": {"const": "assistant"}, "model": TEXT}
    return _typed("message", MARK, **about, content=content, **_end_schema(reason), usage=ref("MessageUsage"))


_USAGE: Schema = {
    "input_tokens": COUNT,
    "cache_creation_input_tokens": COUNT,
    "cache_read_input_tokens": COUNT,
    "output_tokens": COUNT,
    "output_tokens_details": or_null(closed({"thinking_tokens": COUNT})),
    "server_tool_use": NULL,
}
_CACHE_CREATION = closed({"ephemeral_5m_input_tokens": COUNT, "ephemeral_1h_input_tokens": COUNT})
_STOP_REASON = OneOf(STOP_REASONS)
_DELTAS = any_of(
    _typed("text_delta", text=TEXT),
    _typed("thinking_delta", thinking=TEXT),
    _typed("signature_delta", signature=TEXT),
    _typed("input_json_delta", partial_json=TEXT),
)

# The answers and events of the API, by their names in /openapi.json.
ANSWERS: Schema = {
    "Message": _message_schema(array(ref("MessageBlock")), _STOP_REASON),
    "MessageBlock": any_of(
        _typed("text", text=TEXT, citations=array(TEXT) | {"maxItems": 0}),
        _typed("thinking", thinking=TEXT, signature=TEXT),
        _typed("tool_use", id=TEXT, name=TEXT, input=ANY_OBJECT, caller=_typed("direct")),
    ),
    "MessageUsage": closed(
        {
            **_USAGE,
            "cache_creation": _CACHE_CREATION,
            "service_tier": OneOf(tuple(TIERS.values())),
            "inference_geo": NULL,
        }
    ),
    "MessageEvent": any_of(
        _typed("message_start", message=_message_schema(array(ref("MessageBlock"), high=0), NULL)),
        _typed("ping"),
        _typed("content_block_start", index=COUNT, content_block=ref("MessageBlock")),
        _typed("content_block_delta", index=COUNT, delta=_DELTAS),
        _typed("content_block_stop", index=COUNT),
        _typed("message_delta", MARK, delta=closed(_end_schema(_STOP_REASON)), usage=closed(_USAGE)),
        _typed("message_stop"),
        ref("MessageError"),
    ),
    "MessageCount": closed({"input_tokens": COUNT}),
    "MessageError": _typed(
        "error",
        error=closed(
            {
                "type": OneOf(ERROR_TYPES),
                "message": TEXT,
                "details": closed({}, {"error_code": TEXT, "param": TEXT}),
            }
        ),
        request_id=TEXT,
    ),
}
