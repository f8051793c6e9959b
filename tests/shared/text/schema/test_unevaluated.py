from __future__ import annotations

from typing import Any

import pytest

from quire.shared.text.grammar_error import GrammarError
from tests.support.schema_checks import accepted, accepts

A: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}
CLOSED: dict[str, Any] = {"type": "object", "unevaluatedProperties": False}
B: dict[str, Any] = {"properties": {"b": {}}}
CLOSED_ITEMS: dict[str, Any] = {"type": "array", "unevaluatedItems": False}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (CLOSED | A, [{}, {"a": 1}], [{"b": 1}, {"a": "x"}]),
        (CLOSED | {"allOf": [A], "properties": {"b": {}}}, [{"b": 1}, {"b": 1, "a": 1}], [{"c": 1}]),
        (CLOSED | {"$ref": "#/$defs/a", "$defs": {"a": A}}, [{"a": 1}], [{"b": 1}]),
        (
            CLOSED | {"anyOf": [A | {"required": ["a"]}, {"properties": {"b": {}}, "required": ["b"]}]},
            [{"a": 1}, {"b": 1}],
            [{}, {"c": 1}, {"a": 1, "c": 1}],
        ),
        (CLOSED | {"if": {"required": ["a"]}, "then": A, "else": B}, [{"a": 1}, {"b": 2}], [{"c": 1}]),
        (CLOSED | {"not": {"required": ["b"]}} | A, [{"a": 1}], [{"b": 1}]),
        (CLOSED | {"allOf": [{"additionalProperties": True}]}, [{"b": 1}], []),
        (CLOSED | {"patternProperties": {"^x": {}}}, [{"xy": 1}], [{"y": 1}]),
        ({"type": "object", "unevaluatedProperties": {"type": "string"}} | A, [{"a": 1, "b": "x"}], [{"b": 1}]),
        (CLOSED_ITEMS | {"prefixItems": [{"type": "string"}]}, [[], ["a"]], [["a", 1], [1]]),
        (CLOSED_ITEMS | {"allOf": [{"prefixItems": [{}]}, {"prefixItems": [{}, {}]}]}, [[1, 2]], [[1, 2, 3]]),
        (CLOSED_ITEMS | {"anyOf": [{"items": {"type": "null"}}, {"prefixItems": [{}]}]}, [[None, None], [1]], [[1, 2]]),
        (CLOSED_ITEMS | {"dependentSchemas": {"a": {"contains": True}}}, [[]], [[1]]),
        (CLOSED_ITEMS | {"contains": {"type": "string"}}, [["a"]], [[1], ["a", 1]]),
        (CLOSED_ITEMS | {"contains": {"type": "string"}, "minContains": 0, "maxContains": 1}, [[]], [["a", 1], [1]]),
    ],
)  # fmt: skip
def test_only_what_is_evaluated_is_allowed(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    assert accepted(schema, *good) == good
    assert accepted(schema, *bad) == []


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (CLOSED | {"$ref": "https://example.com"}, "references to elsewhere"),
        (CLOSED | {"$ref": "#"}, "references that are this deep"),
        (CLOSED | {"allOf": [{"anyOf": [A, {}, {"type": "object"}]} for _ in range(5)]}, "so many branches"),
    ],
)
def test_what_cannot_be_split_is_refused(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        accepts(schema, {})
