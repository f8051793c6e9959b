"""The text of a call, from step items: a detokenizer and a stop-string filter per choice, and the token counts of
`usage`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from aiohttp import web

from quire.gateway.api import errors
from quire.gateway.api.call_metadata import CallMetadata
from quire.gateway.model.served_model import ServedModel
from quire.shared.logprobs import TokenLogprobs, read_records, record_size
from quire.shared.messages import BY_TOKEN, Delta, Outcome, StepItem
from quire.shared.states import OutcomeName
from quire.shared.text.detokenizer import IncrementalDetokenizer
from quire.shared.text.stop_strings import StopStringFilter

# Tokens whose records are decoded at once: with 20 alternatives each is large.
RECORDS_READ = 64


class ScoredTokens(NamedTuple):
    """Tokens of a choice with their log-probabilities.

    `records`: as in `shared/logprobs.py`. `offsets`: characters of the choice's text before each token.
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


class TextDelta(NamedTuple):
    """The text that one delta adds to a choice.

    `text`: the text that these tokens made certain. `rest`: text that was held back until the choice ended.
    `position`: tokens of the call that the client has with this delta. `logprobs`: of the tokens of the delta, None
    unless the call asks for them.
    """

    choice: int
    text: str
    rest: str
    finish_reason: str | None
    position: int
    score: float | None = None
    logprobs: ScoredTokens | None = None


class Choice(NamedTuple):
    """A complete choice. `score`: the value that it was ranked by; None if the call ranks no choices."""

    text: str
    finish_reason: str
    score: float | None = None
    logprobs: ScoredTokens | None = None

    @property
    def ranking(self) -> str:
        """The field that the ranking adds to the choice's JSON object; empty without a score."""
        return "" if self.score is None else f',"score":{self.score!r}'


_new = tuple.__new__


class _ChoiceText:
    """The text of one choice as it grows."""

    def __init__(self, model: ServedModel, metadata: CallMetadata) -> None:
        self._eos_token_ids = model.eos_token_ids
        # The worker uses the same classes, so that both find the same stop strings.
        self._detokenizer = IncrementalDetokenizer(model.tokenizer, model.context)
        self._includes_stop = metadata.include_stop_str_in_output
        self._filter = StopStringFilter(metadata.stop, self._includes_stop)
        # A message begins a text of its own; a completion continues one. The first character clears this flag.
        self._drops_space = metadata.dialect == "chat" and model.drops_first_space
        # Characters of the text so far; counted for log-probabilities only.
        self._length = 0
        self.finish_reason: str | None = None

    def push(self, delta: Delta) -> str:
        """Returns the text that a delta makes certain."""
        token_ids = delta.token_ids if delta.finish_reason is None else self._text_ids(delta)
        text = self._filter.push(self._detokenizer.push(token_ids))
        return self._strip_first_space(text) if self._drops_space else text

    def push_scored(self, delta: Delta, records: bytes) -> tuple[str, ScoredTokens]:
        """Like `push`, token by token: also returns where in the text each token begins."""
        text, offsets, token_ids = "", [], self._text_ids(delta)
        for token_id in token_ids:
            offsets.append(self._length)
            new = self._detokenizer.push((token_id,))
            self._length += len(new)
            text += self._filter.push(new)
        offsets += [self._length] * (len(delta.token_ids) - len(token_ids))
        return self._strip_first_space(text), ScoredTokens(delta.token_ids, records, tuple(offsets))

    def _text_ids(self, delta: Delta) -> tuple[int, ...]:
        """Returns the tokens of a delta without the token that ended the choice, unless the call wants it as text."""
        token_ids = delta.token_ids
        if delta.finish_reason != "stop" or delta.matched_stop or not token_ids:
            return token_ids
        if delta.matched_stop == BY_TOKEN:
            return token_ids if self._includes_stop else token_ids[:-1]
        # An end token is not text, even if the tokenizer does not list it as a special token.
        return token_ids[:-1] if token_ids[-1] in self._eos_token_ids else token_ids

    def finish(self, reason: str) -> str:
        """Ends the choice; returns the text that was held back."""
        self.finish_reason = reason
        return self._strip_first_space(self._filter.push(self._detokenizer.flush()) + self._filter.flush())

    def _strip_first_space(self, text: str) -> str:
        if not self._drops_space or not text:
            return text
        self._drops_space = False
        return text.removeprefix(" ")


