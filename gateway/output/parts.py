"""The parts of an answer: content, reasoning and tool calls.

A parser reads the text of one choice as it grows and returns parts. The parts depend on the text alone, not on how the
text was divided into pushes, except that a text part may come in several pieces.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple, Protocol


class PartKind(StrEnum):
    """The kind of text that a part adds to the answer."""

    CONTENT = "content"
    REASONING = "reasoning"
    # A tool call begins; the text is the name of the tool.
    CALL = "call"
    # A piece of the JSON text of the arguments of the call that began last.
    ARGUMENTS = "arguments"


class AnswerPart(NamedTuple):
    """A piece of an answer.

    call: number of the tool call within the choice, from 0; -1 outside of tool calls. id: the id of the tool call that
    begins with this part, set by the transcript (`call_id`).
    """

    kind: PartKind
    text: str
    call: int = -1
    id: str = ""


def call_id(request_id: str, choice: int, position: int) -> str:
    """Return the id of the tool call that begins with a token of a choice; `position` counts the tokens of the choice.

    The id follows from the tokens alone. So it is the same in a stream, after a recovery, in a resumed stream and for a
    repeated Idempotency-Key, and a client can run each tool call exactly once.
    """
    return "call_" + hashlib.sha256(f"{request_id}/{choice}/{position}".encode()).hexdigest()[:24]


def merged(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """Join neighbouring parts of the same kind and call: each tool call has one CALL and one ARGUMENTS part."""
    joined: list[AnswerPart] = []
    texts: list[str] = []
    for part in parts:
        is_same = joined and part.kind == joined[-1].kind != PartKind.CALL and part.call == joined[-1].call
        if not is_same:
            if joined:
                joined[-1] = joined[-1]._replace(text="".join(texts))
            joined.append(part)
            texts = []
        texts.append(part.text)
    if joined:
        joined[-1] = joined[-1]._replace(text="".join(texts))
    return joined


def is_complete(arguments: str) -> bool:
    """Return True if the arguments of a tool call are one JSON object: False if the answer ended inside the call."""
    try:
        return type(json.loads(arguments)) is dict
    except (ValueError, RecursionError):
        return False


def complete_calls(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """Return merged parts without the tool call in which the answer ended: a client must not run half a call."""
    complete: list[AnswerPart] = []
    call: AnswerPart | None = None
    for part in parts:
        if part.kind == PartKind.CALL:
            call = part
        elif part.kind != PartKind.ARGUMENTS:
            complete.append(part)
        elif call is not None and is_complete(part.text):
            complete += (call, part)
    return complete


class OutputParser(Protocol):
    """Divides the text of one choice into parts.

    The parser holds back text that may be the beginning of a marker. A marker is never part of the answer. The
    arguments of a call are JSON: the concatenation of its ARGUMENTS parts is one JSON object, unless the text ends
    inside it.
    """

    def push(self, text: str) -> list[AnswerPart]:
        """Return the parts that `text`, which follows the text so far, makes certain."""
        ...

    def finish(self) -> list[AnswerPart]:
        """End the text; return the parts that were held back."""
        ...


_new = tuple.__new__  # the constructor of a named tuple is slow


class PlainText:
    """The parser of a call without tools and without reasoning: all text is content."""

    def push(self, text: str) -> list[AnswerPart]:
        return [_new(AnswerPart, (PartKind.CONTENT, text, -1, ""))] if text else []

    def finish(self) -> list[AnswerPart]:
        return []
