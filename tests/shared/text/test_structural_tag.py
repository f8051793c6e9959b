"""Structural tags accept free text, and within their tags only what these allow."""

from __future__ import annotations

from typing import Any

import pytest

from quire.shared.text.grammar import GrammarVocabulary, matcher, write
from quire.shared.text.grammar_error import GrammarError
from quire.shared.text.structural_tag import MAX_TAGS, to_lark

VOCABULARY = GrammarVocabulary({"<|call|>": 300, "<|end|>": 302, "[SPECIAL]": 303}, (302,), 5000)
BYTES = VOCABULARY.tokenizer(has_all_ids=False)
# The place of the special token `<|call|>`, written as € in answers.
[CALL] = [place for place in range(BYTES.vocab_size) if BYTES.decode_str([place]) == "<|call|>"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
ANY: dict[str, Any] = {"type": "any_text"}
OLD: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=foo>", "schema": SCHEMA, "end": "</function>"},
        {"begin": "<function=bar>", "schema": {"type": "integer"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}


def of(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def elements(kind: str, *parts: Any) -> dict[str, Any]:
    return of({"type": kind, "elements": list(parts)})


def triggered(**changes: Any) -> dict[str, Any]:
    return of({"type": "triggered_tags", "triggers": ["<|call|>"], "tags": [tag("<|call|>f", JSON, "!")], **changes})


def accepts(value: dict[str, Any], answer: str) -> bool:
    made = matcher(write("structural_tag", value), BYTES, VOCABULARY.special_tokens)
    tokens = [token for letter in answer for token in ([CALL] if letter == "€" else letter.encode())]
    return made.try_consume_tokens(tokens) == len(tokens) and made.is_accepting()


CALLED = '€f{"a": 1}!'
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "structures": (
        OLD,
        ["", "hi", 'x<function=foo>{"a": 1}</function>y<function=bar>7</function>', "<function"],
        ["<function=baz>", "<function=foo>{}</function>", "<function=foo>"],
    ),
    "a text": (of(text("yes")), ["yes"], ["", "yes!"]),
    "any text": (of(ANY), ["", "x\ny"], []),
    "a schema": (of(JSON), ['{"a": 1}'], ["{}"]),
    "a pattern": (of({"type": "regex", "pattern": "[0-9]+/x"}), ["12/x"], ["x"]),
    "a grammar": (of({"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}), ["((x))"], ["(x"]),
    "thinking": (
        elements("sequence", tag("<think>", ANY, "</think>"), text("\n"), tag("<|call|>", JSON, "")),
        ['<think>hm</think>\n€{"a": 1}', '<think></think>\n<|call|>{"a": 1}'],
        ['<think>hm</think>\n{"a": 1}', "<think>"],
    ),
    "a text that ends any text": (
        elements("sequence", ANY, text("E"), text("N"), {"type": "regex", "pattern": "[0-9]"}),
        ["abEN1", "EN1"],
        ["abE1", "ab"],
    ),
    "a choice": (elements("or", text("x"), JSON), ["x", '{"a": 1}'], ["y", ""]),
    "tags": (triggered(), ["", "ab", CALLED, f"ab{CALLED}c{CALLED}", 'x<|call|>f{"a": 1}!'], ["€", "<|call|>x"]),
    "one tag at least": (triggered(at_least_one=True), [CALLED, f"{CALLED}x{CALLED}"], ["", "ab"]),
    "one tag at most": (triggered(stop_after_first=True), ["", "ab", f"ab{CALLED}"], [f"{CALLED}x"]),
    "one tag": (triggered(at_least_one=True, stop_after_first=True), [CALLED], ["", f"{CALLED}x", f"x{CALLED}"]),
    "separated tags": (
        of({"type": "tags_with_separator", "separator": ", ", "tags": [tag("<a>", JSON, "</a>")]}),
        ["", '<a>{"a": 1}</a>', '<a>{"a": 1}</a>, <a>{"a": 2}</a>'],
        ['<a>{"a": 1}</a><a>{"a": 2}</a>', "x"],
    ),
    "tags in a tag": (
        of(tag("[", {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<a>", JSON, ">")]}, "]")),
        ["[]", '[x<a>{"a": 1}>y]'],
        ["[<b", "[", "]"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_follows_the_tags(name: str) -> None:
    value, good, bad = CASES[name]
    for answer in good:
        assert accepts(value, answer), answer
    for answer in bad:
        assert not accepts(value, answer), answer


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([], "must be an object"),
        ({"type": "structural_tag"}, "structures must be an array that is not empty"),
        ({"type": "other", "format": ANY}, "the type of a structural tag"),
        (OLD | {"x": 1}, "x is not supported in structural_tag"),
        (OLD | {"triggers": ["x"]}, "must start with exactly one trigger"),
        (OLD | {"triggers": ["<", "<f"]}, "must start with exactly one trigger"),
        (OLD | {"triggers": [""]}, "triggers must not be empty"),
        (OLD | {"structures": [5]}, "structures must be an object"),
        (OLD | {"structures": [{"begin": "<function=x", "end": ">"}]}, "JSON object"),
        (of({"type": "qwen_xml_parameter", "json_schema": {}}), "'qwen_xml_parameter' of a structural tag is not"),
        (of({}), "the format 'None'"),
        (elements("sequence", ANY, JSON), "any text must have an end"),
        (elements("sequence"), "elements must be an array that is not empty"),
        (of(ANY | {"excludes": []}), "excludes is not supported in any_text"),
        (of(JSON | {"style": "qwen_xml"}), "the style of a json_schema must be json"),
        (of(tag("a", JSON, ["b"])), "end must be a string"),
        (of(tag("a", JSON, "b") | {"type": "tag", "x": 1}), "x is not supported in tag"),
        (triggered(at_least_one=1), "at_least_one must be true or false"),
        (triggered(tags=[tag("<|call|>f", JSON, "!")] * (MAX_TAGS + 1)), "tags"),
        (of({"type": "grammar", "grammar": "x"}), "line 1 of the grammar"),
    ],
)
def test_a_value_that_is_no_structural_tag_is_refused(value: Any, why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        to_lark(value, VOCABULARY.special_tokens)


def test_nesting_is_bounded() -> None:
    form: dict[str, Any] = text("x")
    for _ in range(40):
        form = {"type": "or", "elements": [form]}
    with pytest.raises(GrammarError, match="nested formats"):
        to_lark(of(form), ())
