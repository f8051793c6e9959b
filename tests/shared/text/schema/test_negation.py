from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from quire.shared.text.schema.document import Document
from quire.shared.text.schema.negation import complement

VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 5, 1.5, "", "a", "ab", "abc", [], [1], [1, "a"], ["a", 1], [2, 2, 2],
    {}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 2}, {"c": [1]},
]  # fmt: skip


def outside(schema: Any, root: dict[str, Any] | None = None) -> tuple[list[Any], bool]:
    """Return the values that the complement of a schema matches."""
    root = root or {}
    found = complement(schema, Document(root))
    checked = [jsonschema.Draft202012Validator(branch | root) for branch in found.branches]
    return [value for value in VALUES if any(one.is_valid(value) for one in checked)], found.is_whole


@pytest.mark.parametrize(
    "schema",
    [
        True,
        False,
        {},
        {"type": "string"},
        {"type": ["number", "null"]},
        {"const": 1},
        {"const": "a"},
        {"enum": ["a", "ab", None, True, 1, 5]},
        {"minLength": 2},
        {"maxLength": 1},
        {"minLength": 0},
        {"minimum": 1},
        {"exclusiveMaximum": 2},
        {"minItems": 1},
        {"maxItems": 1},
        {"minProperties": 1},
        {"maxProperties": 1},
        {"required": ["a", "b"]},
        {"properties": {"a": {"type": "number"}}},
        {"prefixItems": [{"type": "number"}, False]},
        {"items": True},
        {"allOf": [{"type": "string"}, {"minLength": 2}]},
        {"anyOf": [{"type": "string"}, {"required": ["a"]}]},
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "object"}},
        {"dependentRequired": {"a": ["b"]}},
        {"dependentSchemas": {"a": {"required": ["b"]}}},
        {"type": "object", "required": ["a"], "title": "A", "unknown": 5},
    ],
)
def test_the_complement_is_whole(schema: Any) -> None:
    found, is_whole = outside(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert is_whole
    assert found == [value for value in VALUES if not validator.is_valid(value)]


@pytest.mark.parametrize(
    ("schema", "some"),
    [
        ({"type": "integer"}, [None, "a", {}]),  # numbers that are no integers are missing
        ({"items": {"type": "integer"}}, [["a", 1]]),
        ({"contains": {"type": "string"}}, [[], [1]]),
        ({"const": [1]}, [None, [1, "a"]]),
        ({"const": {"a": 1}}, [None, {}, {"b": 1}]),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, [1, {}]),
        ({"type": "string", "pattern": "a"}, [None, 1]),
        ({"pattern": "a"}, []),
        ({"multipleOf": 2}, []),
        ({"unevaluatedProperties": False}, []),
        ({"$ref": "https://example.com"}, []),
        ({"minLength": "x"}, []),
    ],
)
def test_a_complement_may_lack_values_and_says_so(schema: Any, some: list[Any]) -> None:
    found, is_whole = outside(schema)
    assert not is_whole
    assert all(value in found for value in some)
    if "$ref" not in schema and "x" not in schema.values():
        validator = jsonschema.Draft202012Validator(schema)
        assert not any(validator.is_valid(value) for value in found)


def test_references_are_followed_to_a_depth() -> None:
    root = {"$defs": {"a": {"type": "string"}, "b": {"properties": {"a": {"$ref": "#/$defs/b"}}}}}
    assert outside({"$ref": "#/$defs/a"}, root) == ([value for value in VALUES if type(value) is not str], True)
    assert outside({"$ref": "#/$defs/b"}, root) == ([], False)
