"""Text that grows, and the generators that read it: a generator yields where it needs more text.

A format of tool calls is written as straight code that reads one literal, name or JSON object after the other, and
works for any division of the text into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Any

MAX_NAME_CHARS = 256
# Maximum number of white space characters that are held back, and dropped before a marker.
_MAX_SPACES = 256

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
# Outside of strings, JSON has numbers, three words, white space and punctuation.
_OUTSIDE_STRING = re.compile(r"[-+0-9.eEtrufalsn\s:,]+")


class MalformedCall(ValueError):
    """The text is not the call that it seemed to be."""


class GrowingText:
    """The unread part of a text that grows. `taken`: the text that was read since `mark`, in pieces."""

    def __init__(self) -> None:
        self.unread = ""
        self.is_complete = False
        self.taken: list[str] = []

    def mark(self) -> None:
        """Forget the text that was read."""
        self.taken.clear()

    def take(self, length: int) -> str:
        """Read that many characters."""
        text, self.unread = self.unread[:length], self.unread[length:]
        self.taken.append(text)
        return text

    def more(self) -> Generator[None, None, None]:
        """Wait for more text. Raises MalformedCall if the text is complete."""
        if self.is_complete:
            raise MalformedCall("the text ends")
        yield

    def spaces(self) -> Generator[None, None, None]:
        """Read white space, perhaps none."""
        while True:
            self.take(len(self.unread) - len(self.unread.lstrip()))
            if self.unread or self.is_complete:
                return
            yield

    def one_of(self, *options: str) -> Generator[None, None, str]:
        """Read the first of these options with which the text continues; return it. Raises MalformedCall."""
        while True:
            for option in options:
                if self.unread.startswith(option):
                    self.take(len(option))
                    return option
                if option.startswith(self.unread) and not self.is_complete:
                    break
            else:
                raise MalformedCall(f"the text does not continue with any of {options}")
            yield

    def closing(self, *options: str) -> Generator[None, None, str]:
        """Read the first of these options with which the text continues; return it. Raises MalformedCall.

        A text that ends before an option or inside it is read as well; the result is empty then.
        """
        while not self.is_complete:
            if self.unread.startswith(options) or not any(option.startswith(self.unread) for option in options):
                return (yield from self.one_of(*options))
            yield
        if not self.unread.startswith(options) and any(option.startswith(self.unread) for option in options):
            self.take(len(self.unread))
            return ""
        return (yield from self.one_of(*options))

    def literal(self, text: str) -> Generator[None, None, None]:
        """Read this text. Raises MalformedCall."""
        yield from self.one_of(text)

    def peek(self) -> Generator[None, None, str]:
        """Return the next character without reading it; empty at the end of the text."""
        while not self.unread and not self.is_complete:
            yield
        return self.unread[:1]

    def word(self, ends: str) -> Generator[None, None, str]:
        """Read to the first of the characters `ends`, which stays unread. Raises MalformedCall after
        MAX_NAME_CHARS."""
        length = 0
        while True:
            while length < len(self.unread) and self.unread[length] not in ends:
                length += 1
            if length > MAX_NAME_CHARS:
                raise MalformedCall("the name is too long")
            if length < len(self.unread):
                return self.take(length)
            yield from self.more()

    def until(self, end: str, max_chars: int = MAX_NAME_CHARS) -> Generator[None, None, str]:
        """Read to `end` and past it; return the text before it. Raises MalformedCall after `max_chars`."""
        while (index := self.unread.find(end, 0, max_chars + len(end))) < 0:
            if len(self.unread) >= max_chars + len(end):
                raise MalformedCall(f"{end!r} is missing")
            yield from self.more()
        text = self.take(index)
        self.take(len(end))
        return text

    def stream_until(
        self, ends: Sequence[str], emit: Callable[[str], None], stripped: Callable[[str], str] | None = None
    ) -> Generator[None, None, str]:
        """Read to the first of `ends` and past it; pass the text before it to `emit` piece by piece.

        stripped: returns a text without the part that is dropped before an end, by default white space. Returns the
        end. Raises MalformedCall at the end of the text; the part that would be dropped is unread then.
        """
        stripped = stripped or without_spaces
        while True:
            found = [(index, end) for end in ends if (index := self.unread.find(end)) >= 0]
            if found:
                index, end = min(found)
                emit(self.take(len(stripped(self.unread[:index]))))
                self.take(self.unread.index(end) + len(end))
                return end
            sure = len(self.unread) - max(begun(self.unread, end) for end in ends)
            emit(self.take(len(stripped(self.unread[:sure]))))
            yield from self.more()

    def json_string(self) -> Generator[None, None, str]:
        """Read a JSON string of at most MAX_NAME_CHARS; return its value. Raises MalformedCall."""
        yield from self.literal('"')
        position = 0
        while True:
            position = _string_end(self.unread, position)
            if position > MAX_NAME_CHARS:
                raise MalformedCall("the string is too long")
            if self.unread[position : position + 1] == '"':
                break
            if position < len(self.unread) and self.unread[position] != "\\":
                raise MalformedCall("a control character in a JSON string")
            yield from self.more()
        text = self.take(position)
        self.take(1)
        return str(parse_json(f'"{text}"'))

    def json_object(self, emit: Callable[[str], None]) -> Generator[None, None, str]:
        """Read a JSON object; pass it to `emit` piece by piece and return all of it. Raises MalformedCall.

        The pieces are checked for strings and brackets only; `parse_json` checks the whole.
        """
        if (yield from self.peek()) != "{":
            raise MalformedCall("no JSON object")
        pieces: list[str] = []
        depth, is_in_string, is_json = 0, False, True
        while True:
            text, position = self.unread, 0
            while position < len(text) and is_json:
                if is_in_string:
                    position = _string_end(text, position)
                    if position == len(text) or text[position] == "\\":
                        break
                    is_in_string, is_json = False, text[position] == '"'
                elif match := _OUTSIDE_STRING.match(text, position):
                    position = match.end()
                    continue
                elif text[position] in "{[":
                    depth += 1
                elif text[position] in "}]":
                    depth -= 1
                else:
                    is_in_string = is_json = text[position] == '"'
                position += is_json
                if depth == 0:
                    break
            if position:
                pieces.append(self.take(position))
                emit(pieces[-1])
            if not is_json:
                raise MalformedCall("a character that JSON does not have here")
            if depth == 0:
                return "".join(pieces)
            yield from self.more()


def _string_end(text: str, position: int) -> int:
    """Return where the rest of a JSON string stops: at its quote, at a control character, at a backslash whose next
    character is not there yet, or at the end of the text."""
    while True:
        match = _IN_STRING.match(text, position)
        assert match is not None
        position = match.end()
        if position + 1 >= len(text) or text[position] != "\\":
            return position
        position += 2


def without_spaces(text: str) -> str:
    """Return a text without white space at its end."""
    return text[: max(len(text.rstrip()), len(text) - _MAX_SPACES)]


def begun(text: str, marker: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a marker that continues."""
    first = marker[0]
    position = text.find(first, max(0, len(text) - len(marker) + 1))
    while position >= 0:
        if marker.startswith(text[position:]):
            return len(text) - position
        position = text.find(first, position + 1)
    return 0


@lru_cache(maxsize=32)
def plain_text(markers: tuple[str, ...]) -> Callable[[str], object]:
    """Return a function that is true for a text in which no marker begins, and that does not end in white space."""
    firsts = "".join(re.escape(first) for first in sorted({marker[0] for marker in markers}))
    pattern = rf"[^{firsts}]*[^{firsts}\s]" if firsts else r"(?s:.*)\S"
    return re.compile(pattern).fullmatch


def parse_json(text: str) -> Any:
    """Parse JSON. Raises MalformedCall, also for NaN and for what nests too deep."""

    def refuse(name: str) -> None:
        raise MalformedCall(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise MalformedCall("not JSON") from error
