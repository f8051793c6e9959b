"""POST /v1/completions: the dialect of plain prompts, several of them if need be."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway import parameters, sse
from gateway.assembly import Choice, Piece
from gateway.calls import Call, Limits
from gateway.options import read_options
from gateway.rendering import Renderer, read_prompts


async def read(body: dict[str, Any], limits: Limits, renderer: Renderer) -> Call:
    """Check and tokenize a call. Raises ApiError."""
    values = parameters.read(body, parameters.COMPLETIONS)
    options = read_options(values)
    limits.check_model(options.model)
    prompts = read_prompts(values["prompt"], limits.max_prompts, limits.vocab_size)
    limits.check_choices(len(prompts), options)
    token_ids = await asyncio.gather(*(renderer.prompt(name, prompt, limits.max_model_len) for name, prompt in prompts))
    named = [(name, ids) for (name, _), ids in zip(prompts, token_ids, strict=True)]
    return limits.call(options, named, default_max_tokens=parameters.COMPLETION_DEFAULT_TOKENS)


class Format:
    """Renders the answer to one call."""

    prefix = "cmpl-"

    def __init__(
        self, call_id: str, model: str, created: int, choices: int, include_usage: bool, mark: sse.Mark
    ) -> None:
        self.mark = mark
        self._id = self.prefix + call_id
        self._model = model
        self._created = created
        head = f'{{"id":{sse.quote(self._id)},"object":"text_completion","created":{created},'
        self._head = head + f'"model":{sse.quote(model)},"choices":['
        self._tail = ',"usage":null}\n\n' if include_usage else "}\n\n"
        self._text_head = [f'data: {self._head}{{"index":{index},"text":' for index in range(choices)]
        self._text_tail = ',"logprobs":null,"finish_reason":null}]' + self._tail

    def opening(self) -> str:
        return ""

    def piece(self, index: int, piece: Piece, position: int) -> str:
        text = ""
        if piece.text:
            text = f"{self.mark(position)}{self._text_head[index]}{sse.quote(piece.text)}{self._text_tail}"
        if piece.finish_reason is not None:
            text += (
                f'{self.mark(position)}{self._text_head[index]}"","logprobs":null,'
                f'"finish_reason":{sse.quote(piece.finish_reason)}}}]{self._tail}'
            )
        return text

    def usage(self, usage: dict[str, int], position: int) -> str:
        return sse.event(self.mark(position), f'{self._head}],"usage":{sse.dumps(usage)}}}')

    def full(self, choices: list[Choice], usage: dict[str, int]) -> dict[str, Any]:
        """The answer in one piece."""
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                {
                    "index": index,
                    "text": choice.text,
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                    **choice.ranking,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": usage,
        }
