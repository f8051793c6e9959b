from __future__ import annotations

import json

import pytest

from quire.gateway.output import tool_grammars
from quire.gateway.output.formats import FORMATS
from quire.gateway.output.output_spec import OutputSpec
from quire.gateway.output.parts import PartKind
from quire.gateway.output.tool_grammars import ToolGrammars
from quire.gateway.output.tools import Tool, ToolChoice, ToolMode
from quire.shared.text.grammar import special_tokens
from quire.shared.text.grammar_error import GrammarError
from tests.support.gateway.output_answers import Answers, byte_tokenizer, parse

SPEC = OutputSpec(tool_format="hermes")
CHOICES = [ToolChoice(), ToolChoice(ToolMode.REQUIRED), ToolChoice(parallel=False)]


def tool(name: str) -> Tool:
    return Tool(name, parameters={"type": "object", "properties": {"a": {"type": "integer"}}})


def test_equal_tools_get_one_grammar_and_others_get_others() -> None:
    grammars = ToolGrammars({})
    made = [grammars.text(SPEC, [tool(name)], choice) for name in ("add", "sub") for choice in CHOICES]
    made.append(grammars.text(OutputSpec(tool_format="llama3_json"), [tool("add")], ToolChoice()))
    made.append(grammars.text(OutputSpec(tool_format="hermes", reasoning_format="think"), [tool("add")], ToolChoice()))
    assert len(set(made)) == len(made) == 8
    assert grammars.text(SPEC, [tool("add")], ToolChoice()) is made[0]


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_grammars, "KEPT", 2)
    grammars = ToolGrammars({})
    first = grammars.text(SPEC, [tool("a")], ToolChoice())
    for name in "bc":
        grammars.text(SPEC, [tool(name)], ToolChoice())
    again = grammars.text(SPEC, [tool("a")], ToolChoice())
    assert again == first
    assert again is not first
    monkeypatch.setattr(tool_grammars, "KEPT_CHARACTERS", 0)
    grammars.text(SPEC, [tool("d")], ToolChoice())
    assert not grammars._known
    assert grammars._characters == 0


def test_a_strict_schema_that_cannot_be_followed_is_an_error() -> None:
    hard = Tool("f", parameters={"type": "object", "x-guidance": {}}, strict=True)
    with pytest.raises(GrammarError):
        ToolGrammars({}).text(SPEC, [hard], ToolChoice())


@pytest.mark.parametrize("name", sorted(name for name, form in FORMATS.items() if not form.has_reasoning))
@pytest.mark.parametrize("reasoning", ["", "think"])
def test_an_answer_calls_tools_or_follows_the_schema_of_the_content(name: str, reasoning: str) -> None:
    tokenizer = byte_tokenizer(tuple(sorted(FORMATS[name].markers)))
    special = special_tokens(tokenizer)
    spec = OutputSpec(tool_format=name, tools=(tool("add"),), reasoning_format=reasoning)
    content = '{"type": "object", "properties": {"b": {"const": 1}}, "required": ["b"]}'
    lark = json.loads(ToolGrammars(special).text(spec, spec.tools, ToolChoice(), content))["lark"]
    answers = Answers(tokenizer, lark)
    assert answers.may_end('{"b": 1}')
    assert not answers.may_end('{"b": 2}')
    assert not answers.may_end("Some text.")
    required = json.loads(ToolGrammars(special).text(spec, spec.tools, ToolChoice(ToolMode.REQUIRED), content))["lark"]
    assert not Answers(tokenizer, required).may_end('{"b": 1}')


@pytest.mark.parametrize("name", ["json", "llama3_json"])
def test_calls_without_marks_are_told_apart_from_the_content(name: str) -> None:
    tokenizer = byte_tokenizer(tuple(sorted(FORMATS[name].markers)))
    spec = OutputSpec(tool_format=name, tools=(tool("add"),), is_forced=True)
    grammars = ToolGrammars(special_tokens(tokenizer))
    content = '{"type": "object", "properties": {"b": {"const": 1}}, "required": ["b"]}'
    lark = json.loads(grammars.text(spec, spec.tools, ToolChoice(), content))["lark"]
    name_key, arguments_key = FORMATS[name].json_keys or ("", "")
    text = f'{{"{name_key}": "add", "{arguments_key}": {{"a": 1}}}}'
    assert Answers(tokenizer, lark).may_end(text)
    assert [part.kind for part in parse(spec.parser(), text)] == [PartKind.CALL, PartKind.ARGUMENTS]
    assert [part.kind for part in parse(spec.parser(), '{"b": 1}')] == [PartKind.CONTENT]
    with pytest.raises(GrammarError, match="no references"):
        grammars.text(spec, spec.tools, ToolChoice(), '{"$ref": "#/$defs/a", "$defs": {"a": {}}}')
