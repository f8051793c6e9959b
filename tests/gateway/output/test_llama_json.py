from __future__ import annotations

import pytest

from quire.gateway.output.formats import FORMATS
from quire.gateway.output.parts import AnswerPart
from quire.gateway.output.tools import ToolChoice
from quire.shared.text.grammar import special_tokens
from tests.support.gateway.output_answers import TOOLS, Answers, byte_tokenizer, call, content, every_split, parse

LLAMA = FORMATS["llama3_json"]
CLOCK = '{"name": "clock", "parameters": {}}'
CODE = '<|python_tag|>brave_search.call(query="x")'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"<|python_tag|>{CLOCK}", call("clock", "{}")),
        (f"I look. <|python_tag|>{CLOCK}", [content("I look."), *call("clock", "{}")]),
        (f"\n\n<|python_tag|>{CLOCK}", call("clock", "{}")),
        ('{"type": "function", "name": "clock", "parameters": {}}', call("clock", "{}")),
        ('{"name": "clock", "arguments": {}}', call("clock", "{}")),
        (f"{CLOCK};{CLOCK} ", [*call("clock", "{}"), *call("clock", "{}", 1)]),
        (f"{CLOCK}; x", [*call("clock", "{}"), content("; x")]),
        (CODE, [content(CODE)]),
        ('{"name": "Bob", "age": 3}', [content('{"name": "Bob", "age": 3}')]),
        (f"See {CLOCK}", [content(f"See {CLOCK}")]),
    ],
)
def test_parts(text: str, parts: list[AnswerPart]) -> None:
    assert parse(LLAMA.parser(TOOLS), text) == parts
    every_split(lambda: LLAMA.parser(TOOLS), text)


def test_what_the_grammar_forces() -> None:
    tokenizer = byte_tokenizer(special=("<|python_tag|>",))
    allowed = Answers(tokenizer, LLAMA.grammar(TOOLS, ToolChoice(), special_tokens(tokenizer)))
    for text in (f"<|python_tag|>{CLOCK}", f"I look. <|python_tag|>{CLOCK}", f"\n{CLOCK}", '{"names": 1}', "{}"):
        assert allowed.may_end(text), text
    for text in (CODE, '{"name": "Bob"', f"{CLOCK} x", '{"type": "function", "name": "Bob"'):
        assert not allowed.may_end(text), text
    assert allowed.may_end('{"type": "function", "name": "clock", "parameters": {}}')
