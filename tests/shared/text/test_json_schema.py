"""Accepted JSON schemas follow JSON Schema; refused ones get an error with a remedy."""

from __future__ import annotations

import calendar
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from quire.shared.text import grammar
from quire.shared.text.grammar_error import GrammarError, one_line

BYTES = LLTokenizer("byte")
VOCABULARY = grammar.GrammarVocabulary({}, (256,), 257)


def matcher(schema: Any, tokenizer: LLTokenizer = BYTES) -> LLMatcher:
    return grammar.matcher(grammar.write("json_schema", schema), tokenizer, ())


def check(schema: Any) -> None:
    grammar.check(grammar.write("json_schema", schema), VOCABULARY)


def accepts(schema: dict[str, Any], text: str) -> bool:
    """True if a schema accepts a text as an answer, byte by byte."""
    made = matcher(schema, BYTES)
    return bool(made.consume_tokens(list(text.encode())) and made.is_accepting())


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
        ({"not": {}}, "Unsatisfiable"),
        ({"dependencies": {"a": ["b"]}}, "Unimplemented keys"),
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
    with pytest.raises(GrammarError, match=why) as caught:
        check(schema)
    assert "\n" not in str(caught.value)
    assert "verbose" not in str(caught.value)
    assert 0 < len(str(caught.value)) <= 300
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("where", [lambda options: {"x-guidance": options}, lambda options: {"x-guidance": [options]}])
@pytest.mark.parametrize("options", [{"lenient": True}, {"whitespace_flexible": True}, {"coerce_one_of": True}])
def test_the_options_of_the_library_are_no_part_of_a_schema(where: Any, options: dict[str, Any]) -> None:
    """Some options of the library would make it ignore unknown keywords."""
    with pytest.raises(GrammarError, match="x-guidance"):
        check({"type": "array", "not": {}} | where(options))


def test_a_mask_that_would_take_long_is_an_error() -> None:
    """The number of this schema has more states than fit in memory."""
    primes = (97, 89, 83, 79, 73, 71, 67)
    schema = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in primes]}
    demo = Tokenizer.from_file(str(PROJECT_ROOT / DEFAULT_MODEL / "tokenizer.json"))
    tokens = LLTokenizer(demo.to_str(), n_vocab=demo.get_vocab_size(), eos_token=[2])
    made = matcher(schema, tokens)
    for digit in "12345678":
        made.compute_bitmask()
        made.consume_token(demo.token_to_id(digit))
    assert "too many expressions" in one_line(made.get_error())


def test_a_text_that_is_too_long_to_be_followed_is_refused() -> None:
    """The matcher would go through the long text for each token."""
    with pytest.raises(GrammarError, match="Too many items"):
        check({"const": {f"k{i}": [i, None, {"x": "yyyyy"}] for i in range(1200)}})


def days(year: int) -> list[str]:
    return [f"{year:04}-{month:02}-{day:02}" for month in range(14) for day in range(33)]


@pytest.mark.parametrize("year", [1, 4, 100, 400, 1900, 1999, 2000, 2020, 2021, 2100, 2400, 9996, 9999])
@pytest.mark.parametrize(("form", "rest"), [("date", ""), ("date-time", "T12:00:00Z")])
def test_a_date_is_a_day_of_the_calendar(year: int, form: str, rest: str) -> None:
    made = matcher(({"type": "string", "format": form}), BYTES)
    accepted = []
    for day in days(year):
        one = made.deep_copy()
        if one.try_consume_tokens(list(f'"{day}{rest}"'.encode())) == len(f'"{day}{rest}"') and one.is_accepting():
            accepted.append(day)
    lengths = [calendar.monthrange(year, month)[1] for month in range(1, 13)]
    assert accepted == [f"{year:04}-{m:02}-{d:02}" for m, last in enumerate(lengths, 1) for d in range(1, last + 1)]


TIMES = {
    "00:00:00Z": True,
    "23:59:59.123456789Z": True,
    "08:30:06+05:45": True,
    "08:30:06-23:59": True,
    "08:30:06": False,
    "24:00:00Z": False,
    "16:60:00Z": False,
    "16:24:60Z": False,
    "16:24:61Z": False,
    "08:30:06.Z": False,
    "08:30:06+24:00": False,
    "08:30:06+05": False,
    "08:30:06z": False,
    # A leap second is the last second before midnight, UTC.
    "23:59:60Z": True,
    "23:59:60.9Z": True,
    "23:59:60+00:00": True,
    "15:59:60-08:00": True,
    "00:59:60+01:00": True,
    "01:29:60+01:30": True,
    "23:29:60+23:30": True,
    "00:29:60-23:30": True,
    "22:59:60Z": False,
    "23:58:60Z": False,
    "23:59:60+01:00": False,
    "23:59:60-01:00": False,
    "23:59:60+00:30": False,
    "22:59:60+00:00": False,
}


