"""The parts of one choice of a call that has a parser."""

from __future__ import annotations

from collections.abc import Iterable

from quire.gateway.output.parts import AnswerPart, OutputParser, PartKind, call_id


class ChoiceParts:
    """The parts of one choice as its text grows. The ids of its tool calls follow from `request_id` and `index`."""

    def __init__(self, parser: OutputParser, request_id: str, index: int) -> None:
        self._parser = parser
        self._request_id = request_id
        self._index = index
        # Tokens of the choice so far.
        self._tokens = 0
        # Tokens since the last one that made a part certain.
        self._held = 0
        # Tokens of reasoning, with the marker that begins it.
        self.reasoning_tokens = 0
        self.has_calls = False

    def push(self, text: str, tokens: int) -> tuple[AnswerPart, ...]:
        """Returns the parts that `text`, the text of the next `tokens` tokens, makes certain."""
        self._tokens += tokens
        self._held += tokens
        found: tuple[AnswerPart, ...] = ()
        if text and (parts := self._parser.push(text)):
            is_plain = len(parts) == 1 and parts[0].kind is not PartKind.CALL  # nearly always
            found = (parts[0],) if is_plain else self._with_ids(parts)
            self.reasoning_tokens += self._held if found[0].kind == PartKind.REASONING else 0
            self._held = 0
        return found

    def finish(self, text: str) -> tuple[AnswerPart, ...]:
        """Ends the choice; returns its last parts. text: the end of the text, held back until now."""
        parts = self._parser.push(text) if text else []
        return self._with_ids([*parts, *self._parser.finish()])

    def _with_ids(self, parts: Iterable[AnswerPart]) -> tuple[AnswerPart, ...]:
        return tuple(self._with_id(part) if part.kind == PartKind.CALL else part for part in parts)

    def _with_id(self, part: AnswerPart) -> AnswerPart:
        self.has_calls = True
        # One token may complete several calls: the number of the call tells them apart.
        position = self._tokens + part.call
        return part._replace(id=call_id(self._request_id, self._index, position))
