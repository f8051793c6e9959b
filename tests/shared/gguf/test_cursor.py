from __future__ import annotations

import struct
from pathlib import Path

import pytest

from quire.shared.gguf import cursor
from quire.shared.gguf.cursor import HeaderCursor
from quire.shared.gguf.errors import GGUFError
from tests.support.gguf_bytes import text, value


def over(content: bytes) -> HeaderCursor:
    return HeaderCursor(Path("a.gguf"), memoryview(content))


def test_values_follow_each_other() -> None:
    at = over(text("key") + struct.pack("<iQ", -5, 7))
    assert (at.text("a"), at.number(5, "b"), at.number(10, "c")) == ("key", -5, 7)
    with pytest.raises(GGUFError, match="d ends past the end of the file, expected 1 bytes at byte 23"):
        at.number(0, "d")


def test_arrays_are_passed_without_being_decoded() -> None:
    at = over(value(9, (8, ["a", "bc"]))[4:] + value(9, (4, [1, 2, 3]))[4:] + b"x")
    assert at.skip_array("strings") == (8, 2, 12)
    kind, count, _ = at.skip_array("numbers")
    assert (kind, count) == (4, 3)
    assert at.take(1, "rest") == at.position - 1


def test_the_strings_of_all_arrays_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor, "MAX_STRINGS", 3)
    content = value(9, (8, ["a", "b"]))[4:]
    at = over(content * 2)
    at.skip_array("first")
    with pytest.raises(GGUFError, match="second brings the strings in arrays to 4, expected at most 3"):
        at.skip_array("second")
