"""POST /v1/messages: reads calls, and renders their answers, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from multidict import CIMultiDictProxy

from quire.gateway.api.call import Call
from quire.gateway.api.conversation import read_call, render_prompt
from quire.gateway.api.dialect import Dialect
from quire.gateway.api.messages.events import BlockWriter, blocks, event
from quire.gateway.api.messages.headers import check_headers
from quire.gateway.api.messages.parameters import COUNT_TOKENS, CREATE
from quire.gateway.api.messages.request import read_request
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.errors.api_errors import ApiError
from quire.gateway.errors.message_errors import error_json
from quire.gateway.model.renderer import Renderer
from quire.gateway.model.served_model import ServedModel
from quire.gateway.output.parts import AnswerPart, PartKind
from quire.gateway.stream import sse
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.choice_text import ScoredTokens
from quire.gateway.stream.prompt_text import PromptText
from quire.gateway.stream.transcript import TOOL_CALLS, Choice
from quire.gateway.stream.writer import ChoiceFormat
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
        """Checks and tokenizes a call. Raises ApiError."""
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
                request.conversation, call, limits, renderer, sse.dumps(echo), default_max_tokens=max(max_tokens, 1)
            )
        except ApiError as error:
            raise request.renamed(error) from error
        return call.without_effect([f"tools[{request.tool_places[index]}].input_schema" for index in call.loosened])

    def form(self, call_id: str, model: ServedModel, metadata: CallMetadata) -> MessageAnswer:
        return MessageAnswer(self.prefix + call_id, call_id, model, metadata)


async def count_tokens(body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> tuple[int, tuple[str, ...]]:
    """Counts the tokens of a prompt, which may be longer than the context. Raises ApiError.

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
    """Renders the answer to one call, and each event of its stream without the event's id."""

    def __init__(self, public_id: str, call_id: str, model: ServedModel, metadata: CallMetadata) -> None:
        echo = json.loads(metadata.echo)
        self._call_id = call_id
        self._max_tokens: int = echo["max_tokens"]
        self._tier: str = echo["tier"]
        self._hides_thinking: bool = echo["hides_thinking"]
        self._prompt_tokens = metadata.prompt_tokens
        name = metadata.model_name(model.name)
        self._message: dict[str, Any] = {"id": public_id, "type": "message", "role": "assistant", "model": name}
        self._blocks = BlockWriter(self._hides_thinking)
        self._reason = ""
        self._stop_reason: str | int | None = None

    def opening(self) -> list[str]:
        """The events before the first block. The count of cached tokens is not known yet."""
        usage = self._whole_usage({"prompt_tokens": self._prompt_tokens, "completion_tokens": 0})
        message = {**self._message, "content": [], **_ended(None), "usage": usage}
        return [
            event("message_start", sse.dumps({"type": "message_start", "message": message})),
            event("ping", '{"type":"ping"}'),
        ]

    def text(self, index: int, text: str, logprobs: ScoredTokens | None = None) -> str:
        return "".join(self.parts(index, [AnswerPart(PartKind.CONTENT, text)]))

    def parts(self, index: int, parts: Sequence[AnswerPart], logprobs: ScoredTokens | None = None) -> list[str]:
        return self._blocks.parts(parts) if self._max_tokens else []

    def prompt(self, first_choice: int, prompt: PromptText) -> Iterator[str]:
        """No events: a message has no field for its prompt."""
        return iter(())

    def finish(self, index: int, reason: str, stop_reason: str | int | None = None) -> list[str]:
        self._reason, self._stop_reason = reason, stop_reason
        return self._blocks.close()

    def ending(self, usage: Mapping[str, Any]) -> list[str]:
        """The reason of the end, the usage and the last event."""
        delta = self._end(self._reason, self._stop_reason, usage)
        data = {"type": "message_delta", "delta": delta, "usage": self._usage(usage)}
        return [event("message_delta", sse.dumps(data)), event("message_stop", '{"type":"message_stop"}')]

    def failure(self, error: ApiError) -> list[str]:
        """The event of an error, which no `message_stop` follows."""
        return [event("error", error_json(error, self._call_id))]

    def full(self, choices: list[Choice], usage: Mapping[str, Any]) -> Iterator[str]:
        """The whole answer as JSON."""
        [choice] = choices
        content = blocks(choice.parts, self._hides_thinking) if self._max_tokens else []
        end = self._end(choice.finish_reason, choice.stop_reason, usage)
        yield sse.dumps({**self._message, "content": content, **end, "usage": self._whole_usage(usage)})

    def _end(self, reason: str, stop_reason: str | int | None, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the answer that say why it ended."""
        if not self._max_tokens:
            return _ended("max_tokens")
        if reason == TOOL_CALLS:
            return _ended("tool_use")
        if reason == OutcomeName.LENGTH:
            is_asked = usage["completion_tokens"] >= self._max_tokens
            return _ended("max_tokens" if is_asked else "model_context_window_exceeded")
        return _ended("stop_sequence", stop_reason) if isinstance(stop_reason, str) else _ended("end_turn")

    def _usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The usage in the names of this API, in which the input tokens do not include cached ones."""
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"] if self._max_tokens else 0,
            "output_tokens_details": None,
            "server_tool_use": None,
        }

    def _whole_usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The usage with the fields that do not change while the answer grows."""
        created = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
        return {
            **self._usage(usage),
            "cache_creation": created,
            "service_tier": self._tier,
            "inference_geo": None,
        }


def _ended(reason: str | None, sequence: str | None = None) -> dict[str, Any]:
    """The fields that say why an answer ended. Clients require those that are always null here."""
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None, "container": None}
