from __future__ import annotations

import pytest

from quire.gateway.output.formats import FORMATS, REASONING_FORMATS
from quire.gateway.output.parts import AnswerPart, OutputParser, PartKind, PlainText
from quire.gateway.output.reasoning import Reasoning, ReasoningFormat, ReasoningParser
from quire.gateway.output.tools import ToolChoice, ToolMode
from quire.shared.text.grammar import special_tokens
from tests.support.gateway.output_answers import TOOLS, Answers, byte_tokenizer, call, content, every_split, parse

THINK = REASONING_FORMATS["think"]
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


def reasoning(text: str) -> AnswerPart:
    return AnswerPart(PartKind.REASONING, text)


def parser(starts_inside: bool, answer: OutputParser | None = None, form: ReasoningFormat = THINK) -> ReasoningParser:
    return ReasoningParser(Reasoning(form, starts_inside), answer or PlainText())


@pytest.mark.parametrize(
    ("starts_inside", "text", "parts"),
    [
        (False, "<think>\nwhy\n\nso\n</think>\n\nHi.\n", [reasoning("why\n\nso"), content("Hi.\n")]),
        (False, "\n<think>a < b </th </think>c", [reasoning("a < b </th"), content("c")]),
        (False, "<think>\n\n</think>\n\nHi.", [content("Hi.")]),
        (False, "Hi. <think>no</think>", [content("Hi. <think>no</think>")]),
        (False, "  Hi.", [content("  Hi.")]),
        (False, "<thi", [content("<thi")]),
        (False, "<think>cut off </thin", [reasoning("cut off </thin")]),
        (False, "", []),
        (True, "why</think>Hi.", [reasoning("why"), content("Hi.")]),
        (True, "\nwhy\n", [reasoning("why\n")]),
        (True, "<think>\nwhy</think>Hi.</think>", [reasoning("why"), content("Hi.</think>")]),
        (True, "</think>", []),
        (True, "<b>why</think>Hi.", [reasoning("<b>why"), content("Hi.")]),
    ],
)
def test_parts(starts_inside: bool, text: str, parts: list[AnswerPart]) -> None:
    assert parse(parser(starts_inside), text) == parts
    every_split(lambda: parser(starts_inside), text)


@pytest.mark.parametrize("form", REASONING_FORMATS.values(), ids=lambda form: form.name)
def test_the_markers_of_each_family(form: ReasoningFormat) -> None:
    text = f"{form.start}\nwhy\n{form.end}\nHi."
    assert parse(parser(False, form=form), *text) == [reasoning("why"), content("Hi.")]
    assert form.begins_in(f"<|im_start|>assistant\n{form.start}\n")
    closed = f"<|im_start|>assistant\n{form.start}\n\n{form.end}\n\n"
    assert not form.begins_in(closed)
    assert form.is_over_in(closed)
    assert not form.is_over_in(f"<|im_start|>user\n{form.end}<|im_end|>\n<|im_start|>assistant\n")


def test_a_call_is_read_after_the_reasoning_only() -> None:
    def make() -> ReasoningParser:
        return parser(True, FORMATS["hermes"].parser(TOOLS))

    text = f"I could write {CLOCK}\n</think>\n\n{CLOCK}"
    assert parse(make(), text) == [reasoning(f"I could write {CLOCK}"), *call("clock", "{}")]
    every_split(make, text)


@pytest.mark.parametrize("starts_inside", [False, True])
@pytest.mark.parametrize("added", [(), ("<think>", "</think>"), ("<think>", "</think>", "<tool_call>", "</tool_call>")])
class TestGrammar:
    def answers(self, mode: ToolMode, starts_inside: bool, added: tuple[str, ...], name: str = "hermes") -> Answers:
        tokenizer = byte_tokenizer(added=added)
        grammar = FORMATS[name].grammar(
            TOOLS, ToolChoice(mode), special_tokens(tokenizer), Reasoning(THINK, starts_inside)
        )
        return Answers(tokenizer, grammar)

    def test_auto(self, starts_inside: bool, added: tuple[str, ...]) -> None:
        allowed = self.answers(ToolMode.AUTO, starts_inside, added)
        begin = "" if starts_inside else "<think>"
        for text in ("Hi.", CLOCK, f"Hi. {CLOCK}"):
            assert allowed.may_end(f"{begin}\nwhy\n</think>\n\n{text}")
            assert starts_inside or allowed.may_end(text)
        assert allowed.may_end(f"{begin}cut off")
        assert not allowed.may_end(f"{begin}why</think>{CLOCK}.")
        if "<tool_call>" not in added:
            assert allowed.may_end(f"{begin}why <tool_call> </think>Hi.")

    def test_required(self, starts_inside: bool, added: tuple[str, ...]) -> None:
        allowed = self.answers(ToolMode.REQUIRED, starts_inside, added)
        begin = "" if starts_inside else "<think>"
        for gap in ("", "\n", "\n\n"):
            assert allowed.may_end(f"{begin}why</think>{gap}{CLOCK}")
        assert not allowed.may_end(f"{begin}why</think>Hi.")
        assert not allowed.may_end(f"{begin}cut off")
        assert starts_inside or allowed.may_end(CLOCK)

    def test_a_call_at_the_beginning_of_the_answer(self, starts_inside: bool, added: tuple[str, ...]) -> None:
        begin = "" if starts_inside else "<think>"
        clock = '{"tool": "clock", "arguments": {}}'
        for mode in (ToolMode.AUTO, ToolMode.REQUIRED):
            allowed = self.answers(mode, starts_inside, added, name="json")
            assert allowed.may_end(f"{begin}why</think>\n\n{clock}")
            assert not allowed.may_end(f"{begin}why</think>\n\n{clock.replace('clock', 'cluck')}")
            assert allowed.may_end(f"{begin}why</think>\n\nHi.") == (mode == ToolMode.AUTO)
