"""The base of the parsers of tool calls: free text, in which calls begin at a trigger."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence

from quire.gateway.features.tools.growing_text import (
    GrowingText,
    MalformedCall,
    begun,
    parse_json,
    plain_text,
    without_spaces,
)
from quire.gateway.output.parts import AnswerPart, PartKind
from quire.gateway.output.tools import Besides, Tool

# Text is read in pieces of this length: the time of a step grows with the length of the unread text.
_PIECE_CHARS = 4096
_new = tuple.__new__  # the constructor of a named tuple is slow


class CallParser(ABC):
    """Divides text into content and tool calls.

    White space next to a call is dropped. Text that only begins like a call is content, unchanged.

    is_forced: a grammar guarantees the form of each call, so that its arguments are passed on as they grow. Without
    a grammar a call is held back until it is complete. besides: what the grammar allows besides calls. A call that is
    cut off under a grammar is no content, however short it is.
    """

    # Texts with which a call begins, anywhere in the answer.
    triggers: tuple[str, ...] = ()
    # True if a call may also begin at the beginning of the answer, without a trigger.
    begins_with_call = False
    # Where a call begins without a trigger: after this the grammar allows nothing else.
    opening: re.Pattern[str] | None = None

    def __init__(self, tools: Sequence[Tool], is_forced: bool = False, besides: Besides = Besides.TEXT) -> None:
        self.source = GrowingText()
        self.tools = {tool.name: tool for tool in tools}
        self.is_forced = is_forced
        self._besides = besides
        self._has_content = False
        # Where only calls are allowed, other text is the beginning of a mark at which the answer was cut off.
        self._has_no_text = is_forced and besides == Besides.NOTHING
        self._parts: list[AnswerPart] = []
        self._held: list[AnswerPart] = []
        self._calls = 0
        self._complete = 0
        self._reading = self._read()
        self._is_over = False
        # True while free text is read and no trigger has begun: then `_plain` tells if a text cannot begin one.
        self._is_in_text = False
        self._plain = plain_text(self.triggers)

    def push(self, text: str) -> list[AnswerPart]:
        """Returns the parts that `text`, which follows the text so far, makes certain."""
        # This runs for every token: the common case is text that is certain at once.
        if self._is_in_text and not self.source.unread and self._plain(text):
            self._has_content = True
            return [_new(AnswerPart, (PartKind.CONTENT, text, -1, ""))]
        parts: list[AnswerPart] = []
        for start in range(0, len(text), _PIECE_CHARS):
            self.source.unread += text[start : start + _PIECE_CHARS]
            parts += self._advance()
        return parts

    def finish(self) -> list[AnswerPart]:
        """Ends the text; returns the parts that were held back."""
        self.source.is_complete = True
        return self._advance()

    @abstractmethod
    def read_call(self, trigger: str) -> Generator[None, None, None]:
        """Read what follows a trigger, one call or several. Raises MalformedCall.

        trigger: the one that was read; empty at the beginning of the answer.
        """

    def begin_call(self, name: str) -> None:
        """Begin a call. Raises MalformedCall if there is no such tool."""
        if name not in self.tools:
            raise MalformedCall("no such tool")
        self._emit(AnswerPart(PartKind.CALL, name, self._calls))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """Continue the arguments of the call that began last."""
        self._emit(AnswerPart(PartKind.ARGUMENTS, text, self._calls - 1))

    def read_arguments(self) -> Generator[None, None, None]:
        """Read a JSON object as the arguments of the call that began last. Raises MalformedCall."""
        text = yield from self.source.json_object(self.arguments)
        if not self.is_forced:
            parse_json(text)

    def read_named_arguments(self, name: str) -> Generator[None, None, None]:
        """Read the arguments of a call of this tool; the call begins when they do. Raises MalformedCall."""
        if (yield from self.source.peek()) != "{":
            raise MalformedCall("no JSON object")
        self.begin_call(name)
        yield from self.read_arguments()

    def read_json_call(self, name_key: str, arguments_keys: tuple[str, ...]) -> Generator[None, None, None]:
        """Read a JSON object with the name and the arguments of a call. Other keys may have strings as values.

        Raises MalformedCall.
        """
        source = self.source
        name, early, is_done = "", "", False
        yield from source.literal("{")
        while True:
            yield from source.spaces()
            key = yield from source.json_string()
            yield from source.spaces()
            yield from source.literal(":")
            yield from source.spaces()
            if key in arguments_keys and name:
                yield from self.read_named_arguments(name)
                is_done = True
            elif key in arguments_keys:
                early = yield from source.json_object(lambda text: None)
            else:
                value = yield from source.json_string()
                name = value if key == name_key else name
            yield from source.spaces()
            if (yield from source.one_of(",", "}")) == "}":
                break
        if not is_done:
            if not early:
                raise MalformedCall("no arguments")
            parse_json(early)
            self.begin_call(name)
            self.arguments(early)

    def end_call(self) -> None:
        """End a call that is complete and valid: what follows cannot make it malformed any more."""
        self._parts += self._held
        self._held.clear()
        self._complete = self._calls
        self.source.mark()

    def emit_text(self, kind: PartKind, text: str) -> None:
        """Emit content or reasoning."""
        if text:
            self._has_content = self._has_content or kind == PartKind.CONTENT
            self._parts.append(AnswerPart(kind, text))

    def _emit_content(self, text: str) -> None:
        if not self._has_no_text:
            self.emit_text(PartKind.CONTENT, text)

    def is_certain(self, trigger: str = "") -> bool:
        """Tell if the grammar allows only a call where the text is, after a trigger or without one."""
        if not self.is_forced or self._calls or self._has_no_text:
            return self.is_forced
        if self._besides == Besides.JSON:  # whose strings may contain a trigger
            return bool(trigger) and not self._has_content
        text = "".join(self.source.taken) + self.source.unread
        return bool(trigger or (self.opening and self.opening.match(text)))

    def _emit(self, part: AnswerPart) -> None:
        (self._parts if self.is_forced else self._held).append(part)

    def _advance(self) -> list[AnswerPart]:
        if not self._is_over:
            try:
                next(self._reading)
            except StopIteration:
                self._is_over = True
        parts, self._parts = self._parts, []
        return parts

    def _read(self) -> Generator[None, None, None]:
        if self.begins_with_call:
            self.source.mark()
            yield from self.source.spaces()
            yield from self._read_or_give_back("")
        while trigger := (yield from self._read_text()):
            yield from self._read_or_give_back(trigger)

    def _read_text(self) -> Generator[None, None, str]:
        """Emit content up to the next trigger, and return that; empty at the end of the answer."""
        source = self.source
        while True:
            found = [(index, one) for one in self.triggers if (index := source.unread.find(one)) >= 0]
            if found:
                index, trigger = min(found)
                self._emit_content(source.take(len(without_spaces(source.unread[:index]))))
                source.mark()  # the white space before the trigger belongs to the call
                source.take(source.unread.index(trigger) + len(trigger))
                return trigger
            if source.is_complete:
                rest = source.take(len(source.unread))
                if not self.is_certain():
                    self._emit_content(rest)
                return ""
            held = max((begun(source.unread, one) for one in self.triggers), default=0)
            sure = without_spaces(source.unread[: len(source.unread) - held])
            self._emit_content(source.take(len(sure)))
            source.mark()
            self._is_in_text = not self._has_no_text
            yield
            self._is_in_text = False

    def _read_or_give_back(self, trigger: str) -> Generator[None, None, None]:
        """Read a call; if it is malformed, emit its text so far as content."""
        try:
            yield from self.read_call(trigger)
        except MalformedCall:
            is_cut = self.source.is_complete and self.is_certain(trigger)
            if is_cut:  # the beginning of a call or of a value that was not passed on is no content
                self.source.take(len(self.source.unread))
            if is_cut or (self.is_forced and self._calls > self._complete):
                self.end_call()
                return
            self._calls = self._complete
            self._held.clear()
            text = "".join(self.source.taken)
            if trigger:
                self.emit_text(PartKind.CONTENT, text)
            else:  # a trigger may follow
                self.source.unread = text + self.source.unread
            return
        self.end_call()
        yield from self.source.spaces()
