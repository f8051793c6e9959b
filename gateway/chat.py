"""POST /v1/chat/completions: the dialect of chats."""

from __future__ import annotations

from typing import Any

from gateway import parameters, sse
from gateway.assembly import Choice, Piece
from gateway.calls import Call, Limits
from gateway.conversation import read_messages
from gateway.options import read_options
from gateway.rendering import Renderer


async def read(body: dict[str, Any], limits: Limits, renderer: Renderer) -> Call:
    """Check and tokenize a call. Raises ApiError."""
    values = parameters.read(body, parameters.CHAT)
    options = read_options(values)
    limits.check_model(options.model)
    limits.check_choices(1, options)
    messages = read_messages(values["messages"])
    token_ids = await renderer.chat(messages, limits.max_model_len)
    return limits.call(options, [("messages", token_ids)], default_max_tokens=None)


class Format:
    """Renders the answer to one call."""

    prefix = "chatcmpl-"

    def __init__(
        self, call_id: str, model: str, created: int, choices: int, include_usage: bool, mark: sse.Mark
    ) -> None:
        self.mark = mark
        self._id = self.prefix + call_id
        self._model = model
        self._created = created
        self._choices = choices
        head = f'{{"id":{sse.quote(self._id)},"object":"chat.completion.chunk","created":{created},'
        self._head = head + f'"model":{sse.quote(model)},"choices":['
        self._tail = ',"usage":null}\n\n' if include_usage else "}\n\n"
        self._text_head = [f'data: {self._head}{{"index":{index},"delta":{{"content":' for index in range(choices)]
        self._text_tail = '},"logprobs":null,"finish_reason":null}]' + self._tail

    def opening(self) -> str:
        """The first event of each choice: who speaks."""
        return "".join(
            f'{self.mark(0)}data: {self._head}{{"index":{index},"delta":{{"role":"assistant","content":""}},'
            f'"logprobs":null,"finish_reason":null}}]{self._tail}'
            for index in range(self._choices)
        )

    def piece(self, index: int, piece: Piece, position: int) -> str:
        text = ""
        if piece.text:
            text = f"{self.mark(position)}{self._text_head[index]}{sse.quote(piece.text)}{self._text_tail}"
        if piece.finish_reason is not None:
            text += (
                f'{self.mark(position)}data: {self._head}{{"index":{index},"delta":{{}},"logprobs":null,'
                f'"finish_reason":{sse.quote(piece.finish_reason)}}}]{self._tail}'
            )
        return text

    def usage(self, usage: dict[str, int], position: int) -> str:
        return sse.event(self.mark(position), f'{self._head}],"usage":{sse.dumps(usage)}}}')

    def full(self, choices: list[Choice], usage: dict[str, int]) -> dict[str, Any]:
        """The answer in one piece."""
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                    **choice.ranking,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": usage,
        }
