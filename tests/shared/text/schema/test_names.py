from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from quire.shared.text import grammar
from quire.shared.text.grammar_error import GrammarError
from tests.support.schema_checks import BYTES, accepted, accepts, accepts_text


@pytest.mark.parametrize(
    ("names", "good", "bad"),
    [
        (True, [{}, {"a": 1}], []),
        ({"type": "string", "title": "Name"}, [{"a": 1}], []),
        ({"maxLength": 2}, [{}, {"ab": 1}], [{"abc": 1}]),
        ({"minLength": 2}, [{"ab": 1}], [{"a": 1}]),
        ({"pattern": "^a"}, [{"ab": 1}, {}], [{"b": 1}]),
        ({"enum": ["a", "b", 5]}, [{"a": 1, "b": 2}], [{"c": 1}]),
        ({"const": "a.b"}, [{"a.b": 1}], [{"axb": 1}]),
        ({"format": "date"}, [{"2024-02-29": 1}], [{"2023-02-29": 1}]),
        ({"$ref": "#/$defs/n"}, [{"a": 1}], [{"b": 1}]),
        (False, [{}], [{"a": 1}]),
        ({"type": "integer"}, [{}], [{"a": 1}]),
    ],
)
def test_the_names_of_properties_follow_their_schema(names: Any, good: list[Any], bad: list[Any]) -> None:
    schema = {"type": "object", "propertyNames": names, "$defs": {"n": {"const": "a"}}}
    assert accepted(schema, *good) == good
    assert accepted(schema, *bad) == []


def test_an_object_with_all_names_has_no_comma_after_them() -> None:
    """Another name could not follow."""
    schema = {"type": "object", "properties": {"a": {}}, "propertyNames": {"enum": ["a", "b"]}}
    made = grammar.matcher(grammar.write("json_schema", schema), BYTES, ())
    assert made.consume_tokens(list(b'{"a": 1, "b": true'))
    assert made.validate_tokens(list(b",")) == 0
    assert made.validate_tokens(list(b"}")) == 1


CLOSED = {"type": "object", "additionalProperties": False}
SCORE = {"properties": {"score": {"type": "integer"}}, "required": ["score"]}


@pytest.mark.parametrize(
    "schema",
    [
        CLOSED | SCORE | {"patternProperties": {"^score$": {"minimum": 0}}},
        CLOSED | SCORE | {"patternProperties": {"^(score)?$": {"minimum": 0}}, "properties": {"score": {}, "": {}}},
        {"type": "object"} | SCORE | {"propertyNames": {"pattern": "^score$"}},
        {"type": "object", "propertyNames": {"maxLength": 0}, "properties": {"": {"type": "integer"}}},
        CLOSED | {"patternProperties": {"^score$": {"type": "integer"}}},
        SCORE | {"type": "object", "unevaluatedProperties": False, "patternProperties": {"^score$": {}}},
        SCORE | {"allOf": [CLOSED | {"patternProperties": {"^score$": {"type": "integer"}}}]},
    ],
)
@pytest.mark.parametrize("value", ["5", "true", "null"])
def test_an_object_with_all_names_of_its_patterns_has_no_comma_after_them(schema: dict[str, Any], value: str) -> None:
    """After a number, a boolean or null the comma is a token of its own, and nothing could follow it."""
    schema = json.loads(json.dumps(schema).replace('"integer"', json.dumps(["integer", "boolean", "null"])))
    name = "" if schema.get("propertyNames") == {"maxLength": 0} else "score"
    made = grammar.matcher(grammar.write("json_schema", {"allOf": [schema], "title": "x"}), BYTES, ())
    text = f'{{"{name}": {value}'.encode()
    if '"": {}' in json.dumps(schema):
        text += f', "": {value}'.encode()
    assert made.try_consume_tokens(list(text)) == len(text)
    assert made.validate_tokens(list(b",")) == 0
    assert made.validate_tokens(list(b"}")) == 1


def test_a_pattern_of_few_names_and_one_of_many_overlap() -> None:
    schema = CLOSED | {"patternProperties": {"^s$": {"type": "integer"}, "^[a-z]+$": {"enum": [1, "x"]}}}
    good = [{"s": 1}, {"t": "x"}, {"s": 1, "t": 1}]
    assert accepted(schema, *good, {"s": "x"}, {"s": 2}, {"T": 1}) == good


