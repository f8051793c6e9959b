"""Every format: its parser reads calls, its grammar allows them, and both refuse other texts."""

from __future__ import annotations

import contextlib
import json
import random

import pytest

from quire.gateway.output.formats import FORMATS
from quire.gateway.output.parts import AnswerPart, PartKind
from quire.gateway.output.tool_format import ToolFormat
from quire.gateway.output.tools import Besides, Tool, ToolChoice, ToolMode
from quire.shared.text.grammar import special_tokens
from quire.shared.text.grammar_error import GrammarError
from tests.support.gateway.output_answers import (
    TOOLS,
    Answers,
    assert_parts_are_sound,
    byte_tokenizer,
    call,
    content,
    every_split,
    parse,
)
from tests.support.gateway.output_cases import CASES, IN_PARIS, Case

# The characters with which a call begins where an answer may also be text.
BEGINS = {
    "hermes": len("<tool_call>"),
    "qwen3_coder": len("<tool_call>"),
    "llama3_json": len('{"name": '),
    "pythonic": len("[get_weather("),
    "mistral": len("[TOOL_CALLS]"),
    "mistral_args": len("[TOOL_CALLS]"),
    "deepseek": len("<｜tool▁calls▁begin｜>"),
    "deepseek_v31": len("<｜tool▁calls▁begin｜>"),
    "json": len('{"tool": '),
}
AUTO, REQUIRED, NAMED = ToolChoice(), ToolChoice(ToolMode.REQUIRED), ToolChoice(ToolMode.NAMED, "clock")


def answers(case: Case, choice: ToolChoice, with_tokens: bool) -> Answers:
    tokenizer = byte_tokenizer(case.special, case.added if with_tokens else ())
    return Answers(tokenizer, FORMATS[case.name].grammar(TOOLS, choice, special_tokens(tokenizer)))


