"""POST /v1/chat/completions: reads chats, and renders their answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.gateway.api.call import Call
from quire.gateway.api.call_metadata import CallMetadata
from quire.gateway.api.chat_messages import read_messages
from quire.gateway.api.logprobs import of_chat
from quire.gateway.api.options import read_options
from quire.gateway.api.parameters import CHAT
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.model.renderer import Renderer
from quire.gateway.model.served_model import ServedModel
from quire.gateway.stream import sse
from quire.gateway.stream.transcript import Choice, ScoredTokens


async def read(body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> Call:
    """Check and tokenize a call. Raises ApiError."""
    options = read_options(body, CHAT, limits.sampling_defaults)
    limits.check_model(options.model)
    limits.check_choices(1, options.counts)
    await renderer.check_schema(options.sampling.json_schema)
    messages = read_messages(body["messages"])
    token_ids = await renderer.chat(messages, limits.max_model_len)
    return Call.of(options, [("messages", token_ids)], limits, default_max_tokens=None)


class ChatDialect:
    """Renders the answer to one call, and each event of its stream without the event's id."""

    read = staticmethod(read)
    name = "chat"
    prefix = "chatcmpl-"

    def __init__(self, call_id: str, model: ServedModel, about: CallMetadata) -> None:
        self._texts = model.token_texts
        self._choices = about.choices
        head = f'{{"id":{sse.quote(self.prefix + call_id)},"object":"chat.completion'
        rest = f'"created":{about.created},"model":{sse.quote(model.name)},"choices":['
        self._head, self._whole_head = f'{head}.chunk",{rest}', f'{head}",{rest}'
        self._tail = ',"usage":null}\n\n' if about.include_usage else "}\n\n"
        self._text_head = [
            f'data: {self._head}{{"index":{index},"delta":{{"content":' for index in range(about.choices)
        ]
        self._text_tail = '},"logprobs":null,"finish_reason":null}]' + self._tail

    def opening(self) -> list[str]:
        """The first event of each choice, with the role of the speaker."""
        return [
            f'data: {self._head}{{"index":{index},"delta":{{"role":"assistant","content":""}},'
            f'"logprobs":null,"finish_reason":null}}]{self._tail}'
            for index in range(self._choices)
        ]

    def text(self, index: int, text: str, logprobs: ScoredTokens | None = None) -> str:
        if logprobs is None:
            return f"{self._text_head[index]}{sse.quote(text)}{self._text_tail}"
        scored = "".join(of_chat(logprobs, self._texts))
        return f'{self._text_head[index]}{sse.quote(text)}}},"logprobs":{scored},"finish_reason":null}}]{self._tail}'

    def finish(self, index: int, reason: str) -> str:
        return (
            f'data: {self._head}{{"index":{index},"delta":{{}},"logprobs":null,'
            f'"finish_reason":{sse.quote(reason)}}}]{self._tail}'
        )

    def usage(self, usage: dict[str, int]) -> str:
        return sse.event(f'{self._head}],"usage":{sse.dumps(usage)}}}')

    def full(self, choices: list[Choice], usage: dict[str, int]) -> Iterator[str]:
        """The whole answer: pieces of one JSON object."""
        yield self._whole_head
        for index, choice in enumerate(choices):
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            yield f'{"," if index else ""}{{"index":{index},"message":{sse.dumps(message)},"logprobs":'
            yield from ["null"] if choice.logprobs is None else of_chat(choice.logprobs, self._texts)
            yield f',"finish_reason":{sse.quote(choice.finish_reason)}{choice.ranking}}}'
        yield f'],"usage":{sse.dumps(usage)}}}'