def test_declared_properties_and_the_schema_of_others_are_kept() -> None:
    schema = {
        "type": "object",
        "properties": {"ab": {"type": "integer"}, "long": {}},
        "additionalProperties": {"type": "string"},
        "propertyNames": {"maxLength": 2},
    }
    good = [{}, {"ab": 1}, {"ab": 1, "c": "x"}]
    assert accepted(schema, *good, {"long": 1}, {"c": 1}, {"ab": "x"}, {"xyz": "a"}) == good


@pytest.mark.parametrize("names", [{"format": "uuid"}, {"not": {"const": "a"}}, {"pattern": 5}, {"minLength": -1}, 5])
def test_names_that_cannot_be_followed_are_refused(names: Any) -> None:
    with pytest.raises(GrammarError, match="propertyNames"):
        accepts({"type": "object", "propertyNames": names}, {})


INTEGER = {"type": "integer"}
A = {"type": "object", "properties": {"a": INTEGER}}


@pytest.mark.parametrize(
    "schema",
    [
        A,
        A | {"additionalProperties": {}, "required": ["a", "b"]},
        {"type": "object", "required": ["a"]},
        {"allOf": [A, {"properties": {"b": {"type": "string"}}}], "additionalProperties": True},
        {"anyOf": [A, {"type": "null"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": A}},
        A | {"additionalProperties": {"type": ["integer", "string"]}},
        A | {"patternProperties": {"^x": INTEGER}},
        {"type": "object", "patternProperties": {"^a": INTEGER}},
        {"type": "object", "propertyNames": {"maxLength": 6}, "properties": {"a": INTEGER}},
        A | {"properties": {"a": INTEGER, "\n": INTEGER}},
    ],
)
def test_a_listed_name_occurs_once_in_any_spelling(schema: dict[str, Any]) -> None:
    """Else an answer could give a property any value, because the last one counts."""
    written = '"a": 1, "b": "x"'
    assert accepts_text(schema, f'{{{written}, "c": "y"}}')
    for name in ("a", "\\u0061"):
        assert not accepts_text(schema, f'{{{written}, "{name}": "x"}}')
        assert not accepts_text(schema, f'{{{written}, "{name}": 2}}') or "patternProperties" in schema
    assert not accepts_text(schema, f'{{{written}, "\\u000a": "x"}}') or "\n" not in schema.get("properties", {})


def test_the_order_of_properties_is_that_of_the_schema() -> None:
    schema = {"allOf": [{"$ref": "#/$defs/x"}], "properties": {"b": {}, "a": {}}, "$defs": {"x": A}}
    assert accepted(schema, {"a": 1, "b": "x"}, {"b": "x", "a": 1}) == [{"a": 1, "b": "x"}]


def test_control_characters_are_kept_if_further_names_may_have_any_value() -> None:
    good = [{"a": 1, "b": "\x03"}, {"a": 1, "\x1b": 1}]
    assert accepted(A, *good) == good
    strings = A | {"additionalProperties": {"type": "string"}}
    assert accepted(strings, {"b": "\n"}, {"b": "\x03"}) == [{"b": "\n"}]


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object"}, '{"x": 1, "x": 2}'),
        (A, '{"a": 1, "x": 1, "x": "s"}'),
        (A | {"additionalProperties": {"type": "string"}}, '{"a": 1, "x": "s", "x": "t"}'),
        ({"type": "object", "patternProperties": {"^x": INTEGER}}, '{"x1": 1, "x1": 2}'),
        ({"type": "object", "patternProperties": {"^[ab]$": INTEGER}}, '{"a": 1, "b": 1, "c": 3, "c": 4}'),
        ({"type": "object", "propertyNames": {"maxLength": 1}, "minProperties": 1}, '{"x": 1, "x": 2}'),
    ],
)
def test_a_name_that_no_schema_lists_may_be_repeated(schema: dict[str, Any], text: str) -> None:
    """As docs/api.md says; the answer is valid with the last value."""
    assert accepts_text(schema, text)
    jsonschema.validate(json.loads(text), schema)


def test_a_repeated_name_counts_twice_for_the_number_of_properties() -> None:
    """As docs/api.md says: only here an answer may break its schema."""
    schema = {"type": "object", "minProperties": 2, "maxProperties": 2}
    assert accepts_text(schema, '{"x": 1, "x": 2}')
    assert not accepts_text(schema, '{"x": 1}')
    assert not accepts_text(schema, '{"x": 1, "x": 2, "y": 3}')
