from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.gateway.output.growing_text import (
    GrowingText,
    MalformedCall,
    begun,
    parse_json,
    plain_text,
    without_spaces,
)

Reading = Callable[[GrowingText], Generator[None, None, Any]]


def read(reading: Reading, *pieces: str) -> tuple[Any, str]:
    """The value that is read from a text in pieces, and the text after it."""
    source = GrowingText()
    generator = reading(source)
    waiting = list(pieces)
    while True:
        try:
            next(generator)
        except StopIteration as stop:
            return stop.value, source.unread + "".join(waiting)
        if waiting:
            source.unread += waiting.pop(0)
        else:
            assert not source.is_complete, "a generator yields after the end of the text"
            source.is_complete = True


@pytest.mark.parametrize(
    ("reading", "text", "value", "rest"),
    [
        (lambda source: source.spaces(), " \n\tx", None, "x"),
        (lambda source: source.spaces(), "", None, ""),
        (lambda source: source.literal("<a>"), "<a>b", None, "b"),
        (lambda source: source.one_of("<a>", "<ab>", "<"), "<ab>", "<ab>", ""),
        (lambda source: source.one_of("<a>", "<"), "<b", "<", "b"),
        (lambda source: source.one_of("<a>", "<"), "<", "<", ""),
        (lambda source: source.closing("<a>", "<b>"), "<b>c", "<b>", "c"),
        (lambda source: source.closing("<a>", "<b>"), "<", "", ""),
        (lambda source: source.closing("<a>", "<b>"), "", "", ""),
        (lambda source: source.peek(), "ab", "a", "ab"),
        (lambda source: source.peek(), "", "", ""),
        (lambda source: source.word("[{"), "name[x", "name", "[x"),
        (lambda source: source.until("</a>"), "b<c</a>d", "b<c", "d"),
        (lambda source: source.json_string(), r'"a\"\u00e9\\" ', 'a"é\\', " "),
        (lambda source: source.json_object(lambda text: None), '{"a": [{"}": "\\"{"}, -1.5e3, null]} }', None, " }"),
        (lambda source: source.json_object(lambda text: None), "{}{", "{}", "{"),
    ],
)
def test_reading(reading: Reading, text: str, value: Any, rest: str) -> None:
    expected = (text[: len(text) - len(rest)] if value is None and text.startswith("{") else value, rest)
    assert read(reading, text) == expected
    assert read(reading, *text) == expected


@pytest.mark.parametrize(
    ("reading", "text"),
    [
        (lambda source: source.literal("<a>"), "<b>"),
        (lambda source: source.literal("<a>"), "<a"),
        (lambda source: source.closing("<a>", "<b>"), "<c"),
        (lambda source: source.word("["), "x" * 257 + "["),
        (lambda source: source.word("["), "x"),
        (lambda source: source.until(">"), "x" * 257 + ">"),
        (lambda source: source.until(">"), "x"),
        (lambda source: source.json_string(), "x"),
        (lambda source: source.json_string(), '"a\nb"'),
        (lambda source: source.json_string(), '"\\x"'),
        (lambda source: source.json_string(), '"' + "x" * 257 + '"'),
        (lambda source: source.json_string(), '"a\\'),
        (lambda source: source.json_object(lambda text: None), "[]"),
        (lambda source: source.json_object(lambda text: None), "{x}"),
        (lambda source: source.json_object(lambda text: None), '{"a\n"}'),
        (lambda source: source.json_object(lambda text: None), '{"a": "'),
        (lambda source: source.json_object(lambda text: None), "{]x"),
        (lambda source: source.stream_until((">",), lambda text: None), "x"),
    ],
)
def test_malformed(reading: Reading, text: str) -> None:
    if text == "{]x":  # brackets of the wrong kind: `parse_json` finds them
        value, _ = read(reading, text)
        with pytest.raises(MalformedCall):
            parse_json(value)
        return
    for pieces in ([text], text):
        with pytest.raises(MalformedCall):
            read(reading, *pieces)


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    st.booleans(),
)
def test_any_json_object_is_read_whole(value: Any, is_ascii: bool) -> None:
    text = json.dumps({"value": value}, ensure_ascii=is_ascii)
    pieces: list[str] = []
    assert read(lambda source: source.json_object(pieces.append), *text, "}") == (text, "}")
    assert "".join(pieces) == text


def test_text_streams_up_to_an_end() -> None:
    seen: list[str] = []
    for pieces in (["a <b \n</a>c"], "a <b \n</a>c"):
        assert read(lambda source: source.stream_until(("</a>", "</b>"), seen.append), *pieces) == ("</a>", "c")
    assert "".join(seen) == "a <b" * 2
    assert len(without_spaces("a" + " " * 1000)) == 1 + 1000 - 256


def test_the_beginning_of_a_marker() -> None:
    assert [begun(text, "<<a>") for text in ("", "x", "<", "x<<", "<<<", "<<a", "<x")] == [0, 0, 1, 2, 2, 3, 0]


@pytest.mark.parametrize("text", ["NaN", '{"a": Infinity}', "{", "[" * 100_000, "1" * 5000, ""])
def test_what_is_not_json(text: str) -> None:
    with pytest.raises(MalformedCall):
        parse_json(text)


@given(st.text(st.sampled_from("<t>[ \n\u2003ax"), max_size=6))
def test_no_marker_begins_in_plain_text_and_no_space_ends_it(text: str) -> None:
    markers = ("<t>", "[x")
    if plain_text(markers)(text):
        assert all(begun(text, marker) == 0 and marker not in text for marker in markers)
        assert text
        assert without_spaces(text) == text


def test_ordinary_words_are_plain_text() -> None:
    assert plain_text(("<t>", "[x"))(" a word, 1 > 0")
    assert plain_text(("<t>",))("two\nlines")
    assert plain_text(("]",))("[")
    assert not plain_text(("<t>",))("1 < 2")
    assert plain_text(())("any\n<text>")
    assert not plain_text(())("any ")
