from __future__ import annotations

from typing import Any

import pytest

from quire.shared.text.schema.formats import FORMATS
from quire.shared.text.schema.rewrite import simplify

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


def test_branches_with_different_constants_in_a_required_property_exclude_each_other() -> None:
    def branch(kind: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}

    schema: dict[str, Any] = {"oneOf": [{"$ref": "#/$defs/a"}, branch("b")], "$defs": {"a": branch("a")}}
    simplify(schema)
    assert "anyOf" in schema
