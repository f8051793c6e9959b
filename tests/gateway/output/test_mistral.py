from __future__ import annotations

import pytest

from quire.gateway.output.formats import FORMATS
from quire.gateway.output.parts import AnswerPart
from quire.gateway.output.tools import ToolChoice, ToolMode
from quire.shared.text.grammar import special_tokens
from tests.support.gateway.output_answers import TOOLS, Answers, byte_tokenizer, call, content, every_split, parse

CLOCK = '{"name": "clock", "arguments": {}}'
WITH_ID = '{"name": "clock", "arguments": {}, "id": "abcDEF123"}'


@pytest.mark.parametrize("name", ["mistral", "mistral_args"])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"[TOOL_CALLS] [{WITH_ID}]", call("clock", "{}")),
        (f"[TOOL_CALLS][{CLOCK}", call("clock", "{}")),
        (f"[TOOL_CALLS][{CLOCK}, x]", [*call("clock", "{}"), content(", x]")]),
        ("[TOOL_CALLS]clock[CALL_ID]abcDEF123[ARGS]{}", call("clock", "{}")),
        ("[TOOL_CALLS]clock{}", call("clock", "{}")),
        ("[TOOL_CALLS]clock [ARGS] {}", call("clock", "{}")),
        ("[TOOL_CALLS]clock[ARGS]", [content("[TOOL_CALLS]clock[ARGS]")]),
        ("[TOOL_CALLS]cluck[ARGS]{}", [content("[TOOL_CALLS]cluck[ARGS]{}")]),
        ("[TOOL_CALLS][]", [content("[TOOL_CALLS][]")]),
    ],
)
def test_both_forms_are_read(name: str, text: str, parts: list[AnswerPart]) -> None:
    assert parse(FORMATS[name].parser(TOOLS), text) == parts
    every_split(lambda: FORMATS[name].parser(TOOLS), text)


def test_the_grammar_of_the_list_allows_ids() -> None:
    tokenizer = byte_tokenizer(special=("[TOOL_CALLS]",))
    grammar = FORMATS["mistral"].grammar(TOOLS, ToolChoice(ToolMode.REQUIRED), special_tokens(tokenizer))
    allowed = Answers(tokenizer, grammar)
    for text in (f"[TOOL_CALLS] [{WITH_ID}, {CLOCK}]", f"[TOOL_CALLS][{CLOCK}]"):
        assert allowed.may_end(text)
    assert not allowed.may_end(f"[TOOL_CALLS][{CLOCK}")


def test_the_grammar_of_names_allows_ids_if_the_tokenizer_has_them() -> None:
    for special, may in ((("[TOOL_CALLS]", "[ARGS]"), False), (("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), True)):
        tokenizer = byte_tokenizer(special=special)
        grammar = FORMATS["mistral_args"].grammar(TOOLS, ToolChoice(ToolMode.REQUIRED), special_tokens(tokenizer))
        allowed = Answers(tokenizer, grammar)
        assert allowed.may_end("[TOOL_CALLS]clock[ARGS]{}")
        assert allowed.may_end("[TOOL_CALLS]clock[CALL_ID]abcDEF123[ARGS]{}") == may
