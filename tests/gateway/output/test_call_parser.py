"""Texts that are almost calls, in any pieces: nothing is lost, and nothing is half a call."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.gateway.output.formats import FORMATS
from quire.gateway.output.parts import PartKind
from tests.support.gateway.output_answers import TOOLS, assert_parts_are_sound, content, parse
from tests.support.gateway.output_cases import CASES, Case

_NOISE = ["", " ", "\n", "<", "{", "[", "}", '"', "\\", "\\u00", "é", "x", "null", "get_weather", "; ", "=", ")"]


def pieces_of(case: Case) -> list[str]:
    """The marks and words of the calls of a format."""
    return [*re.findall(r"\w+|<[^>]*>|\s+|[^\w\s]", case.two or case.one), case.one, case.two, *_NOISE]


def texts(case: Case) -> st.SearchStrategy[list[str]]:
    """Texts in pieces: parts of calls, cut anywhere, in any order."""
    part = st.sampled_from(pieces_of(case))
    cut = st.integers(0, len(case.one))
    calls = st.builds(lambda start, end: case.one[min(start, end) : max(start, end)], cut, cut)
    begins = st.builds(lambda end, rest: case.one[:end] + rest, cut, part)
    return st.lists(st.one_of(part, calls, begins), max_size=8)


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_do_not_depend_on_the_pieces(case: Case, is_forced: bool) -> None:
    form = FORMATS[case.name]

    @settings(max_examples=40, deadline=None)
    @given(texts(case))
    def check(pieces: list[str]) -> None:
        text = "".join(pieces)
        parts = parse(form.parser(TOOLS, is_forced), text)
        assert parse(form.parser(TOOLS, is_forced), *pieces) == parts
        assert parse(form.parser(TOOLS, is_forced), *text) == parts
        if is_forced:  # the beginning of a call is no content
            return
        assert_parts_are_sound(parts)
        if case.name != "harmony" and all(part.kind == PartKind.CONTENT for part in parts):
            assert parts == ([content(text)] if text else [])

    check()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_that_was_cut_off_after_its_name_leaves_no_content(case: Case) -> None:
    """Under a grammar a call begins with its name; the unfinished value at the end of its arguments is dropped."""
    seen = False
    for end in range(len(case.one)):
        parts = parse(FORMATS[case.name].parser(TOOLS, True), case.one[:end])
        kinds = [part.kind for part in parts]
        if PartKind.CALL in kinds:
            seen = True
            assert PartKind.CONTENT not in kinds[kinds.index(PartKind.CALL) :], case.one[:end]
        else:
            assert "".join(part.text for part in parts if part.kind == PartKind.CONTENT) in case.one
    assert seen
