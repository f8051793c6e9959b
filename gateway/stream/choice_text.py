"""The text of one choice as it grows, from its tokens: detokenizer and stop-string filter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quire.gateway.model.served_model import ServedModel
from quire.gateway.stream.call_metadata import CallMetadata
from quire.shared.protocol.logprobs import TokenLogprobs, read_records, record_size
from quire.shared.protocol.messages import BY_TOKEN, Delta
from quire.shared.protocol.states import OutcomeName
from quire.shared.text.detokenizer import IncrementalDetokenizer
from quire.shared.text.stop_strings import StopStringFilter

# Tokens whose records are decoded at once: with 20 alternatives each is large.
RECORDS_READ = 64


class ScoredTokens(NamedTuple):
    """Tokens of a choice with their log-probabilities.

    `records`: as in `shared/protocol/logprobs.py`. `offsets`: characters of the choice's
    text before each token.
    """

    token_ids: tuple[int, ...]
    records: bytes
    offsets: tuple[int, ...]

    @classmethod
    def join(cls, parts: Sequence[ScoredTokens]) -> ScoredTokens:
        """Concatenates parts of one choice."""
        return cls(
            tuple(token_id for part in parts for token_id in part.token_ids),
            b"".join(part.records for part in parts),
            tuple(offset for part in parts for offset in part.offsets),
        )

    def rows(self) -> Iterator[tuple[int, TokenLogprobs]]:
        """Yields each token with its log-probabilities, decoded lazily."""
        size = RECORDS_READ * record_size(self.records, len(self.token_ids))
        for at in range(0, len(self.token_ids), RECORDS_READ):
            token_ids = self.token_ids[at : at + RECORDS_READ]
            records = self.records[at // RECORDS_READ * size : (at // RECORDS_READ + 1) * size]
            yield from zip(token_ids, read_records(records, len(token_ids)), strict=True)


class ChoiceText:
    """The text of one choice as it grows."""

    def __init__(self, model: ServedModel, metadata: CallMetadata) -> None:
        self._eos_token_ids = model.eos_token_ids
        # The worker uses the same classes, so that both find the same stop strings.
        self._shows_end = metadata.include_stop_str_in_output and not metadata.skip_special_tokens
        self._detokenizer = IncrementalDetokenizer(model.tokenizer, model.context, metadata.skip_special_tokens)
        self._includes_stop = metadata.include_stop_str_in_output
        self._stops = bool(metadata.stop)
        self._filter = StopStringFilter(metadata.stop, self._includes_stop)
        # A message begins a text of its own; a completion continues one. The first character clears this flag.
        self._drops_space = (
            metadata.dialect != "completion" and model.drops_first_space and not metadata.continues_message
        )
        # Characters of the text so far, with an echoed prompt; counted for log-probabilities only.
        self.length = 0
        self.finish_reason: str | None = None

    def push(self, delta: Delta) -> str:
        """Returns the text that a delta makes certain."""
        token_ids = delta.token_ids if delta.finish_reason is None else self._text_ids(delta)
        text = self._detokenizer.push(token_ids)
        if self._stops:
            text = self._filter.push(text)
        return self._strip_first_space(text) if self._drops_space else text

    def push_scored(self, delta: Delta, records: bytes) -> tuple[str, ScoredTokens]:
        """Like `push`, token by token: also returns where in the text each token begins."""
        text, offsets, token_ids = "", [], self._text_ids(delta)
        for token_id in token_ids:
            offsets.append(self.length)
            new = self._detokenizer.push((token_id,))
            self.length += len(new)
            text += self._filter.push(new)
        offsets += [self.length] * (len(delta.token_ids) - len(token_ids))
        return self._strip_first_space(text), ScoredTokens(delta.token_ids, records, tuple(offsets))

    def _text_ids(self, delta: Delta) -> tuple[int, ...]:
        """Returns the tokens of a delta without the token that ended the choice, unless the call wants it as text."""
        token_ids = delta.token_ids
        if delta.finish_reason != OutcomeName.STOP or delta.matched_stop or not token_ids:
            return token_ids
        if delta.matched_stop == BY_TOKEN:
            return token_ids if self._includes_stop else token_ids[:-1]
        # An end token is not text, even if the tokenizer does not list it as a special token.
        return token_ids[:-1] if token_ids[-1] in self._eos_token_ids and not self._shows_end else token_ids

    def finish(self, reason: str) -> str:
        """Ends the choice; returns the text that was held back."""
        self.finish_reason = reason
        return self._strip_first_space(self._filter.push(self._detokenizer.flush()) + self._filter.flush())

    def _strip_first_space(self, text: str) -> str:
        if not self._drops_space or not text:
            return text
        self._drops_space = False
        return text.removeprefix(" ")
