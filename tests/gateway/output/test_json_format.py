from __future__ import annotations

import json

import pytest

from quire.gateway.output.formats import FALLBACK
from quire.gateway.output.parts import AnswerPart
from tests.support.gateway.output_answers import TOOLS, WEATHER, call, content, every_split, parse

CLOCK = '{"tool": "clock", "arguments": {}}'


def test_the_prompt_describes_each_tool() -> None:
    lines = FALLBACK.prompt(TOOLS).splitlines()
    described = [json.loads(line) for line in lines if line.startswith("{")]
    assert [tool["name"] for tool in described] == [tool.name for tool in TOOLS]
    assert described[0]["parameters"] == WEATHER.parameters
    assert '{"tool": "<name>", "arguments": {<arguments>}}' in FALLBACK.prompt(TOOLS)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{CLOCK} {CLOCK}", [*call("clock", "{}"), *call("clock", "{}", 1)]),
        (f"{CLOCK}\n{{}}", [*call("clock", "{}"), content("\n{}")]),
        (f"{CLOCK}\nDone.", [*call("clock", "{}"), content("Done.")]),
        (f"Call: {CLOCK}", [content(f"Call: {CLOCK}")]),
        ('{"a": 1}', [content('{"a": 1}')]),
        ('{"tool": "clock", "arguments": {"a": NaN}}', [content('{"tool": "clock", "arguments": {"a": NaN}}')]),
        ("", []),
    ],
)
def test_parts(text: str, parts: list[AnswerPart]) -> None:
    assert parse(FALLBACK.parser(TOOLS), text) == parts
    every_split(lambda: FALLBACK.parser(TOOLS), text)