class _RequestText:
    """The text of one request. `first_choice`: index of the request's first choice in the answer of the call."""

    def __init__(self, model: ServedModel, metadata: CallMetadata, first_choice: int) -> None:
        self.choices = [_ChoiceText(model, metadata) for _ in range(metadata.n)]
        self._first_choice = first_choice
        self.tokens = 0

    def feed(self, item: StepItem, others: int) -> list[TextDelta]:
        """Returns the deltas of an item in order, without those that add nothing.

        `others`: tokens of the call's other requests that the client has.
        """
        first, choices = self._first_choice, self.choices
        text_deltas = []
        position = others + item.start
        for delta in item.deltas:
            index, token_ids, reason, _, score, records = delta
            position += len(token_ids)
            if index >= len(choices):
                continue
            choice = choices[index]
            if choice.finish_reason is not None:
                continue
            if records:
                text, scored = choice.push_scored(delta, records)
            else:
                text, scored = choice.push(delta), None
            if reason is not None:
                text_deltas.append(
                    TextDelta(first + index, text, choice.finish(reason), reason, position, score, scored)
                )
            elif text or scored is not None:
                # This runs for every token, and the constructor of a named tuple is slow.
                text_deltas.append(_new(TextDelta, (first + index, text, "", None, position, None, scored)))
        self.tokens = position - others
        if item.outcome is not None and item.outcome.name in ("stop", "length"):
            for index, choice in enumerate(choices):
                if choice.finish_reason is None:
                    rest = choice.finish(item.outcome.name)
                    text_deltas.append(TextDelta(first + index, "", rest, item.outcome.name, position))
        return text_deltas


class Transcript:
    """The text of all requests of a call as it grows."""

    def __init__(
        self, metadata: CallMetadata, model: ServedModel, request_ids: Iterable[str], is_joined: bool = False
    ) -> None:
        """`request_ids`: in the order of the prompts. `is_joined`: whether another HTTP request made the call."""
        self.metadata = metadata
        self.model_name = model.name
        self.is_joined = is_joined
        self._requests = {
            request_id: _RequestText(model, metadata, first_choice=index * metadata.n)
            for index, request_id in enumerate(request_ids)
        }
        self._open = len(self._requests)
        self.tokens = 0
        self.outcome: Outcome | None = None
        self._failed = False

    @property
    def ended(self) -> bool:
        """True if all requests have ended, or one has failed."""
        return self._open == 0 or self._failed

    @property
    def error(self) -> errors.ApiError | None:
        """The error for the client if a request failed."""
        if self.outcome is None or not self._failed:
            return None
        detail = self.outcome.detail
        if self.outcome.name == OutcomeName.CANCELLED:
            return errors.Cancelled(detail or "The request was cancelled.")
        if self.outcome.name == OutcomeName.DEADLINE:
            return errors.DeadlinePassed(detail or "The deadline of the request passed.")
        code = "quarantined" if self.outcome.name == OutcomeName.QUARANTINED else None
        return errors.GenerationFailed(detail or "The request failed.", code=code)

    @property
    def usage(self) -> dict[str, int]:
        prompt_tokens = self.metadata.prompt_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": prompt_tokens + self.tokens,
        }

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reasons of the choices that have ended, in order."""
        choices = [choice for request in self._requests.values() for choice in request.choices]
        return [choice.finish_reason for choice in choices if choice.finish_reason is not None]

    def feed(self, item: StepItem) -> list[TextDelta]:
        """Returns the text that an item adds; choices and tokens are counted over all requests."""
        request = self._requests[item.request_id]
        others = self.tokens - request.tokens
        text_deltas = request.feed(item, others)
        self.tokens = others + request.tokens
        if item.outcome is not None:
            self._open -= 1
            if not self._failed:
                self.outcome = item.outcome
                self._failed = item.outcome.name not in ("stop", "length")
        return text_deltas


# The transcript that answers an HTTP request, for the access log and the trace.
TRANSCRIPT = web.RequestKey("transcript", Transcript)
