"""Reasoning: the part of an answer between two markers, before the answer proper."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from quire.gateway.features.tools.growing_text import GrowingText, MalformedCall
from quire.gateway.output.parts import AnswerPart, OutputParser, PartKind


class ReasoningFormat(NamedTuple):
    """The markers around the reasoning of a model family."""

    name: str
    start: str
    end: str

    def begins_in(self, prompt: str) -> bool:
        """Tell if a prompt ends inside the reasoning, so that the answer begins there."""
        return prompt.rstrip().endswith(self.start)

    def is_over_in(self, prompt: str) -> bool:
        """Tell if a prompt ends after the reasoning: the template has switched it off."""
        return prompt.rstrip().endswith(self.end)


class Reasoning(NamedTuple):
    """The reasoning that an answer may have. `starts_inside`: the prompt ends with the start marker."""

    format: ReasoningFormat
    starts_inside: bool = False


class ReasoningParser:
    """Divides an answer into reasoning and the rest, which another parser reads.

    The markers are dropped, and white space next to them. An answer without the start marker at its beginning has no
    reasoning. An answer that ends before the end marker is all reasoning.
    """

    def __init__(self, reasoning: Reasoning, answer: OutputParser) -> None:
        self._reasoning = reasoning
        self._answer = answer
        self._source = GrowingText()
        self._parts: list[AnswerPart] = []
        self._is_over = False
        self._reading = self._read()

    def push(self, text: str) -> list[AnswerPart]:
        """Returns the parts that `text`, which follows the text so far, makes certain."""
        if self._is_over:
            return self._answer.push(text)
        self._source.unread += text
        return self._advance()

    def finish(self) -> list[AnswerPart]:
        """Ends the text; returns the parts that were held back."""
        self._source.is_complete = True
        parts = [] if self._is_over else self._advance()
        return parts + self._answer.finish()

    def _advance(self) -> list[AnswerPart]:
        try:
            next(self._reading)
        except StopIteration:
            self._is_over = True
            self._parts += self._answer.push(self._source.take(len(self._source.unread)))
        parts, self._parts = self._parts, []
        return parts

    def _read(self) -> Generator[None, None, None]:
        source, form = self._source, self._reasoning.format
        try:
            yield from source.spaces()
            yield from source.literal(form.start)
        except MalformedCall:
            if not self._reasoning.starts_inside:
                self._parts += self._answer.push("".join(source.taken))
                return
        # A model may repeat the marker at the end of the prompt: nothing is lost then.
        try:
            yield from source.spaces()
            yield from source.stream_until((form.end,), self._emit)
            yield from source.spaces()
        except MalformedCall:
            self._emit(source.take(len(source.unread)))

    def _emit(self, text: str) -> None:
        if text:
            self._parts.append(AnswerPart(PartKind.REASONING, text))
            self._source.mark()
