"""Stop strings are cut exactly, however the text arrives, and no part of one is ever shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.shared.text.stop_strings import StopStringFilter

letters = st.text("abc", max_size=12)
stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def expected(text: str, stop: list[str]) -> tuple[str, str | None]:
    """By definition: the match that is complete first, and of those the one that starts first."""
    for end in range(1, len(text) + 1):
        ending = [string for string in stop if text[:end].endswith(string)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@st.composite
def split(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(letters, stops, st.data())
def test_any_cut_of_the_text_gives_what_the_definition_says(text: str, stop: list[str], data: st.DataObject) -> None:
    passing = StopStringFilter(stop)
    shown = "".join(passing.push(piece) for piece in data.draw(split(text))) + passing.flush()
    assert (shown, passing.matched) == expected(text, stop)


@given(letters, stops)
def test_no_part_of_a_stop_string_leaks_before_it_is_known(text: str, stop: list[str]) -> None:
    passing = StopStringFilter(stop)
    shown = ""
    for character in text:
        shown += passing.push(character)
        # The emitted text is a prefix of the result, whatever comes next.
        for rest in ["", *stop]:
            assert expected(text[: len(shown)] + text[len(shown) :] + rest, stop)[0].startswith(shown)
    passing.flush()


def test_a_stop_string_at_every_split_is_cut() -> None:
    text = "Hello <|end|> world"
    for at in range(len(text)):
        passing = StopStringFilter(["<|end|>"])
        assert passing.push(text[:at]) + passing.push(text[at:]) + passing.flush() == "Hello "
        assert passing.matched == "<|end|>"


def test_without_stop_strings_nothing_is_held_back() -> None:
    passing = StopStringFilter([])
    assert passing.push("anything") == "anything"
    assert passing.flush() == ""


def test_what_only_looked_like_a_stop_string_comes_out_at_the_end() -> None:
    passing = StopStringFilter(["stop"])
    assert passing.push("please sto") == "please "
    assert passing.flush() == "sto"


def test_nothing_comes_out_after_a_match() -> None:
    passing = StopStringFilter(["b"])
    assert passing.push("abc") == "a"
    assert passing.push("more") == ""
    assert passing.flush() == ""
