from __future__ import annotations

from typing import Any

import pytest

from quire.shared.text.grammar_error import GrammarError
from quire.shared.text.schema.conditions import CONDITIONS, write_out
from quire.shared.text.schema.document import Document
from tests.support.schema_checks import accepted, accepts

FRUIT: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["apple", "plum"]}, "stone": {"type": "boolean"}},
    "required": ["kind"],
    "additionalProperties": False,
}
IS_PLUM = {"properties": {"kind": {"const": "plum"}}}
APPLE, PLUM, STONE = {"kind": "apple"}, {"kind": "plum"}, {"kind": "plum", "stone": True}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"not": {"type": "string"}}, [1, None, {}], ["a"]),
        ({"type": "string", "not": {"enum": ["a", "b"]}}, ["", "c", "ab"], ["a", "b", 1]),
        ({"type": "integer", "not": {"minimum": 3}}, [2, -5], [3, 4]),
        ({"type": "object", "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
        ({"not": {"anyOf": [{"type": "string"}, {"type": "number"}]}}, [None, []], ["a", 1]),
        (FRUIT | {"if": IS_PLUM, "then": {"required": ["stone"]}}, [APPLE, STONE], [PLUM]),
        (
            FRUIT | {"if": {"required": ["stone"]}, "then": {"properties": {"kind": {"const": "plum"}}}},
            [APPLE, PLUM, STONE],
            [{"kind": "apple", "stone": True}],
        ),
        ({"if": {"type": "string"}, "else": {"type": "null"}}, ["a", None], [1]),
        ({"type": "integer", "then": False, "else": False}, [1], []),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, ["abcd"], ["a", 1]),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, "a"], [3]),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"}, [{"a": 1}], [{}, {"a": 1, "b": 2}]),
        ({"anyOf": [{"minimum": 1}], "oneOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], [0, "a"]),
        ({"dependentRequired": {"a": ["b"]}, "type": "object"}, [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
        (
            {"properties": {"a": {}, "b": {}}, "dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}}}},
            [{"a": 1, "b": None}, {"b": 1}, {"a": 1}, 5],
            [{"a": 1, "b": 1}],
        ),
    ],
)  # fmt: skip
def test_an_answer_meets_the_condition(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    assert accepted(schema, *good) == good
    assert accepted(schema, *bad) == []


def test_no_condition_is_left() -> None:
    schema: dict[str, Any] = {
        "not": {"type": "null"}, "if": {"type": "string"}, "then": {"minLength": 1}, "dependentRequired": {"a": ["b"]}
    }  # fmt: skip
    write_out(schema, Document(schema))
    assert not schema.keys() & CONDITIONS


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"not": {"pattern": "a+"}}, "not cannot be followed here"),
        ({"not": {"multipleOf": 2}}, "not cannot be followed here"),
        ({"if": {"pattern": "a+"}, "then": {"minLength": 2}}, "if cannot be followed here"),
        ({"not": {}}, "Unsatisfiable"),
        ({"oneOf": [{"pattern": "^a+"}, {"pattern": "b+$"}]}, "oneOf has branches that may both match; use anyOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf has branches that may both match; use anyOf"),
        ({"oneOf": [{"minLength": number} for number in range(20)]}, "oneOf has branches that may both match"),
        ({"dependentRequired": []}, "dependentRequired must be an object"),
        ({"dependentRequired": {"a": 5}}, "of the wrong type"),
        ({"not": {"type": "null"}, "allOf": {}}, "allOf must be an array"),
    ],
)
def test_a_condition_that_cannot_be_followed_is_refused_by_name(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        accepts(schema, None)
