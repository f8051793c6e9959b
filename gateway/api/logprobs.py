"""Log-probabilities of tokens as JSON of the two dialects, in pieces: with 20 alternatives each token takes a page.

Every generated token has an entry, also a token without text of its own: half a character, a part of the stop string,
the end token. So there are as many entries as `usage.completion_tokens` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from quire.gateway.model.token_texts import TokenTexts
from quire.gateway.stream.transcript import ScoredTokens

# Stands for minus infinity, which JSON cannot express (OpenAI API reference, `logprobs`).
LEAST = -9999.0
# Tokens per piece of JSON.
PORTION = 64


def of_chat(scored: ScoredTokens, texts: TokenTexts) -> Iterator[str]:
    """The JSON of `logprobs` of a choice of a chat."""

    def entry(token_id: int, logprob: float) -> str:
        token = texts[token_id]
        return f'{{"token":{token.text},"logprob":{_number(logprob)},"bytes":{token.bytes}'

    def entries() -> Iterator[str]:
        for token_id, (logprob, top) in scored.rows():
            alternatives = ",".join([entry(other, value) + "}" for other, value in top])
            yield f'{entry(token_id, logprob)},"top_logprobs":[{alternatives}]}}'

    yield '{"content":'
    yield from _array(entries())
    yield ',"refusal":null}'


def of_completion(scored: ScoredTokens, texts: TokenTexts) -> Iterator[str]:
    """The JSON of `logprobs` of a choice of a completion. `top_logprobs` has the token itself at any rank."""

    def alternatives(token_id: int, logprob: float, top: tuple[tuple[int, float], ...]) -> str:
        # Several tokens may have the same name; the most probable one stands for all.
        found: dict[str, float] = {}
        for other, value in (*top, (token_id, logprob)):
            found.setdefault(texts[other].name, value)
        return "{" + ",".join([f"{name}:{_number(value)}" for name, value in found.items()]) + "}"

    yield '{"tokens":'
    yield from _array(texts[token_id].name for token_id in scored.token_ids)
    yield ',"token_logprobs":'
    yield from _array(_number(logprob) for _, (logprob, _) in scored.rows())
    yield ',"top_logprobs":'
    yield from _array(alternatives(token_id, *one) for token_id, one in scored.rows())
    yield ',"text_offset":'
    yield from _array(map(str, scored.offsets))
    yield "}"


def _array(values: Iterator[str]) -> Iterator[str]:
    """A JSON array in pieces."""
    before = "["
    while some := list(islice(values, PORTION)):
        yield before + ",".join(some)
        before = ","
    yield "]" if before == "," else "[]"


def _number(logprob: float) -> str:
    """A log-probability with the digits of a float32."""
    return f"{max(logprob, LEAST):.9g}"
