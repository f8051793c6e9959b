"""Log-probabilities of tokens as JSON of the two dialects, in pieces: with 20 alternatives each token takes a page.

Every generated token has an entry, also a token without text of its own: half a character, a part of the stop string,
the end token. So there are as many entries as `usage.completion_tokens` says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import NamedTuple

from quire.gateway.model.token_texts import TokenText, TokenTexts
from quire.gateway.stream import sse
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.choice_text import ScoredTokens
from quire.gateway.stream.prompt_text import PromptText
from quire.gateway.stream.transcript import Choice
from quire.shared.protocol.logprobs import PromptTokenLogprobs

# Stands for minus infinity, which JSON cannot express (OpenAI API reference, `logprobs`).
LEAST = -9999.0
# Tokens per piece of JSON.
PORTION = 64
# Tokens of an echoed prompt per event of a stream.
PROMPT_PORTION = 256


class TokenNumbers:
    """Names tokens by their ids (vLLM's `return_tokens_as_token_ids`), with the bytes of their texts."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def __getitem__(self, token_id: int) -> TokenText:
        name = json.dumps(f"token_id:{token_id}")
        return TokenText(name, name, self._texts[token_id].bytes)


Texts = TokenTexts | TokenNumbers


def texts_of(texts: TokenTexts, metadata: CallMetadata) -> Texts:
    """Return the names of tokens for a call."""
    return TokenNumbers(texts) if metadata.return_tokens_as_token_ids else texts


def of_chat(scored: ScoredTokens, texts: Texts) -> Iterator[str]:
    """Yield the JSON of `logprobs` of a choice of a chat."""
    yield '{"content":'
    yield from array(token_entries(scored, texts))
    yield ',"refusal":null}'


def token_entries(scored: ScoredTokens, texts: Texts) -> Iterator[str]:
    """Yield the JSON object of each token, as in chats and responses."""

    def entry(token_id: int, logprob: float) -> str:
        token = texts[token_id]
        return f'{{"token":{token.text},"logprob":{number(logprob)},"bytes":{token.bytes}'

    for token_id, (logprob, top) in scored.rows():
        alternatives = ",".join([entry(other, value) + "}" for other, value in top])
        yield f'{entry(token_id, logprob)},"top_logprobs":[{alternatives}]}}'


class TokenRow(NamedTuple):
    """A token as a completion lists it: log-probability, alternatives, and characters of the text before it.

    The first token of an echoed prompt has no log-probability.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int


Rows = Callable[[], Iterator[TokenRow]]


def generated_rows(scored: ScoredTokens) -> Iterator[TokenRow]:
    """Yield the rows of generated tokens, decoded lazily."""
    for (token_id, (logprob, top)), offset in zip(scored.rows(), scored.offsets, strict=True):
        yield TokenRow(token_id, logprob, top, offset)


def of_completion(rows: Rows, texts: Texts) -> Iterator[str]:
    """Yield the JSON of `logprobs` of a choice of a completion. `top_logprobs` has the token itself at any rank.

    rows: called once for each of the four lists, so that no list of all rows is in memory.
    """

    def alternatives(row: TokenRow) -> str:
        if row.logprob is None:
            return "null"
        # Several tokens may have the same name; the most probable one stands for all.
        by_name: dict[str, float] = {}
        for other, value in (*row.top, (row.token_id, row.logprob)):
            by_name.setdefault(texts[other].name, value)
        return "{" + ",".join([f"{name}:{number(value)}" for name, value in by_name.items()]) + "}"

    yield '{"tokens":'
    yield from array(texts[row.token_id].name for row in rows())
    yield ',"token_logprobs":'
    yield from array("null" if row.logprob is None else number(row.logprob) for row in rows())
    yield ',"top_logprobs":'
    yield from array(alternatives(row) for row in rows())
    yield ',"text_offset":'
    yield from array(str(row.offset) for row in rows())
    yield "}"


def of_prompt(prompt: PromptText, top_logprobs: int, texts: Texts) -> Iterator[str]:
    """Return the JSON of `prompt_logprobs`: null for the first token, then an object for each token.

    An object has `logprob`, `rank` and `decoded_token` by token id: of the token itself, and of the `top_logprobs` most
    probable ones.
    """

    def entry(token_id: int, logprob: float, rank: int) -> str:
        decoded = texts[token_id].text
        return f'"{token_id}":{{"logprob":{number(logprob)},"rank":{rank},"decoded_token":{decoded}}}'

    def token(token_id: int, scores: PromptTokenLogprobs | None) -> str:
        if scores is None:
            return "null"
        by_id = {token_id: (scores.logprob, scores.rank)}
        for rank, (other, logprob) in enumerate(scores.top[:top_logprobs], start=1):
            by_id.setdefault(other, (logprob, rank))
        return "{" + ",".join([entry(id_, *values) for id_, values in by_id.items()]) + "}"

    return array(map(token, prompt.token_ids, prompt.scores()))


def prompt_rows(prompt: PromptText, top_logprobs: int) -> Iterator[TokenRow]:
    """Yield the rows of an echoed prompt, with this number of alternatives."""
    for token_id, scores, offset in zip(prompt.token_ids, prompt.scores(), prompt.offsets, strict=False):
        if scores is None:
            yield TokenRow(token_id, None, (), offset)
        else:
            yield TokenRow(token_id, scores.logprob, scores.top[:top_logprobs], offset)


def prompt_portions(prompt: PromptText, metadata: CallMetadata) -> Iterator[tuple[str, Rows | None]]:
    """Yield an echoed prompt in portions of text, each with its rows; without log-probabilities there is one portion.

    The ends of the portions depend on the prompt alone, so a resumed stream has the same events.
    """
    if metadata.logprobs < 0 or not prompt.is_scored:
        yield prompt.text, None
        return
    rows = list(prompt_rows(prompt, metadata.logprobs))
    for at in range(0, len(rows), PROMPT_PORTION):
        text = prompt.text[prompt.offsets[at] : prompt.offsets[min(at + PROMPT_PORTION, len(rows))]]
        yield text, partial(iter, rows[at : at + PROMPT_PORTION])


def choice_prompt(prompt: PromptText | None, metadata: CallMetadata, texts: Texts) -> Iterator[str]:
    """Yield the fields `prompt_logprobs` and `prompt_token_ids` that show the prompt, if the call asks for them."""
    if prompt is None:
        return
    if metadata.prompt_logprobs >= 0 and prompt.is_scored:
        yield ',"prompt_logprobs":'
        yield from of_prompt(prompt, metadata.prompt_logprobs, texts)
    if metadata.return_token_ids:
        yield ',"prompt_token_ids":'
        yield from array(map(str, prompt.token_ids))


def token_ids_of(choice: Choice, metadata: CallMetadata) -> str:
    """Return the field `token_ids` of a choice; empty unless the call asks for it."""
    if not metadata.return_token_ids:
        return ""
    return f',"token_ids":{sse.dumps(choice.logprobs.token_ids if choice.logprobs is not None else [])}'


def array(values: Iterator[str]) -> Iterator[str]:
    """Yield a JSON array in pieces."""
    before = "["
    while some := list(islice(values, PORTION)):
        yield before + ",".join(some)
        before = ","
    yield "]" if before == "," else "[]"


def number(logprob: float) -> str:
    """Return a log-probability with the digits of a float32."""
    return f"{max(logprob, LEAST):.9g}"
