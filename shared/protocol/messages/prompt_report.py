"""A worker's report about the prompt of a request. Only the first step item of a request may have a report.

report = [cached tokens, packed token ids | nil, records | nil]
       | [cached tokens, packed token ids | nil, records | nil, [pinned for a short time, for longer]]
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from quire.shared.config.validators import Integer, InvalidValue
from quire.shared.protocol.logprobs import PromptTokenLogprobs, check_prompt_records, read_prompt_records
from quire.shared.protocol.messages.codec import unpack_token_ids
from quire.shared.protocol.messages.requests import MAX_PROMPT_TOKENS

_cached_tokens = Integer(0, MAX_PROMPT_TOKENS)


class PromptReport(NamedTuple):
    """A report about a prompt.

    cached_tokens: tokens whose keys and values were in the prefix cache when the request started.
    prompt: the packed token ids, if the request asks for them (`SamplingParams.returns_prompt`).
    records: the log-probabilities of the prompt (`shared/protocol/logprobs.py`), if the request asks for them.
    pinned_tokens: tokens that the request has computed and pinned, for up to SHORT_TTL_S and for longer.
    """

    cached_tokens: int = 0
    prompt: bytes | None = None
    records: bytes | None = None
    pinned_tokens: tuple[int, int] = (0, 0)

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of the message."""
        return self[:] if any(self.pinned_tokens) else self[:3]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of the prompt; none unless the request asks for them."""
        return unpack_token_ids(self.prompt or b"")

    def scores(self) -> Iterator[PromptTokenLogprobs | None]:
        """Yield the log-probabilities of each token, lazily; None for the first token."""
        return chain([None], read_prompt_records(self.records or b"", len(self.prompt or b"") // 4 - 1))


def read_report(value: Any) -> PromptReport:
    """Check a decoded report. Raise InvalidValue."""
    if type(value) is not tuple or not 3 <= len(value) <= 4:
        raise InvalidValue("a prompt report", f"must be an array of 3 or 4, not {value!r:.80}")
    cached_tokens, prompt, records, pinned_tokens = (*value, (0, 0))[:4]
    _cached_tokens("cached tokens", cached_tokens)
    if type(pinned_tokens) is not tuple or len(pinned_tokens) != 2:
        raise InvalidValue("pinned tokens", f"must be an array of 2, not {pinned_tokens!r:.80}")
    short, long = (_cached_tokens("pinned tokens", count) for count in pinned_tokens)
    if prompt is not None and (
        type(prompt) is not bytes or not 0 < len(prompt) <= 4 * MAX_PROMPT_TOKENS or len(prompt) % 4
    ):
        raise InvalidValue("the prompt of a report", f"must be 1 to {MAX_PROMPT_TOKENS} packed token ids")
    if records is not None:
        if type(records) is not bytes or prompt is None:
            raise InvalidValue("prompt records", f"must be bytes, with a prompt, not {records!r:.80}")
        if problem := check_prompt_records(records, len(prompt) // 4 - 1):
            raise InvalidValue("prompt records", f"are wrong: {problem}")
    return PromptReport(cached_tokens, prompt, records, (short, long))