def test_every_format_has_a_case() -> None:
    assert [case.name for case in CASES] == list(FORMATS)


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_calls_are_read_in_any_pieces(case: Case, is_forced: bool) -> None:
    form = FORMATS[case.name]
    reasoning = [AnswerPart(PartKind.REASONING, "Look.")] if case.name == "harmony" else []
    one = [*reasoning, *call("get_weather", IN_PARIS)]
    assert parse(form.parser(TOOLS, is_forced), case.one) == one
    every_split(lambda: form.parser(TOOLS, is_forced), case.one)
    if case.two:
        assert parse(form.parser(TOOLS, is_forced), case.two) == [*one, *call("clock", "{}", 1)]
        every_split(lambda: form.parser(TOOLS, is_forced), case.two)
    if case.leads:
        assert parse(form.parser(TOOLS, is_forced), f"I look.\n\n{case.two}\n") == [
            content("I look."),
            *one,
            *call("clock", "{}", 1),
        ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_written_call_is_read(case: Case) -> None:
    form = FORMATS[case.name]
    assert parse(form.parser(TOOLS), form.written("get_weather", json.loads(IN_PARIS))) == call("get_weather", IN_PARIS)
    assert parse(form.parser(TOOLS), form.written("clock", {})) == call("clock", "{}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_prompt_describes_each_tool_and_the_form_of_a_call(case: Case) -> None:
    form = FORMATS[case.name]
    prompt = form.prompt(TOOLS)
    described = [json.loads(line) for line in prompt.splitlines()[1 : len(TOOLS) + 1]]
    assert [one["name"] for one in described] == [tool.name for tool in TOOLS]
    assert [one["parameters"] for one in described] == [tool.parameters for tool in TOOLS]
    assert form.manner() in prompt
    assert form.is_described or form.written("NAME", {"ARGUMENT": "VALUE"}) in prompt


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_unknown_tool_is_content(case: Case, is_forced: bool) -> None:
    form = FORMATS[case.name]
    text = case.one.replace("get_weather", "get_wealth")
    parts = parse(form.parser(TOOLS, is_forced), text)
    assert {part.kind for part in parts} <= {PartKind.CONTENT, PartKind.REASONING}
    assert text.endswith(parts[-1].text)
    every_split(lambda: form.parser(TOOLS, is_forced), text)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_that_is_cut_off_without_a_grammar_is_content(case: Case) -> None:
    for length in range(len(case.one)):
        parts = parse(FORMATS[case.name].parser(TOOLS), case.one[:length])
        if PartKind.CALL in [part.kind for part in parts]:  # only the end after its arguments is missing
            assert parts[-2:] == call("get_weather", IN_PARIS)


@pytest.mark.parametrize("besides", list(Besides))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_that_is_cut_off_under_a_grammar_is_no_content(case: Case, besides: Besides) -> None:
    """An answer that consists of calls has no content, wherever it ends, in one piece or in many."""
    form = FORMATS[case.name]
    for whole in filter(None, (case.one, case.two)):
        # With `auto`, an answer becomes a call where the grammar allows nothing else any more.
        begins = 0 if besides == Besides.NOTHING or case.name == "harmony" else BEGINS[case.name]
        arguments = parse(form.parser(TOOLS, True, besides), whole)
        for length in range(begins, len(whole)):
            text = whole[:length]
            parts = parse(form.parser(TOOLS, True, besides), text)
            assert parse(form.parser(TOOLS, True, besides), *text) == parts, text
            if besides == Besides.JSON and form.json_keys and parts == [content(text)]:
                continue  # the text may be an object that is no call
            assert PartKind.CONTENT not in [part.kind for part in parts], text
            for one, other in zip(parts, arguments, strict=False):
                assert other.text.startswith(one.text) or one.kind == PartKind.REASONING, text


def test_text_that_may_be_a_call_is_content_where_text_is_allowed() -> None:
    for name, text in (("hermes", "<tool_cal"), ("json", '{"too'), ("llama3_json", '{"na'), ("pythonic", "[get_we")):
        assert parse(FORMATS[name].parser(TOOLS, True, Besides.TEXT), text) == [content(text)]
    for name, text in (("hermes", '{"a": "<tool_call>'), ("llama3_json", '{"name": "get_w'), ("json", '{"tool": "c')):
        assert parse(FORMATS[name].parser(TOOLS, True, Besides.JSON), text) == [content(text)]


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestGrammar:
    def test_auto(self, case: Case, with_tokens: bool) -> None:
        allowed = answers(case, AUTO, with_tokens)
        texts = [case.one, *([case.two] if case.two else [])]
        texts += [f"I look.\n{text}" for text in texts if case.leads]
        if case.name != "harmony":
            texts += ["", "Hello.\n", "{", '{"a": 1}', "[1]", "a < b", "<tool", '{"name', "[get"]
        for text in texts:
            assert allowed.may_end(text), (text, allowed.accepted(text))
            assert FORMATS[case.name].parser(TOOLS)  # a parser exists for what the grammar allows
        for text in texts[:2]:
            bad = text.replace("get_weather", "get_wealth") if text else ""
            if case.name != "pythonic":  # where a call begins with the name of a tool, and any other text is free
                assert "get_wealth" not in allowed.accepted(bad)
            bad = text.replace("days", "date")
            assert len(allowed.accepted(bad)) < len(bad) or bad == text
            assert allowed.accepted(text + "x") == text

    def test_one_call_only(self, case: Case, with_tokens: bool) -> None:
        if case.two:
            for mode in (ToolMode.AUTO, ToolMode.REQUIRED):
                allowed = answers(case, ToolChoice(mode, parallel=False), with_tokens)
                assert allowed.may_end(case.one)
                assert not allowed.may_end(case.two)

    def test_required(self, case: Case, with_tokens: bool) -> None:
        allowed = answers(case, REQUIRED, with_tokens)
        assert allowed.may_end(case.one), allowed.accepted(case.one)
        assert not case.two or allowed.may_end(case.two)
        assert allowed.accepted("Hello") == ""
        assert not allowed.may_end("")

    def test_named(self, case: Case, with_tokens: bool) -> None:
        allowed = answers(case, NAMED, with_tokens)
        assert "get_" not in allowed.accepted(case.one)
        clock = case.one.replace("get_weather", "clock").replace(IN_PARIS, "{}")
        if case.name == "pythonic":
            clock = "[clock()]"
        if case.name == "qwen3_coder":
            clock = "<tool_call>\n<function=clock>\n</function>\n</tool_call>"
        assert allowed.may_end(clock), allowed.accepted(clock)


@pytest.mark.parametrize("mode", [ToolMode.AUTO, ToolMode.REQUIRED])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_answer_that_the_grammar_allows_is_read(case: Case, mode: ToolMode) -> None:
    allowed = answers(case, ToolChoice(mode), with_tokens=True)
    form = FORMATS[case.name]
    count = calls = 0
    for seed in range(30):
        choose = random.Random(seed)
        text = allowed.walk(choose, begin=allowed.accepted(case.one[: choose.randrange(len(case.one))]))
        if text is None:
            continue
        count += 1
        parts = parse(form.parser(TOOLS, is_forced=True), text)
        assert_parts_are_sound(parts)
        calls += sum(part.kind == PartKind.CALL for part in parts)
        assert mode == ToolMode.AUTO or any(part.kind == PartKind.CALL for part in parts), text
        assert parse(form.parser(TOOLS, is_forced=True), *text) == parts, text
        # A parser without the guarantee of a grammar finds the same parts.
        assert parse(form.parser(TOOLS), text) == parts, text
    assert count > 10
    assert calls > 5


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_a_schema_that_can_be_followed_is_followed_without_strict(form: ToolFormat) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
        "required": ["city"],
    }
    lax, strict = (
        form.grammar([Tool("run", parameters=schema, strict=flag)], ToolChoice(), {}) for flag in (False, True)
    )
    assert lax == strict


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_any_json_schema_has_a_grammar(form: ToolFormat) -> None:
    """A later check decides whether llguidance can follow it. The text of a grammar raises nothing but GrammarError."""
    values = [None, 1, "x", [], [1], {}, {"a": 1}, {"$ref": 1}, {"$ref": "#/x/y"}, [{"$ref": "#"}], ["a", 1, {}]]
    keywords = ["type", "properties", "required", "enum", "const", "anyOf", "items", "$defs", "$ref"]
    for keyword in keywords:
        for value in values:
            for schema in (
                {keyword: value},
                {"type": "object", "properties": {"a": {keyword: value}}, "required": value},
                {
                    "type": "object",
                    "properties": {"a": {"anyOf": [{keyword: value}, {"type": "array", keyword: value}]}},
                },
            ):
                for strict in (False, True):
                    with contextlib.suppress(GrammarError):
                        form.grammar([Tool("run", parameters=schema, strict=strict)], ToolChoice(), {})
