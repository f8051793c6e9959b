"""The parts of one choice of a call that has a parser."""

from __future__ import annotations

from collections.abc import Iterable

from quire.gateway.output.parts import AnswerPart, OutputParser, PartKind, call_id, is_complete


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
        # The pieces of the arguments of the last tool call; None without a call.
        self._arguments: list[str] | None = None

    @property
    def ends_with_call(self) -> bool:
        """True if the choice has tool calls, and the last of them is complete."""
        return self._arguments is not None and is_complete("".join(self._arguments))

    def push(self, text: str, tokens: int) -> tuple[AnswerPart, ...]:
        """Return the parts that `text`, the text of the next `tokens` tokens, makes certain."""
        self._tokens += tokens
        self._held += tokens
        answer_parts: tuple[AnswerPart, ...] = ()
        if text and (parts := self._parser.push(text)):
            is_plain = len(parts) == 1 and parts[0].kind is not PartKind.CALL  # nearly always
            answer_parts = (parts[0],) if is_plain else self._with_ids(parts)
            self.reasoning_tokens += self._held if answer_parts[0].kind == PartKind.REASONING else 0
            self._held = 0
            if is_plain and self._arguments is not None and answer_parts[0].kind is PartKind.ARGUMENTS:
                self._arguments.append(answer_parts[0].text)
        return answer_parts

    def finish(self, text: str) -> tuple[AnswerPart, ...]:
        """End the choice; return its last parts. text: the end of the text, held back until now."""
        parts = self._parser.push(text) if text else []
        return self._with_ids([*parts, *self._parser.finish()])

    def _with_ids(self, parts: Iterable[AnswerPart]) -> tuple[AnswerPart, ...]:
        return tuple(map(self._with_id, parts))

    def _with_id(self, part: AnswerPart) -> AnswerPart:
        if part.kind == PartKind.ARGUMENTS and self._arguments is not None:
            self._arguments.append(part.text)
        if part.kind != PartKind.CALL:
            return part
        self._arguments = []
        # One token may complete several calls: the number of the call tells them apart.
        position = self._tokens + part.call
        return part._replace(id=call_id(self._request_id, self._index, position))
