"""POST /v1/completions: reads one plain prompt or several, and renders their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from quire.gateway.api.call import Call
from quire.gateway.api.dialect import Dialect
from quire.gateway.api.logprobs import (
    TokenRow,
    choice_prompt,
    generated_rows,
    of_completion,
    prompt_portions,
    prompt_rows,
    texts_of,
    token_ids_of,
)
from quire.gateway.api.parameters import COMPLETION_DEFAULT_TOKENS, COMPLETIONS, read
from quire.gateway.api.prompts import read_prompts
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.errors.api_errors import ApiError, body
from quire.gateway.model.renderer import Renderer
from quire.gateway.model.served_model import ServedModel
from quire.gateway.output.parts import AnswerPart
from quire.gateway.stream import sse
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.choice_text import ScoredTokens
from quire.gateway.stream.prompt_text import PromptText
from quire.gateway.stream.transcript import Choice
from quire.gateway.stream.writer import INEXACT, ChoiceFormat


class CompletionDialect(Dialect):
    """The completions API."""

    name = "completion"
    prefix = "cmpl-"

    async def read(self, body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> Call:
        """Check and tokenize a call. Raises ApiError."""
        call = Call.of(read(body, COMPLETIONS), limits.sampling_defaults)
        limits.check_model(call.model)
        prompts = read_prompts(body["prompt"], limits.max_prompts, limits.vocab_size)
        call.check(limits, len(prompts))
        await renderer.check_grammar(call.common.grammar, call.grammar_parameter)
        token_ids = await asyncio.gather(
            *(renderer.prompt(name, prompt, limits.max_model_len, call.add_special_tokens) for name, prompt in prompts)
        )
        answer_length = COMPLETION_DEFAULT_TOKENS if call.max_tokens is None else call.max_tokens
        room = limits.max_model_len - answer_length
        named = [(name, call.truncated(ids, room)) for (name, _), ids in zip(prompts, token_ids, strict=True)]
        return call.with_prompts(named, limits, COMPLETION_DEFAULT_TOKENS)

    def form(self, call_id: str, model: ServedModel, metadata: CallMetadata) -> CompletionAnswer:
        return CompletionAnswer(self.prefix + call_id, model, metadata)


class CompletionAnswer(ChoiceFormat):
    """Renders the answer to one call, and each event of its stream without the event's id."""

    def __init__(self, public_id: str, model: ServedModel, metadata: CallMetadata) -> None:
        self._about = metadata
        self._texts = texts_of(model.token_texts, metadata)
        self._n = metadata.n
        self._include_usage = metadata.include_usage
        head = f'{{"id":{sse.quote(public_id)},"object":"text_completion","created":{metadata.created},'
        tier, self._metadata = metadata.label_fields
        fingerprint = sse.quote(metadata.system_fingerprint)
        name = sse.quote(metadata.model_name(model.name))
        self._head = head + f'"model":{name},"system_fingerprint":{fingerprint},{tier}"choices":['
        self._tail = ',"usage":null}\n\n' if metadata.include_usage else "}\n\n"
        self._text_head = [f'data: {self._head}{{"index":{index},"text":' for index in range(metadata.choices)]
        self._text_tail = ',"logprobs":null,"finish_reason":null}]' + self._tail

    def opening(self, usage: dict[str, Any]) -> list[str]:
        return []

    def text(self, index: int, text: str, logprobs: ScoredTokens | None = None) -> str:
        if logprobs is None:
            return f"{self._text_head[index]}{sse.quote(text)}{self._text_tail}"
        scored = "".join(self._logprobs(None, logprobs))
        ids = f',"token_ids":{sse.dumps(logprobs.token_ids)}' if self._about.return_token_ids else ""
        return f'{self._text_head[index]}{sse.quote(text)},"logprobs":{scored},"finish_reason":null{ids}}}]{self._tail}'

    def parts(self, index: int, parts: Sequence[AnswerPart], logprobs: ScoredTokens | None = None) -> list[str]:
        return [self.text(index, "".join(part.text for part in parts), logprobs)]

    def _logprobs(self, prompt: PromptText | None, scored: ScoredTokens | None) -> Iterator[str]:
        """Return the JSON of `logprobs` of an echoed prompt and generated tokens, in pieces."""
        echoes = self._about.echoes_prompt and self._about.logprobs >= 0
        echoed = prompt if echoes and prompt is not None and prompt.is_scored else None
        generated = scored if scored is not None and scored.records else None
        if echoed is None and generated is None:
            return iter(["null"])

        def rows() -> Iterator[TokenRow]:
            if echoed is not None:
                yield from prompt_rows(echoed, self._about.logprobs)
            if generated is not None:
                yield from generated_rows(generated)

        return of_completion(rows, self._texts)

    def prompt(self, first_choice: int, prompt: PromptText) -> Iterator[str]:
        """Yield the events before the text of the choices: an echoed prompt in portions, and its token ids."""
        ids = f',"prompt_token_ids":{sse.dumps(prompt.token_ids)}' if self._about.return_token_ids else ""
        portions = list(prompt_portions(prompt, self._about)) if self._about.echoes_prompt else [("", None)]
        for index in range(first_choice, first_choice + self._n):
            for at, (text, rows) in enumerate(portions):
                scored = "null" if rows is None else "".join(of_completion(rows, self._texts))
                yield (
                    f'{self._text_head[index]}{sse.quote(text)},"logprobs":{scored},"finish_reason":null'
                    f"{'' if at else ids}}}]{self._tail}"
                )

    def finish(self, index: int, reason: str, stop_reason: str | int | None = None) -> list[str]:
        return [
            f'{self._text_head[index]}"","logprobs":null,"finish_reason":{sse.quote(reason)},'
            f'"stop_reason":{sse.dumps(stop_reason)}}}]{self._metadata}{self._tail}'
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
        yield self._head
        for index, choice in enumerate(choices):
            prompt = choice.prompt
            text = choice.text if prompt is None else prompt.text + choice.text
            yield f'{"," if index else ""}{{"index":{index},"text":{sse.quote(text)},"logprobs":'
            yield from self._logprobs(prompt, choice.logprobs)
            yield f',"finish_reason":{sse.quote(choice.finish_reason)},"stop_reason":{sse.dumps(choice.stop_reason)}'
            yield from choice_prompt(prompt, self._about, self._texts)
            yield f"{token_ids_of(choice, self._about)}{choice.ranking}}}"
        yield f'],"usage":{sse.dumps(usage)}{self._metadata}}}'
