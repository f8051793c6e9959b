"""Step items to text: per choice a detokenizer and a stop-string filter, and the counts that become `usage`."""

from __future__ import annotations

from typing import NamedTuple

from quire.gateway.api.logprobs import ScoredTokens
from quire.gateway.model.served_model import ServedModel
from quire.shared.messages import BY_TOKEN, Delta, StepItem
from quire.shared.text.detokenizer import IncrementalDetokenizer
from quire.shared.text.stop_strings import StopStringFilter


class TextDelta(NamedTuple):
    """What one delta adds for the client. `position`: tokens of the call that the client has with this piece.

    `text` is what these tokens made certain; `rest` is what was held back until the choice ended. `logprobs`: of the
    tokens of the delta, where they are asked for.
    """

    choice: int
    text: str
    rest: str
    finish_reason: str | None
    position: int
    score: float | None = None
    logprobs: ScoredTokens | None = None


class Choice(NamedTuple):
    """One choice that is complete. `score`: by what it was ranked; None where nothing was."""

    text: str
    finish_reason: str
    score: float | None = None
    logprobs: ScoredTokens | None = None

    @property
    def ranking(self) -> str:
        """What the ranking adds to the choice as JSON."""
        return "" if self.score is None else f',"score":{self.score!r}'


_new = tuple.__new__


class _ChoiceText:
    def __init__(self, model: ServedModel, stop: tuple[str, ...], is_message: bool) -> None:
        self._eos_token_ids = model.eos_token_ids
        # As the worker does it, so that both find the same stop strings.
        self._detokenizer = IncrementalDetokenizer(model.tokenizer, model.context)
        self._filter = StopStringFilter(stop)
        # A message is a text of its own, where a completion goes on in one: until its first character.
        self._drops_space = is_message and model.drops_first_space
        # Characters that were pushed, where they are counted.
        self._length = 0
        self.finish_reason: str | None = None

    def push(self, delta: Delta) -> str:
        token_ids = delta.token_ids if delta.finish_reason is None else self._text_ids(delta)
        text = self._filter.push(self._detokenizer.push(token_ids))
        return self._begun(text) if self._drops_space else text

    def push_scored(self, delta: Delta, records: bytes) -> tuple[str, ScoredTokens]:
        """The same token by token: where in the text each of them begins."""
        text, offsets, token_ids = "", [], self._text_ids(delta)
        for token_id in token_ids:
            offsets.append(self._length)
            new = self._detokenizer.push((token_id,))
            self._length += len(new)
            text += self._filter.push(new)
        offsets += [self._length] * (len(delta.token_ids) - len(token_ids))
        return self._begun(text), ScoredTokens(delta.token_ids, records, tuple(offsets))

    def _text_ids(self, delta: Delta) -> tuple[int, ...]:
        """The tokens of a delta less the token that ended it."""
        token_ids = delta.token_ids
        if delta.finish_reason != "stop" or delta.matched_stop or not token_ids:
            return token_ids
        # An end token is no text, even where the tokenizer does not know that it is special, and a stop token neither.
        is_end = delta.matched_stop == BY_TOKEN or token_ids[-1] in self._eos_token_ids
        return token_ids[:-1] if is_end else token_ids

    def finish(self, reason: str) -> str:
        """End the choice: what was held back until now."""
        self.finish_reason = reason
        return self._begun(self._filter.push(self._detokenizer.flush()) + self._filter.flush())

    def _begun(self, text: str) -> str:
        """The text less the space in front of a first word."""
        if not self._drops_space or not text:
            return text
        self._drops_space = False
        return text.removeprefix(" ")


class Assembly:
    """The text of one request, whose choices are numbered from `first_choice` on. They are messages of a chat, or go on
    where a prompt ends."""

    def __init__(
        self, model: ServedModel, n: int, stop: tuple[str, ...], is_message: bool, first_choice: int = 0
    ) -> None:
        self._choices = [_ChoiceText(model, stop, is_message) for _ in range(n)]
        self._first_choice = first_choice
        self.tokens = 0

    @property
    def finish_reasons(self) -> list[str]:
        """Of the choices that have ended."""
        return [choice.finish_reason for choice in self._choices if choice.finish_reason is not None]

    def feed(self, item: StepItem, others: int = 0) -> list[TextDelta]:
        """The pieces of an item, in order; those that have nothing to say are left out.

        `others`: tokens of the call's other requests that its client has.
        """
        first, choices = self._first_choice, self._choices
        pieces = []
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
                pieces.append(TextDelta(first + index, text, choice.finish(reason), reason, position, score, scored))
            elif text or scored is not None:
                # This runs for every token; the class of a named tuple is slow to call.
                pieces.append(_new(TextDelta, (first + index, text, "", None, position, None, scored)))
        self.tokens = position - others
        if item.outcome is not None and item.outcome.name in ("stop", "length"):
            for index, choice in enumerate(choices):
                if choice.finish_reason is None:
                    rest = choice.finish(item.outcome.name)
                    pieces.append(TextDelta(first + index, "", rest, item.outcome.name, position))
        return pieces


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
