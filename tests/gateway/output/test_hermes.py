from __future__ import annotations

import pytest

from quire.gateway.output.formats import FORMATS
from quire.gateway.output.parts import AnswerPart
from tests.support.gateway.output_answers import TOOLS, call, content, every_split, parse

HERMES = FORMATS["hermes"]
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
IN_PARIS = '{"city": "Paris", "days": 3}'


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Hello.\n", [content("Hello.\n")]),
        (PARIS, call("get_weather", IN_PARIS)),
        (f"\n{PARIS}\n{CLOCK}\n", [*call("get_weather", IN_PARIS), *call("clock", "{}", 1)]),
        (f"I look.\n\n{PARIS}", [content("I look."), *call("get_weather", IN_PARIS)]),
        (f"{PARIS}\nDone.", [*call("get_weather", IN_PARIS), content("Done.")]),
        ('<tool_call>{"arguments":{},"name":"clock"}</tool_call>', call("clock", "{}")),
        ('<tool_call>{"name": "any-thing.v2", "arguments": {"a": [{"b": "}\\"\\\\"}]}}', None),
        ('a <tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>', None),
        ("The tag <tool_call> begins a call, < and <tool_ do not.", None),
        ('<tool_call>{"name": "clock"}</tool_call> x', None),
        ('<tool_call>{"name": "clock", "arguments": "{}"}</tool_call>', None),
        (f"bad: <tool_call>{{}}\n{CLOCK}", [content("bad: <tool_call>{}"), *call("clock", "{}")]),
    ],
)
def test_parts(text: str, parts: list[AnswerPart] | None, is_forced: bool) -> None:
    """None: the text comes back as it is."""
    if parts is None and text.endswith("}}"):
        parts = call("any-thing.v2", '{"a": [{"b": "}\\"\\\\"}]}')
    assert parse(HERMES.parser(TOOLS, is_forced), text) == ([content(text)] if parts is None else parts)
    every_split(lambda: HERMES.parser(TOOLS, is_forced), text)


@pytest.mark.parametrize("text", ["<tool_call><tool_call>", '<tool_call>{"name": "clock", "argu'])
def test_the_beginning_of_a_call_is_content_without_a_grammar(text: str) -> None:
    assert parse(HERMES.parser(TOOLS), text) == [content(text)]
