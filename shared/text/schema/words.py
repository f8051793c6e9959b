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
    if "^" not in pattern or "$" not in pattern or any(one in pattern for one in _DIFFERENT):
        return None
    try:
        parsed = _parser.parse(pattern)
        if parsed.state.flags & ~re.UNICODE:
            return None
        # The texts so far, each with whether it has ended; None before the beginning.
        found = _continued({(None, False): None}, parsed)
    except (_Many, re.error, OverflowError, RecursionError):
        return None
    listed = [text for text, has_ended in found if text is not None and has_ended]
    return listed if len(listed) == len(found) else None


_Texts = dict[tuple[str | None, bool], None]


def _continued(found: _Texts, parsed: Any) -> _Texts:
    """Return texts continued by what a parsed expression matches. Raises _Many."""
    for code, value in parsed:
        if code is codes.LITERAL:
            found = _with_letters(found, [value])
        elif code is codes.IN:
            found = _with_letters(found, _letters(value))
        elif code is codes.AT and value is codes.AT_BEGINNING:
            found = dict.fromkeys(("", has_ended) for text, has_ended in found if not text)
        elif code is codes.AT and value is codes.AT_END:
            found = dict.fromkeys((text, True) for text, _ in found)
        elif code is codes.BRANCH:
            found = {one: None for part in value[1] for one in _continued(found, part)}
        elif code is codes.SUBPATTERN and not value[1] and not value[2]:
            found = _continued(found, value[3])
        elif code is codes.MAX_REPEAT or code is codes.MIN_REPEAT:
            found = _repeated(found, *value)
        else:
            raise _Many
        if len(found) > _MAX_WORDS or any(text is not None and len(text) > _MAX_CHARACTERS for text, _ in found):
            raise _Many
    if any(text is None and has_ended for text, has_ended in found):
        raise _Many
    return found


def _with_letters(found: _Texts, letters: list[int]) -> _Texts:
    if any(text is None for text, _ in found) or len(letters) > _MAX_WORDS:
        raise _Many
    return {(f"{text}{chr(letter)}", False): None for text, has_ended in found if not has_ended for letter in letters}


def _letters(members: Any) -> list[int]:
    """Return the characters of a class."""
    found: list[int] = []
    for code, value in members:
        if code is codes.LITERAL:
            found.append(value)
        elif code is codes.RANGE and value[1] - value[0] < _MAX_WORDS:
            found += range(value[0], value[1] + 1)
        else:
            raise _Many
    return found


def _repeated(found: _Texts, low: int, high: int, parsed: Any) -> _Texts:
    # Any repetition beyond this makes too long a text, or the empty one.
    for _ in range(min(low, _MAX_CHARACTERS + 1)):
        if (longer := _continued(found, parsed)) == found:
            break
        found = longer
    last = found
    for _ in range(min(high - low, _MAX_CHARACTERS + 1)):
        last = {one: None for one in _continued(last, parsed) if one not in found}
        if not last:
            break
        found = found | last
    return found
