"""POST /v1/completions: reads one plain prompt or several, and renders their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from quire.gateway.api.call import Call
from quire.gateway.api.call_metadata import CallMetadata
from quire.gateway.api.errors import invalid, refused
from quire.gateway.api.logprobs import of_completion
from quire.gateway.api.options import read_options
from quire.gateway.api.parameters import COMPLETION_DEFAULT_TOKENS, COMPLETIONS
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.model.renderer import Prompt, Renderer
from quire.gateway.model.served_model import ServedModel
from quire.gateway.stream import sse
from quire.gateway.stream.transcript import Choice, ScoredTokens


async def read(body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> Call:
    """Check and tokenize a call. Raises ApiError."""
    options = read_options(body, COMPLETIONS, limits.sampling_defaults)
    limits.check_model(options.model)
    prompts = read_prompts(body["prompt"], limits.max_prompts, limits.vocab_size)
    limits.check_choices(len(prompts), options.counts)
    await renderer.check_schema(options.sampling.json_schema)
    token_ids = await asyncio.gather(*(renderer.prompt(name, prompt, limits.max_model_len) for name, prompt in prompts))
    named = [(name, ids) for (name, _), ids in zip(prompts, token_ids, strict=True)]
    return Call.of(options, named, limits, default_max_tokens=COMPLETION_DEFAULT_TOKENS)


def read_prompts(value: Any, max_prompts: int, vocab_size: int) -> list[tuple[str, Prompt]]:
    """The prompts of a completion call, each with its name for errors.

    A string, an array of token ids, or an array of strings and arrays of token ids. Raises InvalidRequest.
    """
    forms = "a string, an array of token ids, or an array of strings and arrays of token ids"
    if type(value) is str:
        found: list[tuple[str, Prompt]] = [("prompt", value)]
    elif type(value) is not list:
        raise invalid("prompt", forms, value)
    elif value and type(value[0]) is int:
        found = [("prompt", value)]
    else:
        if len(value) > max_prompts:
            raise refused(
                "prompt", f"prompt has {len(value)} prompts; this server allows at most {max_prompts} in one call."
            )
        found = [(f"prompt[{index}]", prompt) for index, prompt in enumerate(value)]
    if not found:
        raise refused("prompt", "prompt is empty.", code="empty_prompt")
    for name, prompt in found:
        if type(prompt) not in (str, list):
            raise invalid(name, "a string or an array of token ids", prompt)
        if not prompt:
            raise refused(name, f"{name} is empty.", code="empty_prompt")
        if isinstance(prompt, list):
            _check_token_ids(name, prompt, vocab_size)
    return found


def _check_token_ids(name: str, token_ids: list[Any], vocab_size: int) -> None:
    for index, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise invalid(f"{name}[{index}]", f"a token id from 0 to {vocab_size - 1}", token_id)


class CompletionDialect:
    """Renders the answer to one call, and each event of its stream without the event's id."""

    read = staticmethod(read)
    name = "completion"
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
        """The whole answer: pieces of one JSON object."""
        yield self._head
        for index, choice in enumerate(choices):
            yield f'{"," if index else ""}{{"index":{index},"text":{sse.quote(choice.text)},"logprobs":'
            yield from ["null"] if choice.logprobs is None else of_completion(choice.logprobs, self._texts)
            yield f',"finish_reason":{sse.quote(choice.finish_reason)}{choice.ranking}}}'
        yield f'],"usage":{sse.dumps(usage)}}}'
