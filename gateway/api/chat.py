"""POST /v1/chat/completions: reads chats, and renders their answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from quire.gateway.api.call import Call
from quire.gateway.api.conversation import read_call, read_conversation, unknown_variables
from quire.gateway.api.dialect import Dialect
from quire.gateway.api.logprobs import choice_prompt, of_chat, texts_of, token_ids_of
from quire.gateway.api.parameters import CHAT, read
from quire.gateway.api.prediction import NAME as PREDICTION
from quire.gateway.api.prediction import prediction_tokens
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.errors.api_errors import ApiError, body
from quire.gateway.model.renderer import Renderer
from quire.gateway.model.served_model import ServedModel
from quire.gateway.output.parts import AnswerPart, PartKind, complete_calls, merged
from quire.gateway.stream import sse
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.choice_text import ScoredTokens
from quire.gateway.stream.prompt_text import PromptText
from quire.gateway.stream.transcript import Choice
from quire.gateway.stream.writer import INEXACT, ChoiceFormat


class ChatDialect(Dialect):
    """The chat completions API."""

    name = "chat"
    prefix = "chatcmpl-"

    async def read(self, body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> Call:
        """Check and tokenize a call. Raises ApiError."""
        given = read(body, CHAT)
        predicted = given.pop(PREDICTION, "")
        call = Call.of(given, limits.sampling_defaults)
        call.check(limits)
        unknown = unknown_variables(given, renderer.model.template)
        call = await read_call(read_conversation(given), call, limits, renderer)
        call = replace(call, prediction=await prediction_tokens(predicted, limits, renderer))
        loosened = (f"tools[{index}].function.parameters" for index in call.loosened)
        return call.without_effect([*unknown, *loosened])

    def form(self, call_id: str, model: ServedModel, metadata: CallMetadata) -> ChatAnswer:
        return ChatAnswer(self.prefix + call_id, model, metadata)


class ChatAnswer(ChoiceFormat):
    """Renders the answer to one call, and each event of its stream without the event's id."""

    def __init__(self, public_id: str, model: ServedModel, metadata: CallMetadata) -> None:
        self._about = metadata
        self._texts = texts_of(model.token_texts, metadata)
        self._choices = metadata.choices
        self._include_usage = metadata.include_usage
        head = f'{{"id":{sse.quote(public_id)},"object":"chat.completion'
        fingerprint = sse.quote(metadata.system_fingerprint)
        tier, self._metadata = metadata.label_fields
        name = sse.quote(metadata.model_name(model.name))
        rest = f'"created":{metadata.created},"model":{name},"system_fingerprint":{fingerprint},{tier}'
        rest += '"choices":['
        self._head, self._whole_head = f'{head}.chunk",{rest}', f'{head}",{rest}'
        self._tail = ',"usage":null}\n\n' if metadata.include_usage else "}\n\n"
        self._text_head = [
            f'data: {self._head}{{"index":{index},"delta":{{"content":' for index in range(metadata.choices)
        ]
        self._text_tail = '},"logprobs":null,"finish_reason":null}]' + self._tail

    def opening(self, usage: dict[str, Any]) -> list[str]:
        """Return the first event of each choice, with the role of the speaker."""
        return [self._event(index, '{"role":"assistant","content":""}') for index in range(self._choices)]

    def text(self, index: int, text: str, logprobs: ScoredTokens | None = None) -> str:
        if logprobs is None:
            return f"{self._text_head[index]}{sse.quote(text)}{self._text_tail}"
        return self._event(index, f'{{"content":{sse.quote(text)}}}', logprobs)

    def parts(self, index: int, parts: Sequence[AnswerPart], logprobs: ScoredTokens | None = None) -> list[str]:
        if len(parts) == 1 and logprobs is None:  # nearly always
            part = parts[0]
            if part.kind is PartKind.CONTENT:
                return [f"{self._text_head[index]}{sse.quote(part.text)}{self._text_tail}"]
            return [self._event(index, _delta(part))]
        deltas = [_delta(part) for part in merged(parts)] or ["{}"]
        return [self._event(index, delta, None if at else logprobs) for at, delta in enumerate(deltas)]

    def prompt(self, first_choice: int, prompt: PromptText) -> Iterator[str]:
        """Yield the event with the token ids of the prompt, if the call asks for them."""
        if self._about.return_token_ids:
            yield f'data: {self._head}],"prompt_token_ids":{sse.dumps(prompt.token_ids)}{self._tail}'

    def finish(self, index: int, reason: str, stop_reason: str | int | None = None) -> list[str]:
        return [
            f'data: {self._head}{{"index":{index},"delta":{{}},"logprobs":null,'
            f'"finish_reason":{sse.quote(reason)},"stop_reason":{sse.dumps(stop_reason)}}}]{self._metadata}{self._tail}'
        ]

    def mark(self) -> None:
        self._metadata += f",{sse.dumps(INEXACT)[1:-1]}"

    def ending(self, usage: dict[str, Any]) -> list[str]:
        events = [f'{self._head}],"usage":{sse.dumps(usage)}}}'] if self._include_usage else []
        return [sse.event(data) for data in (*events, sse.DONE)]

    def failure(self, error: ApiError) -> list[str]:
        # Without [DONE], so that a client does not take this for the end of a complete answer.
        return [sse.event(body(error))]

    def full(self, choices: list[Choice], usage: dict[str, Any]) -> Iterator[str]:
        """Yield the whole answer: pieces of one JSON object."""
        yield self._whole_head
        for index, choice in enumerate(choices):
            yield f'{"," if index else ""}{{"index":{index},"message":{sse.dumps(_message(choice))},"logprobs":'
            scored = choice.logprobs
            yield from ["null"] if scored is None or not scored.records else of_chat(scored, self._texts)
            yield f',"finish_reason":{sse.quote(choice.finish_reason)},"stop_reason":{sse.dumps(choice.stop_reason)}'
            yield f"{token_ids_of(choice, self._about)}{choice.ranking}}}"
        yield f'],"usage":{sse.dumps(usage)}{self._metadata}'
        yield from choice_prompt(choices[0].prompt, self._about, self._texts)
        yield "}"

    def _event(self, index: int, delta: str, logprobs: ScoredTokens | None = None) -> str:
        scored, ids = "null", ""
        if logprobs is not None:
            scored = "".join(of_chat(logprobs, self._texts)) if logprobs.records else "null"
            ids = f',"token_ids":{sse.dumps(logprobs.token_ids)}' if self._about.return_token_ids else ""
        return (
            f'data: {self._head}{{"index":{index},"delta":{delta},"logprobs":{scored},"finish_reason":null{ids}}}]'
            f"{self._tail}"
        )


