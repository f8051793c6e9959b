"""The answer to a call as server-sent events: numbered, from any place on."""

from __future__ import annotations

from collections.abc import Sequence

from quire.gateway.api import errors
from quire.gateway.stream import sse
from quire.gateway.stream.cursor import split
from quire.gateway.stream.sse import BEGINNING, EventId
from quire.gateway.stream.transcript import Dialect, Transcript
from quire.shared.messages import StepItem


class Events:
    """Writes all events of a stream from its beginning, and leaves out those up to `after`, which the client has.

    Rendering begins at token 0 each time: only so are detokenizer and stop filter where the first stream had them.
    """

    def __init__(self, answer: Transcript, form: Dialect, with_ids: bool, after: EventId = BEGINNING) -> None:
        self._answer = answer
        self._form = form
        self._with_ids = with_ids
        self._after = after
        self._is_skipping = True
        # The last event.
        self._tokens, self._step = BEGINNING
        self._parts: list[str] = []

    @property
    def reached(self) -> EventId:
        """The last event, or the last token where that made no event."""
        return max(EventId(self._tokens, self._step), EventId(self._answer.tokens))

    def opening(self) -> str:
        """The events before the first token."""
        for data in self._form.opening():
            self._add_behind(0, data)
        return self._take()

    def feed(self, items: Sequence[StepItem]) -> str:
        """The events of these items, and the end of the stream where one of them ends it."""
        for item in items:
            if self._is_skipping:
                # What the client has may end inside an item, if its tokens came to it in other portions.
                for part in split(item, self._after.tokens):
                    self._feed(part)
            else:
                self._feed(item)
        if self._answer.ended:
            self._end()
        return self._take()

    def _feed(self, item: StepItem) -> None:
        form = self._form
        for choice, text, rest, reason, position, _, logprobs in self._answer.feed(item):
            if text or logprobs is not None:
                self._add(position, 0, form.text(choice, text, logprobs))
            if reason is not None:
                if rest:
                    self._add_behind(position, form.text(choice, rest))
                self._add_behind(position, form.finish(choice, reason))

    def _end(self) -> None:
        answer = self._answer
        if answer.error is not None:
            # Without [DONE]: a client must not take this for the end of a complete answer.
            self._add_behind(answer.tokens, sse.event(errors.body(answer.error)))
            return
        if answer.about.include_usage:
            self._add_behind(answer.tokens, self._form.usage(answer.usage))
        self._add_behind(answer.tokens, sse.event("[DONE]"))

    def _add_behind(self, position: int, data: str) -> None:
        self._add(position, self._step + 1 if self._tokens == position else 1, data)

    def _add(self, tokens: int, step: int, data: str) -> None:
        # This runs for every token.
        self._tokens, self._step = tokens, step
        if self._is_skipping:
            if (tokens, step) <= self._after:
                return
            self._is_skipping = False
        if not self._with_ids:
            self._parts.append(data)
        else:
            self._parts.append(f"id: {EventId(tokens, step)}\n{data}" if step else f"id: {tokens}\n{data}")

    def _take(self) -> str:
        text = "".join(self._parts)
        self._parts.clear()
        return text
