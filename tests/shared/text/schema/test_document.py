"""Schemas as documents: references, names, facts and the rewriting as a whole."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from quire.shared.text import grammar
from quire.shared.text.grammar_error import GrammarError
from quire.shared.text.json_schema import simplify
from quire.shared.text.schema.document import MAX_COPIES, Document
from quire.shared.text.schema.facts import are_disjoint
from quire.shared.text.schema.formats import FORMATS
from quire.shared.text.schema.words import words
from tests.support.schema_values import BYTES, accepted, accepts, accepts_text

# --- document ---------------------------------------------------------------------------------------------------------


ROOT: dict[str, Any] = {
    "$defs": {
        "a/b": {"const": 1},
        "list": {"anyOf": [{}, {"const": 2}]},
        "named": {"$anchor": "x"},
        "far": {"$ref": "#x"},
    }
}


def test_references_are_followed_within_the_document() -> None:
    document = Document(ROOT)
    for reference, target in (
        ("#", ROOT),
        ("#/$defs/a~1b", {"const": 1}),
        ("#/$defs/list/anyOf/1", {"const": 2}),
        ("#x", {"$anchor": "x"}),
        ("#/$defs/none", None),
        ("#/$defs/list/anyOf/7", None),
        ("#y", None),
        ("https://example.com", None),
        (5, None),
    ):
        assert document.target(reference) == target
    assert document.resolve({"$ref": "#/$defs/far"}) == {"$anchor": "x"}
    assert document.resolve({"$ref": "#/$defs/list/anyOf/1", "title": "Two"}) == {"const": 2}
    assert document.resolve({"$ref": "#x", "type": "null"}) == {"$ref": "#x", "type": "null"}
    assert document.resolve({"$ref": "#y"}) == {"$ref": "#y"}
    assert document.resolve(True) is True


def test_a_reference_to_itself_ends() -> None:
    circle = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert Document(circle).resolve(circle) == {"$ref": "#/$defs/a"}


def test_the_original_stays_when_the_schema_is_rewritten() -> None:
    root: dict[str, Any] = {"$defs": {"a": {"const": 1}}}
    document = Document(root)
    root["$defs"]["a"]["const"] = 2
    assert document.target("#/$defs/a") == {"const": 1}


def test_references_in_a_document_with_embedded_resources_are_not_followed() -> None:
    """They are relative to the resource."""
    assert Document({"$defs": {"a": {"$id": "x", "$ref": "#/b"}}, "b": {}}).target("#/b") is None
    assert Document({"$id": "x", "b": {}}).target("#/b") == {}


def test_what_is_copied_is_bounded() -> None:
    with pytest.raises(GrammarError, match="too large"):
        Document({}).copy({"a": [{"b": {}}] * MAX_COPIES})


# --- facts ------------------------------------------------------------------------------------------------------------


def kind(name: str, **changes: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]} | changes


@pytest.mark.parametrize(
    ("branches", "disjoint"),
    [
        ([{"type": "string"}, {"type": "number"}], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"const": 1}, {"enum": [2, "1"]}], True),
        ([kind("a"), kind("b"), {"type": "null"}], True),
        ([kind("a"), kind("b", required=[])], True),
        ([kind("a", required=[]), kind("b", required=[])], False),
        ([kind("a"), {"$ref": "#/$defs/b"}], True),
        ([{"const": number} for number in range(101)], False),  # too many to compare
    ],
)
def test_branches_exclude_each_other_by_types_constants_and_required_properties(
    branches: list[Any], disjoint: bool
) -> None:
    assert are_disjoint(branches, Document({"$defs": {"b": kind("b")}})) is disjoint


# --- names ------------------------------------------------------------------------------------------------------------


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


# --- rewrite ----------------------------------------------------------------------------------------------------------


DATE = FORMATS["date"]


@pytest.mark.parametrize(
    ("schema", "simplified"),
    [
        ({"format": "date"}, {"pattern": DATE}),
        ({"format": "date", "pattern": "^2"}, {"pattern": "^2", "allOf": [{"pattern": DATE}]}),
        ({"format": "uuid"}, {"format": "uuid"}),
        ({"format": "my-own"}, {}),
        ({"uniqueItems": False}, {}),
        ({"minItems": 2.0}, {"minItems": 2}),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, {"maximum": 0.5, "minimum": 1e-6}),
        ({"type": "integer", "exclusiveMinimum": 0}, {"type": "integer", "exclusiveMinimum": 0}),
        ({"pattern": "^(?=a).b"}, {"allOf": [{"pattern": "^(?:a)"}, {"pattern": "^.b"}]}),
        (
            {"$dynamicRef": "#x", "$defs": {"x": {"$dynamicAnchor": "x"}}},
            {"$defs": {"x": {"$anchor": "x"}}, "$ref": "#x"},
        ),
        ({"unknown": 5}, {"unknown": 5}),
        ({"propertyNames": {"type": "string"}}, {}),
        (
            {"propertyNames": {"pattern": "^a"}},
            {"allOf": [{"patternProperties": {"^a": True}, "additionalProperties": False}]},
        ),
        ({"oneOf": [{"type": "string"}, {"type": "number"}]}, {"anyOf": [{"type": "string"}, {"type": "number"}]}),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        # Data that looks like a schema is not touched.
        ({"const": {"format": "date"}}, {"const": {"format": "date"}}),
        (
            {"properties": {"format": {"format": "my-own"}}},
            {"patternProperties": {"^": True}, "additionalProperties": False, "properties": {"format": {}}},
        ),
    ],
)
def test_a_schema_is_rewritten_in_place(schema: dict[str, Any], simplified: dict[str, Any]) -> None:
    simplify(schema)
    assert schema == simplified


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("^score$", ["score"]),
        ("^(a|bc)$", ["a", "bc"]),
        ("^(?:ab|ac)?$", ["", "ab", "ac"]),
        ("^[a-c_]$", ["_", "a", "b", "c"]),
        ("^a{2,3}$", ["aa", "aaa"]),
        ("^a$|^b$", ["a", "b"]),
        ("^(^a$)$", ["a"]),
        (r"^\x61\.$", ["a."]),
        (r"^[\s\S]{0,0}$", [""]),
        ("$^", [""]),
        ("^a$b", []),
        ("a^b$", None),
        ("^(){1000000}$", [""]),
        ("^((((){200}){200}){200}){200}$", [""]),
    ],
)
def test_few_texts_are_listed(pattern: str, texts: list[str] | None) -> None:
    found = words(pattern)
    assert (found if found is None else sorted(found)) == texts


@pytest.mark.parametrize(
    "pattern",
    [
        "", "a", "^a", "a$", "^a$|b", "^a*$", "^a+$", "^.$", "^[^a]$", r"^\d$", "(?i)^a$", "^(?i:a)$", r"^(a)\1$",
        "^(?=a)a$", "^[[a]]$", "^a{,3}$", "^[0-9]{3}$", "^(a{0,60}){0,60}$", "^a{9999}$", "^(",
        "^" + "(" * 5000 + ")" * 5000 + "$",
    ],
)  # fmt: skip
def test_many_texts_are_not_listed(pattern: str) -> None:
    assert words(pattern) is None


# --- names that occur once, and names that may be repeated ------------------------------------------------------------


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
    """As docs/api/chat.md says; the answer is valid with the last value."""
    assert accepts_text(schema, text)
    jsonschema.validate(json.loads(text), schema)


def test_a_repeated_name_counts_twice_for_the_number_of_properties() -> None:
    """As docs/api/chat.md says: only here an answer may break its schema."""
    schema = {"type": "object", "minProperties": 2, "maxProperties": 2}
    assert accepts_text(schema, '{"x": 1, "x": 2}')
    assert not accepts_text(schema, '{"x": 1}')
    assert not accepts_text(schema, '{"x": 1, "x": 2, "y": 3}')
