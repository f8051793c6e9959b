from __future__ import annotations

import pytest

from quire.gateway.output.formats import FORMATS
from quire.gateway.output.parts import AnswerPart, PartKind
from quire.gateway.output.tools import ToolChoice, ToolMode
from quire.shared.text.grammar import framed, grammar, special_tokens, write
from tests.support.gateway.output_answers import TOOLS, Answers, byte_tokenizer, call, content, every_split, parse

HARMONY = FORMATS["harmony"]
WHY = "<|channel|>analysis<|message|>Why.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CLOCK = "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}"
# The chat template writes the recipient first; models do both.
SWAPPED = " to=functions.clock<|channel|>commentary json<|message|>{}"
FINAL = "<|channel|>final<|message|>Hi."


def reasoning(text: str) -> AnswerPart:
    return AnswerPart(PartKind.REASONING, text)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{WHY}{FINAL}", [reasoning("Why."), content("Hi.")]),
        (f"{WHY}{FINAL}<|return|>", [reasoning("Why."), content("Hi.")]),
        (f"{WHY}{WHY}{PREAMBLE}{CLOCK}<|call|>", [reasoning("Why.\nWhy."), content("I look."), *call("clock", "{}")]),
        (f"{WHY}{SWAPPED}", [reasoning("Why."), *call("clock", "{}")]),
        (f"{PREAMBLE}{FINAL}", [content("I look.\nHi.")]),
        ("<|channel|>analysis<|message|>cut off <|en", [reasoning("cut off <|en")]),
        (f"{WHY}<|channel|>fin", [reasoning("Why.")]),
        ("Hi, < and <| too.", [content("Hi, < and <| too.")]),
        (f"{WHY}<|channel|>final<|message|>", [reasoning("Why.")]),
        (f"{WHY}{CLOCK.replace('clock', 'cluck')}", [reasoning("Why."), content(CLOCK.replace("clock", "cluck"))]),
        (f"{WHY}{CLOCK[:-1]}x", [reasoning("Why."), content(f"{CLOCK[:-1]}x")]),
        ("", []),
    ],
)
def test_parts(text: str, parts: list[AnswerPart]) -> None:
    if "cluck" in text or text.endswith("x"):  # the beginning of the assistant's message belongs to it
        parts = [*parts[:-1], content("<|start|>assistant" + parts[-1].text)]
    assert parse(HARMONY.parser(TOOLS), text) == parts
    every_split(lambda: HARMONY.parser(TOOLS), text)


def test_what_the_grammar_allows() -> None:
    tokenizer = byte_tokenizer(special=tuple(sorted(HARMONY.markers)))

    def answers(mode: ToolMode) -> Answers:
        return Answers(tokenizer, HARMONY.grammar(TOOLS, ToolChoice(mode), special_tokens(tokenizer)))

    auto, required = answers(ToolMode.AUTO), answers(ToolMode.REQUIRED)
    for text in (f"{WHY}{PREAMBLE}{CLOCK}", CLOCK, f"{WHY}{SWAPPED}", CLOCK.replace(" <|constrain|>", "<|constrain|>")):
        assert auto.may_end(text)
        assert required.may_end(text)
    for text in (f"{WHY}{FINAL}", FINAL):
        assert auto.may_end(text)
        assert not required.may_end(text)
    for text in ("Hi.", CLOCK.replace("clock", "cluck"), f"{CLOCK}<|end|>", f"{FINAL}<|end|>{WHY}"):
        assert not auto.may_end(text)


def test_content_that_follows_a_grammar_is_in_the_final_channel() -> None:
    tokenizer = byte_tokenizer(special=tuple(sorted(HARMONY.markers)))
    frame = HARMONY.content_frame(special_tokens(tokenizer))
    allowed = Answers(tokenizer, grammar(framed(frame, write("regex", "[0-9]+")), special_tokens(tokenizer)))
    final = "<|channel|>final<|message|>"
    for text in (f"{final}42", f"{WHY}{final}7", f"{WHY}{WHY}{final}7"):
        assert allowed.may_end(text), text
    for text in ("42", f"{final}x", final, WHY, f"{PREAMBLE}{final}7", f"{CLOCK}", f"{final}7<|end|>{WHY}"):
        assert not allowed.may_end(text), text
