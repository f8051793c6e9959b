"""Each kind of grammar accepts the answers that it describes, and no others."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from quire.ops.paths import PROJECT_ROOT
from quire.shared.model_argument import DEFAULT_MODEL
from quire.shared.text.grammar import (
    ANY_OBJECT,
    KINDS,
    GrammarVocabulary,
    check,
    framed,
    lark_json,
    matcher,
    special_tokens,
    write,
)
from quire.shared.text.grammar_error import GrammarError

VOCABULARY = GrammarVocabulary({"<|call|>": 300, "<|end|>": 302}, (302,), 5000)
BYTES = VOCABULARY.tokenizer(has_all_ids=False)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def accepts(grammar: str, answer: str) -> bool:
    made = matcher(grammar, BYTES, VOCABULARY.special_tokens)
    return bool(made.consume_tokens(list(answer.encode())) and made.is_accepting())


GRAMMARS: list[tuple[str, Any, list[str], list[str]]] = [
    ("json_schema", SCHEMA, ['{"a": 1}'], ["{}", '{"a":1}', '{"a": 1} ']),
    ("regex", "[0-9]{2}/(a|b)", ["12/a"], ["1/a", "12/c", "12/ab"]),
    ("choice", ["yes", 'n"o\n', "ä"], ["yes", 'n"o\n', "ä"], ["", "yesyes", "n"]),
    ("ebnf", 'root ::= "(" root? ")"', ["()", "(())"], ["", "(()"]),
    ("structural_tag", {"format": {"type": "const_string", "value": "a"}}, ["a"], ["b"]),
    ("lark", f'start: "<" {lark_json(SCHEMA)} ">"', ['<{"a": 1}>'], ['<{"a":1}>', '{"a": 1}']),
]


@pytest.mark.parametrize(("kind", "value", "good", "bad"), GRAMMARS, ids=[one[0] for one in GRAMMARS])
def test_an_answer_follows_its_grammar(kind: str, value: Any, good: list[str], bad: list[str]) -> None:
    text = write(kind, value)
    assert json.loads(text) == {kind: value}
    check(text, VOCABULARY)
    for answer in good:
        assert accepts(text, answer)
    for answer in bad:
        assert not accepts(text, answer)


@pytest.mark.parametrize(("kind", "value", "good", "bad"), GRAMMARS, ids=[one[0] for one in GRAMMARS])
def test_a_frame_holds_a_grammar_of_any_kind(kind: str, value: Any, good: list[str], bad: list[str]) -> None:
    text = framed('start: ("[" /[^\\]]*/ "]")? @content', write(kind, value))
    check(text, VOCABULARY)
    for before in ("", "[why {]"):
        for answer in good:
            assert accepts(text, before + answer)
        for answer in bad:
            assert not accepts(text, before + answer)
    assert not accepts(text, "[why")


def test_every_kind_is_tested() -> None:
    assert {one[0] for one in GRAMMARS} == set(KINDS)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[]", "a JSON object with one key"),
        ("{}", "a JSON object with one key"),
        ('{"regex":"a","lark":"b"}', "a JSON object with one key"),
        ('{"other":"a"}', "one of json_schema, regex"),
        ('{"regex":5}', "regex must be a string"),
        ('{"lark":null}', "lark must be a string"),
        ('{"choice":[]}', "an array of strings"),
        ('{"choice":["a",1]}', "an array of strings"),
        ('{"choice":"a"}', "an array of strings"),
        ('{"json_schema":[]}', "a JSON object"),
        ('{"regex":"("}', "unclosed group"),
        ('{"regex":"(?=a)"}', "look-around"),
        ('{"lark":"start: x"}', "unknown name"),
        ('{"lark":"start: <|other|>"}', "unknown special token"),
        # The library also reads grammars in JSON, with options that clients must not set: this is Lark.
        ('{"lark":"{\\"grammars\\":[{\\"json_schema\\":{}}]}"}', "expecting rule"),
        ('{"framed":{"lark":"start: @content"}}', "wrong type"),
        ('{"framed":{"lark":"start: @content","content":{}}}', "a JSON object with one key"),
        ('{"framed":{"lark":"start: @content","content":{"framed":{}}}}', "one of json_schema, regex"),
        ('{"framed":{"lark":5,"content":{"regex":"a"}}}', "lark must be a string"),
        ('{"framed":{"lark":"start: @other","content":{"regex":"a"}}}', "unknown"),
        ('{"framed":{"lark":"start: @content","content":{"regex":"("}}}', "unclosed group"),
    ],
)
def test_a_text_that_is_no_grammar_is_refused_with_the_cause(text: str, why: str) -> None:
    with pytest.raises(GrammarError, match=why) as caught:
        check(text, VOCABULARY)
    assert "\n" not in str(caught.value)


def test_a_schema_inside_of_lark_is_rewritten_too() -> None:
    grammar = write("lark", f'start: "x" {lark_json({"type": "string", "format": "date"})}')
    assert accepts(grammar, 'x"2024-02-29"')
    assert not accepts(grammar, 'x"2023-02-29"')
    with pytest.raises(GrammarError, match="x-guidance"):
        lark_json({"x-guidance": {"lenient": True}})


def test_special_tokens_are_not_their_text() -> None:
    grammar = write("lark", 'start: <|call|> "a"')
    assert not accepts(grammar, "<|call|>a")
    made = matcher(grammar, BYTES, VOCABULARY.special_tokens)
    [call] = [place for place in range(BYTES.vocab_size) if BYTES.decode_str([place]) == "<|call|>"]
    assert made.consume_tokens([call, ord("a")])


def test_numbers_of_tokens_are_those_of_the_model() -> None:
    tokens = VOCABULARY.tokenizer(has_all_ids=True)
    assert tokens.vocab_size == 5000
    made = matcher(write("lark", 'start: <[300]> "a"'), tokens, ())
    assert np.flatnonzero(np.unpackbits(np.frombuffer(made.compute_bitmask(), np.uint8), bitorder="little")) == [300]
    check(write("lark", "start: <[4999]>"), VOCABULARY)
    with pytest.raises(GrammarError, match="too large"):
        check(write("lark", "start: <[5000]>"), VOCABULARY)


def test_the_vocabulary_of_a_model_has_the_special_tokens_that_llguidance_knows() -> None:
    demo = Tokenizer.from_file(str(PROJECT_ROOT / DEFAULT_MODEL / "tokenizer.json"))
    demo.add_tokens(["<tool_call>", "plain"])
    size = demo.get_vocab_size()
    vocabulary = GrammarVocabulary.of(demo, [2, size + 5], size)
    assert vocabulary.eos_token_ids == (2,)
    assert vocabulary.special_tokens == special_tokens(demo)
    real = LLTokenizer(demo.to_str(), n_vocab=size, eos_token=[2])
    assert all(real.is_special_token(token_id) for token_id in special_tokens(demo).values())
    assert not real.is_special_token(demo.token_to_id("plain"))
    assert "<tool_call>" in special_tokens(demo)
    assert "plain" not in special_tokens(demo)
    for name in special_tokens(demo):
        grammar = write("lark", f'start: "x" {name} "y"')
        check(grammar, vocabulary)
        assert not matcher(grammar, real, ()).is_error()


def test_any_object_is_an_object() -> None:
    assert accepts(ANY_OBJECT, '{"a": [1, {"b": null}]}')
    assert not accepts(ANY_OBJECT, "[]")
