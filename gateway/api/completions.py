"""POST /v1/completions: the dialect of plain prompts, several of them if need be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from quire.gateway.api import parameters
from quire.gateway.api.call import Call, RequestLimits
from quire.gateway.api.call_metadata import CallMetadata
from quire.gateway.api.logprobs import ScoredTokens, of_completion
from quire.gateway.api.options import read_options
from quire.gateway.model.renderer import Renderer, read_prompts
from quire.gateway.model.served_model import ServedModel
from quire.gateway.stream import sse
from quire.gateway.stream.transcript import Choice


async def read(body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> Call:
    """Check and tokenize a call. Raises ApiError."""
    values = parameters.read(body, parameters.COMPLETIONS)
    options = read_options(values)
    limits.check_model(options.model)
    prompts = read_prompts(values["prompt"], limits.max_prompts, limits.vocab_size)
    limits.check_choices(len(prompts), options)
    await renderer.check_schema(options.json_schema)
    token_ids = await asyncio.gather(*(renderer.prompt(name, prompt, limits.max_model_len) for name, prompt in prompts))
    named = [(name, ids) for (name, _), ids in zip(prompts, token_ids, strict=True)]
    return limits.call(options, named, default_max_tokens=parameters.COMPLETION_DEFAULT_TOKENS)


class CompletionDialect:
    """Renders the answer to one call, and each event of its stream; ids are put before events elsewhere."""

    dialect = "completion"
    prefix = "cmpl-"

    def __init__(self, call_id: str, model: ServedModel, about: CallMetadata) -> None:
        self._texts = model.token_texts
        head = f'{{"id":{sse.quote(self.prefix + call_id)},"object":"text_completion","created":{about.created},'
        self._head = head + f'"model":{sse.quote(model.name)},"choices":['
        self._tail = ',"usage":null}\n\n' if about.include_usage else "}\n\n"
        self._text_head = [f'data: {self._head}{{"index":{index},"text":' for index in range(about.choices)]
        self._text_tail = ',"logprobs":null,"finish_reason":null}]' + self._tail

    def opening(self) -> list[str]:
        return []

    def text(self, index: int, text: str, logprobs: ScoredTokens | None = None) -> str:
        if logprobs is None:
            return f"{self._text_head[index]}{sse.quote(text)}{self._text_tail}"
        scored = "".join(of_completion(logprobs, self._texts))
        return f'{self._text_head[index]}{sse.quote(text)},"logprobs":{scored},"finish_reason":null}}]{self._tail}'

    def finish(self, index: int, reason: str) -> str:
        return f'{self._text_head[index]}"","logprobs":null,"finish_reason":{sse.quote(reason)}}}]{self._tail}'

    def usage(self, usage: dict[str, int]) -> str:
        return sse.event(f'{self._head}],"usage":{sse.dumps(usage)}}}')

    def full(self, choices: list[Choice], usage: dict[str, int]) -> Iterator[str]:
        """The answer in one piece, as JSON in several."""
        yield self._head
        for index, choice in enumerate(choices):
            yield f'{"," if index else ""}{{"index":{index},"text":{sse.quote(choice.text)},"logprobs":'
            yield from ["null"] if choice.logprobs is None else of_completion(choice.logprobs, self._texts)
            yield f',"finish_reason":{sse.quote(choice.finish_reason)}{choice.ranking}}}'
        yield f'],"usage":{sse.dumps(usage)}}}'
