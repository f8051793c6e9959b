from __future__ import annotations

import pytest

from quire.gateway.output.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from quire.gateway.output.formats import FORMATS
from quire.gateway.output.parts import AnswerPart
from tests.support.gateway.output_answers import TOOLS, call, content, every_split, parse

V3 = f"{CALL_BEGIN}function{SEPARATOR}clock\n```json\n{{}}\n```{CALL_END}"
V31 = f"{CALL_BEGIN}clock{SEPARATOR}{{}}{CALL_END}"


@pytest.mark.parametrize("name", ["deepseek", "deepseek_v31"])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{CALLS_BEGIN}{V3}\n{V31}{CALLS_END}", [*call("clock", "{}"), *call("clock", "{}", 1)]),
        (f"{CALLS_BEGIN}{V31}", call("clock", "{}")),
        (f"Look. {CALLS_BEGIN}{V3[:-3]}", [content("Look."), *call("clock", "{}")]),
        (f"{CALLS_BEGIN}{V31}x", [*call("clock", "{}"), content("x")]),
        (f"{CALLS_BEGIN}{CALLS_END}", [content(f"{CALLS_BEGIN}{CALLS_END}")]),
        (f"{CALLS_BEGIN}{V3.replace('json', 'xml')}", [content(f"{CALLS_BEGIN}{V3.replace('json', 'xml')}")]),
    ],
)
def test_both_forms_are_read(name: str, text: str, parts: list[AnswerPart]) -> None:
    assert parse(FORMATS[name].parser(TOOLS), text) == parts
    every_split(lambda: FORMATS[name].parser(TOOLS), text)
