from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.shared.text.schema import patterns
from tests.support.schema_checks import accepted

TEXTS = ["", "f", "fo", "foo", "foox", "b", "bar", "a.b", "a/b", "ä", "\n"]


def matches(pattern: str, text: str) -> bool:
    """Search as Python does, which writes `\\x{e4}` in another way."""
    pattern = re.sub(r"\\x\{([0-9a-f]+)\}", lambda code: re.escape(chr(int(code[1], 16))), pattern)
    return bool(re.search(pattern.replace("$", r"\Z"), text))  # `$` of Python matches before a newline, too


@given(st.lists(st.sampled_from(TEXTS), max_size=5), st.sampled_from(TEXTS) | st.text("fobar./ä", max_size=4))
def test_patterns_of_texts(texts: list[str], text: str) -> None:
    outside, elsewhere = patterns.none_of(texts), patterns.none_starting_with(texts)
    assert outside is not None
    assert matches(outside, text) is (text not in texts)
    assert (elsewhere is not None and matches(elsewhere, text)) is (not text.startswith(tuple(texts)))


def test_llguidance_reads_these_patterns() -> None:
    for pattern in (patterns.none_of(["foo", "a/b", "ä"]), patterns.none_starting_with(["fo", "ä"])):
        assert pattern is not None
        expected = [text for text in TEXTS if matches(pattern, text)]
        assert accepted({"type": "string", "pattern": pattern}, *TEXTS) == expected
    assert accepted({"type": "string", "pattern": patterns.length_between(1, 3)}, *TEXTS) == [
        text for text in TEXTS if 1 <= len(text) <= 3
    ]


def test_texts_that_are_too_long_have_no_complement() -> None:
    assert patterns.none_of(["x" * 3000]) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "^(?=.*[0-9])(?=.{3,5}$)[a-z0-9]+$",
        "^(?!foo|bar)[a-z]+$",
        "^(?!foo$)[a-z]*$",
        "^(?!(?:foo|bar)$).*$",
        r"^(?!a\.b).+$",
        "^(?=fo)(?!foo)[^|]*$",
        "^(?!)a",
    ],
)
def test_lookaheads_at_the_beginning_become_patterns(pattern: str) -> None:
    texts = [*TEXTS, "ab1", "abcdef1", "foo1", "barx", "baz", "a"]
    found = patterns.without_lookaheads(pattern)
    if found is None:
        assert pattern == "^(?!)a"
        return
    assert not any("(?=" in one or "(?!" in one for one in found)
    for text in texts:
        assert all(matches(one, text) for one in found) is matches(pattern, text), text
    assert accepted({"type": "string", "pattern": pattern}, *texts) == [
        text for text in texts if matches(pattern, text)
    ]


@pytest.mark.parametrize("pattern", ["a", "^a(?=b)", "^(?!a)b|c", "^(?!a+)b", "^(?!.*a)b", "(?=a)b", "^(?=a"])
def test_other_lookaheads_are_left_to_llguidance(pattern: str) -> None:
    assert patterns.without_lookaheads(pattern) is None
