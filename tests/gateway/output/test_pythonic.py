from __future__ import annotations

import pytest

from quire.gateway.output.formats import FORMATS
from quire.gateway.output.parts import AnswerPart
from quire.gateway.output.tools import ToolChoice
from quire.shared.text.grammar import special_tokens
from tests.support.gateway.output_answers import TOOLS, Answers, byte_tokenizer, call, content, every_split, parse

PYTHONIC = FORMATS["pythonic"]


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[clock()]", call("clock", "{}")),
        ("[ clock( ) , clock() ]\n", [*call("clock", "{}"), *call("clock", "{}", 1)]),
        ("[any-thing.v2(a='b, )]', c=[1, (2,)], d={'e': None})]",
         call("any-thing.v2", '{"a": "b, )]", "c": [1, [2]], "d": {"e": null}}')),
        ("[any-thing.v2(a = True, b=false, c=-1.5,)]", call("any-thing.v2", '{"a": true, "b": false, "c": -1.5}')),
        ("<|python_start|>[clock()]<|python_end|>", call("clock", "{}")),
        ("I look. <|python_start|>[clock()]", [content("I look."), *call("clock", "{}")]),
        ("[clock()] is it.", [*call("clock", "{}"), content("is it.")]),
        ("[1, 2]", [content("[1, 2]")]),
        ("[cluck()]", [content("[cluck()]")]),
        ("[clock", [content("[clock")]),
        ("I call [clock()]", [content("I call [clock()]")]),
    ],
)  # fmt: skip
def test_parts(text: str, parts: list[AnswerPart], is_forced: bool) -> None:
    assert parse(PYTHONIC.parser(TOOLS, is_forced), text) == parts
    every_split(lambda: PYTHONIC.parser(TOOLS, is_forced), text)


@pytest.mark.parametrize("arguments", ["1", "**x", "a=b", "a=f()", "a=1 b=2", "a='", "a=]", "a=1", "1a=2", "a=1e999"])
def test_a_broken_call_is_content(arguments: str) -> None:
    text = f"[any-thing.v2({arguments}" + ("" if arguments == "a=1" else ")]")
    assert parse(PYTHONIC.parser(TOOLS), text) == [content(text)]
    every_split(lambda: PYTHONIC.parser(TOOLS), text)


def test_lists_that_are_not_calls_are_free() -> None:
    tokenizer = byte_tokenizer()
    allowed = Answers(tokenizer, PYTHONIC.grammar(TOOLS, ToolChoice(), special_tokens(tokenizer)))
    for text in ("[1, 2]", "[clocks()]", "[clock", '\n[get_weather(city="x"), clock()]'):
        assert allowed.may_end(text), text
    for text in ("[clock(1)]", "[get_weather()]", "[clock()] x", "[clock(), x]"):
        assert not allowed.may_end(text), text
