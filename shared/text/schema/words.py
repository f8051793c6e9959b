"""The texts of a pattern that matches few."""

from __future__ import annotations

import re
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

_MAX_WORDS = 64
_MAX_CHARACTERS = 200
# Constructs that Python and Rust read in different ways.
_DIFFERENT = ("[[", "&&", "--", "~~", "||", "{,")


class _Many(Exception):
    """The texts of a pattern are too many, or the pattern has other constructs."""


def words(pattern: str) -> list[str] | None:
    """Return the texts that a pattern matches; None if they are many, or if it has more than plain constructs."""
    if "^" not in pattern or "$" not in pattern or any(sign in pattern for sign in _DIFFERENT):
        return None
    try:
        parsed = _parser.parse(pattern)
        if parsed.state.flags & ~re.UNICODE:
            return None
        # The texts so far, each with whether it has ended; None before the beginning.
        texts = _continued({(None, False): None}, parsed)
    except (_Many, re.error, OverflowError, RecursionError):
        return None
    listed = [text for text, has_ended in texts if text is not None and has_ended]
    return listed if len(listed) == len(texts) else None


_Texts = dict[tuple[str | None, bool], None]


def _continued(texts: _Texts, parsed: Any) -> _Texts:
    """Return texts continued by what a parsed expression matches. Raise _Many."""
    for code, value in parsed:
        if code is codes.LITERAL:
            texts = _with_letters(texts, [value])
        elif code is codes.IN:
            texts = _with_letters(texts, _letters(value))
        elif code is codes.AT and value is codes.AT_BEGINNING:
            texts = dict.fromkeys(("", has_ended) for text, has_ended in texts if not text)
        elif code is codes.AT and value is codes.AT_END:
            texts = dict.fromkeys((text, True) for text, _ in texts)
        elif code is codes.BRANCH:
            texts = {state: None for part in value[1] for state in _continued(texts, part)}
        elif code is codes.SUBPATTERN and not value[1] and not value[2]:
            texts = _continued(texts, value[3])
        elif code is codes.MAX_REPEAT or code is codes.MIN_REPEAT:
            texts = _repeated(texts, *value)
        else:
            raise _Many
        if len(texts) > _MAX_WORDS or any(text is not None and len(text) > _MAX_CHARACTERS for text, _ in texts):
            raise _Many
    if any(text is None and has_ended for text, has_ended in texts):
        raise _Many
    return texts


def _with_letters(texts: _Texts, letters: list[int]) -> _Texts:
    if any(text is None for text, _ in texts) or len(letters) > _MAX_WORDS:
        raise _Many
    return {(f"{text}{chr(letter)}", False): None for text, has_ended in texts if not has_ended for letter in letters}


def _letters(members: Any) -> list[int]:
    """Return the characters of a class."""
    letters: list[int] = []
    for code, value in members:
        if code is codes.LITERAL:
            letters.append(value)
        elif code is codes.RANGE and value[1] - value[0] < _MAX_WORDS:
            letters += range(value[0], value[1] + 1)
        else:
            raise _Many
    return letters


def _repeated(texts: _Texts, low: int, high: int, parsed: Any) -> _Texts:
    # Any repetition beyond this makes too long a text, or the empty text.
    for _ in range(min(low, _MAX_CHARACTERS + 1)):
        if (longer := _continued(texts, parsed)) == texts:
            break
        texts = longer
    last = texts
    for _ in range(min(high - low, _MAX_CHARACTERS + 1)):
        last = {state: None for state in _continued(last, parsed) if state not in texts}
        if not last:
            break
        texts = texts | last
    return texts
