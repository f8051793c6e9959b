from __future__ import annotations

import re

import pytest
from tokenizers import Tokenizer

from quire.gateway.output.tool_grammar import (
    Beginning,
    answer_grammar,
    lark_arguments,
    lark_text,
    pattern,
    quoted,
    several,
)
from quire.gateway.output.tools import Tool, ToolChoice, ToolMode
from quire.shared.text.grammar import special_tokens
from tests.support.gateway.output_answers import END, Answers, byte_tokenizer

TOKENIZER = byte_tokenizer(special=("[CALL]",), added=("<call>", "plain"))


def answers(mode: ToolMode, *beginnings: Beginning, forced: str = '"x"', tokenizer: Tokenizer = TOKENIZER) -> Answers:
    choice = ToolChoice(mode)
    return Answers(tokenizer, answer_grammar(choice, special_tokens(tokenizer), None, forced, beginnings, []))


def test_added_tokens_in_angle_brackets_are_special() -> None:
    """llguidance decides so. The text of such a token in a grammar does not match the token."""
    special = special_tokens(TOKENIZER)
    assert special.keys() == {END, "[CALL]", "<call>"}
    for name, token_id in special.items():
        assert TOKENIZER.token_to_id(name) == token_id
        if name != END:
            assert Answers(TOKENIZER, f"start: {lark_text(name, special)}").may_end(name)
            assert not Answers(TOKENIZER, f"start: {quoted(name)}").may_end(name)
    assert Answers(TOKENIZER, 'start: "plain"').may_end("plain")


def test_a_text_with_special_tokens() -> None:
    special = {"<a>": 7, "<ab>": 8}
    assert lark_text('x<ab>"<a>\n', special) == '"x" <[8]> "\\"" <[7]> "\\n"'
    assert lark_text("x<ab>", {}) == '"x<ab>"'


@pytest.mark.parametrize("text", ["a.b*c", "[x](y)", "a/b\\c", "{}|^$+?", "a b-c_d", "é<|x|>#&~"])
def test_a_pattern_matches_its_text_only(text: str) -> None:
    allowed = Answers(byte_tokenizer(), f"start: A\nA: /{pattern(text)}/")
    assert allowed.may_end(text)
    assert not allowed.may_end(text[:-1])
    assert re.fullmatch(pattern(text), text)


def test_several() -> None:
    rules = ["NEWLINES: /\\n{0,2}/", 'item: "a"']
    many = Answers(byte_tokenizer(), "\n".join([f"start: {several('item', quoted('-'), True)}", *rules]))
    assert [many.may_end(text) for text in ("a", "a\n", "a-a", "a\n\n-a\n-a\n", "", "aa", "a-")] == [True] * 4 + [
        False
    ] * 3
    one = Answers(byte_tokenizer(), "\n".join([f"start: {several('item', quoted('-'), False)}", *rules]))
    assert [one.may_end(text) for text in ("a", "a\n", "a-a")] == [True, True, False]


@pytest.mark.parametrize("trigger", ["[CALL]", "<call>", "plain", "<text>"])
def test_a_trigger_in_free_text(trigger: str) -> None:
    """A token and the same text spelled out both begin a call."""
    for tokenizer in (TOKENIZER, byte_tokenizer()):
        allowed = answers(ToolMode.AUTO, Beginning(text=trigger, rest='"x"'), tokenizer=tokenizer)
        for text in ("", "free", f"{trigger}x", f"free {trigger}x", trigger[:-1], f"{trigger[:-1]} free"):
            assert allowed.may_end(text), text
        for text in (trigger, f"{trigger}y", f"{trigger}xx", f"{trigger}x{trigger}x"):
            assert not allowed.may_end(text), text


def test_a_pattern_at_the_beginning() -> None:
    allowed = answers(ToolMode.AUTO, Beginning(pattern=r"\s*\{", rest='"x"'), Beginning(text="<text>", rest='"y"'))
    for text in ("", "free {", " {x", "\n\n{x", "free <text>y", "<text>y"):
        assert allowed.may_end(text), text
    for text in ("{", "{y", " {xx", "<text>x", "{<text>y"):
        assert not allowed.may_end(text), text


def test_forced_calls() -> None:
    allowed = answers(ToolMode.REQUIRED, Beginning(text="<text>", rest='"y"'))
    assert [allowed.may_end(text) for text in ("x", "free", "", "<text>y")] == [True, False, False, False]


@pytest.mark.parametrize("parameters", [{}, {"type": "string"}, {"type": ["object", "null"]}, {"type": "object"}])
def test_arguments_are_an_object(parameters: dict[str, object]) -> None:
    allowed = Answers(byte_tokenizer(), f"start: {lark_arguments(Tool('run', parameters=parameters))}")
    assert allowed.may_end('{"a": [1, {}]}')
    assert [allowed.accepted(text) for text in ("null", '"x"', "1")] == ["", "", ""]


def test_white_space_in_arguments_is_that_of_json_dumps() -> None:
    allowed = Answers(byte_tokenizer(), f"start: {lark_arguments(Tool('run'))}")
    assert not allowed.may_end('{"a":1}')
    assert not allowed.may_end('{ "a": 1 }')