@pytest.mark.parametrize(("time", "is_one"), TIMES.items())
def test_a_time_is_one_that_a_clock_shows(time: str, is_one: bool) -> None:
    assert accepts({"type": "string", "format": "time"}, f'"{time}"') is is_one
    assert accepts({"type": "string", "format": "date-time"}, f'"1998-12-31T{time}"') is is_one


@pytest.mark.parametrize("text", ["0000-01-01", "1998-13-01", "98-01-01", "1998-01-01\\n", " 1998-01-01", "1998-1-1"])
def test_a_date_is_written_in_one_way(text: str) -> None:
    assert not accepts({"type": "string", "format": "date"}, f'"{text}"')


@pytest.mark.parametrize(
    ("name", "text"), [("duration", "P1W"), ("email", "a@b.c"), ("hostname", "a-b.c"), ("uuid", "1")]
)
@pytest.mark.parametrize("other", ["-", ""])
def test_the_formats_of_the_library_are_followed(name: str, text: str, other: str) -> None:
    text = text if name != "uuid" else "0123abcd-0123-0123-0123-0123456789ab"
    assert accepts({"type": "string", "format": name}, f'"{text}"')
    assert not accepts({"type": "string", "format": name}, f'"{other}"')


ANNOTATIONS = (
    "base64 base64url binary byte color file-path idn-email ipv6network iri json-pointer jwt password path regex "
    "unknown uri-reference uuid4 x"
)


@pytest.mark.parametrize("name", ANNOTATIONS.split())
def test_any_other_format_is_an_annotation(name: str) -> None:
    schema = {"type": "string", "format": name, "maxLength": 3}
    check(schema)
    assert accepts(schema, '"+ä"')
    assert not accepts(schema, '"four"')
    assert accepts({"type": "integer", "format": "int32"}, "17")


def test_a_format_that_is_no_text_is_refused() -> None:
    with pytest.raises(GrammarError, match="format"):
        check({"type": "string", "format": 5})


@pytest.mark.parametrize(
    "idle",
    [
        {"uniqueItems": False},
        {"propertyNames": True},
        {"propertyNames": {}},
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {"type": ["string", "null"], "title": "Name"}},
        {"propertyNames": {"format": "path"}},
    ],
)
def test_a_keyword_that_asks_for_nothing_is_accepted(idle: dict[str, Any]) -> None:
    check(idle)
    schema = {"type": "object", "properties": {"a": {"type": ["array", "object"]} | idle}}
    for value in ({}, {"a": [1, 1]}, {"a": {"b": 1, "": 2}}):
        assert accepts(schema, json.dumps(value))


def test_names_and_values_that_look_like_keywords_stay() -> None:
    """A property may have the name of a keyword, and a constant may look like a schema."""
    named = {"type": "object", "properties": {"format": {"const": "path"}, "discriminator": {"const": 1}}}
    named["required"] = ["format", "discriminator"]
    assert accepts(named, '{"format": "path", "discriminator": 1}')
    assert not accepts(named, "{}")
    value = {"format": "path", "uniqueItems": False, "oneOf": [{"type": "null"}, {"type": "string"}]}
    for schema in ({"const": value}, {"enum": [value]}):
        assert accepts(schema, json.dumps(value))


def animal(kind: Any, **changes: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": kind, "n": {"type": "integer"}}, "required": ["kind"]} | changes


CAT, DOG = animal({"const": "cat"}), animal({"enum": ["dog", "wolf"]})


def test_branches_may_refer_to_themselves() -> None:
    tree = {"oneOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/node"}], "discriminator": {"propertyName": "kind"}}
    node = animal({"const": "node"}, required=["kind", "left"])
    node["properties"] |= {"left": tree}
    schema = {"$defs": {"leaf": animal({"const": "leaf"}), "node": node}, "type": "array", "items": tree}
    check(schema)
    assert accepts(schema, '[{"kind": "node", "left": {"kind": "node", "left": {"kind": "leaf"}}}]')
    assert not accepts(schema, '[{"kind": "node", "left": {"kind": "twig"}}]')


def test_constants_are_compared_as_json_compares_them() -> None:
    assert accepts({"oneOf": [{"const": 1}, {"const": True}, {"const": "1"}, {"const": 2}]}, "1")
    with pytest.raises(GrammarError, match="Unsatisfiable"):  # nothing matches exactly one of them
        check({"oneOf": [{"const": 1}, {"const": 1.0}]})


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"type": "string", "pattern": "a+"}, {"type": "string", "pattern": "b+"}],
    ],
)
def test_branches_that_may_both_match_are_refused_with_a_remedy_of_a_client(branches: list[Any]) -> None:
    schema = {"oneOf": branches, "$defs": {"a": CAT}}
    with pytest.raises(
        GrammarError, match=r"may both match; use anyOf, or give each branch .* a const of its own"
    ) as caught:
        check(schema)
    assert "coerce_one_of" not in str(caught.value)
    del schema["oneOf"]
    check(schema | {"anyOf": branches})
