from __future__ import annotations

from typing import Any

import pytest

from quire.shared.text.grammar_error import GrammarError
from tests.support.schema_checks import accepted, accepts

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
UNIQUE: dict[str, Any] = {"uniqueItems": True}
CONST_1 = {"type": "integer", "const": 1}
TO_3 = {"type": "integer", "minimum": 1, "maximum": 3}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"contains": {"const": 1}}, [[1], [1, 2], [1, 1], "a"], [[], [2]]),
        ({"contains": STRING, "minContains": 2}, [["a", "b"], ["a", "b", 1]], [["a"], [1, 2]]),
        ({"contains": STRING, "maxContains": 1}, [["a"], ["a", 1, 2]], [["a", "b"], [1], []]),
        ({"contains": STRING, "minContains": 1, "maxContains": 2}, [["a"], ["a", "b", 1]], [["a", "b", "c"], []]),
        ({"contains": STRING, "minContains": 0, "maxContains": 1}, [[], ["a"], [1, 2]], [["a", "b"]]),
        ({"contains": STRING, "minContains": 0}, [[], [1]], []),
        ({"minContains": 2, "maxContains": 3}, [[], [1]], []),
        ({"prefixItems": [INTEGER], "contains": STRING}, [[1, "a"]], [["a"], [1]]),
        ({"prefixItems": [STRING], "items": False, "contains": STRING}, [["a"]], [["a", "b"], []]),
        ({"uniqueItems": True, "items": {"enum": ["a", "b"]}}, [[], ["a"], ["b", "a"], 5], [["a", "a"]]),
        ({"uniqueItems": True, "items": {"type": "boolean"}, "minItems": 2}, [[True, False]], [[], [True, True]]),
        ({"uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]]),
        ({"uniqueItems": True, "prefixItems": [STRING, INTEGER]}, [["a", 1], ["a"]], [["a", 1, 1]]),
        ({"uniqueItems": True, "prefixItems": [{"enum": [1, 2]}] * 2, "items": False}, [[1, 2], [2]], [[1, 1]]),
        (UNIQUE | {"items": TO_3, "maxItems": 2}, [[1, 3]], [[1, 1]]),
        (UNIQUE | {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"enum": [1, True]}}}, [[1, True]], [[1, 1]]),
        (UNIQUE | {"items": {"$ref": "#/$defs/a", "minimum": 2}, "$defs": {"a": {"enum": [1, 2, 3]}}}, [[2, 3]], [[1]]),
        (UNIQUE | {"items": {"type": "integer", "enum": [1, 2]}}, [[], [1], [2, 1]], [[1, 1], [3]]),
        (UNIQUE | {"items": {"type": "number", "enum": [1, 1.5]}}, [[1.5, 1]], [[1, 1]]),
        (UNIQUE | {"items": {"type": "boolean", "enum": [True]}}, [[True]], [[True, True], [False]]),
        (UNIQUE | {"items": {"type": ["string", "null"], "enum": ["a", None]}}, [[None, "a"]], [[None, None]]),
        (UNIQUE | {"items": {"type": ["boolean", "null"]}}, [[None, True]], [[None, None], [1]]),
        (UNIQUE | {"items": {"anyOf": [CONST_1, {"type": "string", "const": "a"}]}}, [["a", 1]], [[1, 1]]),
        (UNIQUE | {"items": {"oneOf": [CONST_1, {"type": "null"}]}}, [[None, 1]], [[1, 1]]),
        (UNIQUE | {"items": {"allOf": [{"enum": [1, 2]}, {"minimum": 2}]}}, [[2]], [[1]]),
        (UNIQUE | {"items": {"enum": ["a", "bc"], "minLength": 2}}, [["bc"]], [["a"]]),
        (UNIQUE | {"items": {"enum": ["a", "bc"], "pattern": "^a"}}, [["a"]], [["bc"]]),
        ({"uniqueItems": True, "items": {"enum": list("abcdefgh")}, "minItems": 1}, [["a", "h"], ["c"]], [["a", "a"]]),
    ],
)  # fmt: skip
def test_an_array_is_what_the_schema_says(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    assert accepted(schema, *good) == good
    assert accepted(schema, *bad) == []


def test_many_values_come_in_the_order_of_their_list() -> None:
    schema = {"uniqueItems": True, "items": {"enum": list("abcdefgh")}}
    assert accepted(schema, ["a", "b", "c"], ["b", "a"]) == [["a", "b", "c"]]


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"uniqueItems": True}, "uniqueItems needs items of few values"),
        ({"uniqueItems": True, "items": STRING}, "uniqueItems needs items of few values"),
        ({"uniqueItems": True, "items": {"enum": list(range(100))}}, "uniqueItems needs items of few values"),
        ({"uniqueItems": True, "items": {"enum": [1, 1.0]}, "minItems": 2}, "uniqueItems needs items of few values"),
        ({"uniqueItems": 0}, "uniqueItems"),
        ({"contains": STRING, "minContains": 100}, "from 0 to 64"),
        ({"contains": STRING, "minContains": "1"}, "from 0 to 64"),
        ({"contains": STRING, "minContains": 3, "maxContains": 2}, "maxContains is less than minContains"),
    ],
)
def test_what_cannot_be_listed_is_refused_by_name(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        accepts(schema | {"type": "array"}, [])