def _delta(part: AnswerPart) -> str:
    """Return the `delta` of one part."""
    text = sse.quote(part.text)
    match part.kind:
        case PartKind.CONTENT:
            return f'{{"content":{text}}}'
        case PartKind.REASONING:
            return f'{{"reasoning_content":{text}}}'
        case PartKind.CALL:
            call = f'"id":{sse.quote(part.id)},"type":"function","function":{{"name":{text},"arguments":""}}'
        case PartKind.ARGUMENTS:
            call = f'"function":{{"arguments":{text}}}'
    return f'{{"tool_calls":[{{"index":{part.call},{call}}}]}}'


def _message(choice: Choice) -> dict[str, Any]:
    """Return the `message` of a whole choice."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []}
    if not choice.parts:
        return message
    parts = complete_calls(choice.parts)
    texts = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in PartKind}
    calls = [part for part in parts if part.kind == PartKind.CALL]
    arguments = {part.call: part.text for part in parts if part.kind == PartKind.ARGUMENTS}
    message["content"] = texts[PartKind.CONTENT] or (None if calls else "")
    if texts[PartKind.REASONING]:
        message["reasoning_content"] = texts[PartKind.REASONING]
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.text, "arguments": arguments[call.call]},
            }
            for call in calls
        ]
    return message
