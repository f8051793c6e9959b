"""JSON that was cut off: the input of a tool call in an answer that reached its last token."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

_CLOSING = {"{": "}", "[": "]"}
# A string, whose group `end` is empty if the text ends inside it, or a structural character.
_MARKS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?P<end>"?)|[{}\[\],]', re.DOTALL)
# A value is complete after one of the last places that `_scan` finds: the end of the text, or the place before it.
_PLACES = 4


def read_partial_object(text: str) -> dict[str, Any]:
    """The members of a JSON object that are complete in `text`, a beginning of its JSON; {} without any.

    A value that is cut off is left out with its key; arrays and objects around it keep their complete parts. The
    `anthropic` SDK reads a stream that was cut off in this way.
    """
    value = _read(text)
    if value is None:
        places = deque((at for at, _ in _scan(text)), maxlen=_PLACES)
        closed = (_read(text[:at] + _closing(text[:at])) for at in reversed(places))
        value = next((one for one in closed if one is not None), None)
    return value if type(value) is dict else {}


def _read(text: str) -> Any:
    """The value of JSON; None if it is not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _closing(text: str) -> str:
    """The brackets that close a text."""
    stack: list[str] = []
    for _, stack in _scan(text):  # noqa: B007 - the last one is the result
        pass
    return "".join(reversed(stack))


def _scan(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the places after which a value may be complete, and the brackets that close the text there."""
    stack: list[str] = []
    for found in _MARKS.finditer(text):
        mark = found[0]
        if mark == ",":
            yield found.start(), stack
        elif mark in _CLOSING:
            stack.append(_CLOSING[mark])
            yield found.end(), stack
        elif mark in "}]" and stack:
            stack.pop()
            yield found.end(), stack
        elif not found["end"] and mark.startswith('"'):  # the text ends inside a string
            return
    yield len(text), stack
