"""Which JSON schemas are accepted, and what is said of the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from ops.paths import DEFAULT_MODEL, PROJECT_ROOT
from shared import json_schema
from shared.json_schema import SchemaError

BYTES = LLTokenizer("byte")


def accepts(schema: dict[str, Any], text: str) -> bool:
    """Whether a schema lets a text be an answer, byte by byte."""
    matcher = json_schema.matcher(json_schema.canonical(schema), BYTES)
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "value", "other"),
    [
        ({"type": "object"}, {"a": [1, None, {"b": "c"}]}, [1]),
        ({"enum": ["red", "green"]}, "green", "blue"),
        ({"type": "integer", "minimum": 3, "maximum": 120}, 17, 121),
        ({"type": "string", "pattern": "^[a-f]+$"}, "cafe", "tea"),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 1}, [True, False], []),
        ({"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 2}]}, None, "abc"),
        (
            {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/n"}},
                "required": ["a"],
                "$defs": {"n": {"const": 1}},
            },
            {"a": 1},
            {},
        ),
    ],
)
def test_an_answer_is_what_the_schema_says_written_as_json_dumps_writes_it(
    schema: dict[str, Any], value: Any, other: Any
) -> None:
    json_schema.check(json_schema.canonical(schema))
    assert accepts(schema, json.dumps(value))
    assert not accepts(schema, json.dumps(other))


def test_white_space_is_no_way_to_go_on_for_ever() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    assert accepts(schema, '{"a": [1, 2]}')
    for text in ('{ "a": [1, 2]}', '{"a":[1, 2]}', '{"a": [1,  2]}', '{"a": [1, 2]}\n'):
        assert not accepts(schema, text)


def test_properties_come_in_the_order_of_the_schema() -> None:
    schema = {"type": "object", "properties": {"z": {"const": 1}, "a": {"const": 2}}, "required": ["z", "a"]}
    assert accepts(schema, '{"z": 1, "a": 2}')
    assert not accepts(schema, '{"a": 2, "z": 1}')


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "strin"}, "Invalid type: strin"),
        ({"not": {}}, "Unimplemented keys"),
        ({"$ref": "#/x"}, "does not exist"),
        ({"$ref": "https://example.com/schema"}, "does not fetch"),
        ({"$ref": "file:///etc/passwd"}, "does not fetch"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "string", "pattern": 9000 * "("}, "regex parse error"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "Unsatisfiable"),
        ({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}, "Parser Error"),
        ({"type": "object", "properties": {"a": {"type": "string", "minLength": -1}}}, "minLength"),
    ],
)
def test_what_cannot_be_followed_is_said_in_one_line(
    schema: dict[str, Any], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SchemaError, match=why) as caught:
        json_schema.check(json_schema.canonical(schema))
    assert "\n" not in str(caught.value)
    assert "verbose" not in str(caught.value)
    assert 0 < len(str(caught.value)) <= 300
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("where", [lambda options: {"x-guidance": options}, lambda options: {"x-guidance": [options]}])
@pytest.mark.parametrize("options", [{"lenient": True}, {"whitespace_flexible": True}, {"coerce_one_of": True}])
def test_the_options_of_the_library_are_no_part_of_a_schema(where: Any, options: dict[str, Any]) -> None:
    """With some of them it would ignore what it does not know."""
    with pytest.raises(SchemaError, match="x-guidance"):
        json_schema.check(json_schema.canonical({"type": "array", "not": {}} | where(options)))


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '"a"'])
def test_a_text_that_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(SchemaError):
        json_schema.check(text)


def test_a_mask_that_would_take_long_is_an_error() -> None:
    """Of a number with more states than there is memory for."""
    primes = (97, 89, 83, 79, 73, 71, 67)
    schema = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in primes]}
    demo = Tokenizer.from_file(str(PROJECT_ROOT / DEFAULT_MODEL / "tokenizer.json"))
    tokens = LLTokenizer(demo.to_str(), n_vocab=demo.get_vocab_size(), eos_token=[2])
    matcher = json_schema.matcher(json_schema.canonical(schema), tokens)
    for digit in "12345678":
        matcher.compute_bitmask()
        matcher.consume_token(demo.token_to_id(digit))
    assert "too many expressions" in json_schema.one_line(matcher.get_error())


def test_a_text_that_is_too_long_to_be_followed_is_refused() -> None:
    """It would be gone through for each token."""
    with pytest.raises(SchemaError, match="Too many items"):
        json_schema.check(json_schema.canonical({"const": {f"k{i}": [i, None, {"x": "yyyyy"}] for i in range(1200)}}))
