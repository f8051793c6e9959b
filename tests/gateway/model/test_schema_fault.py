from __future__ import annotations

from typing import Any

import pytest

from quire.gateway.model.schema_fault import MAX_TRIALS, SchemaFault, find_fault
from quire.shared.text.grammar_error import GrammarError

BAD = {"type": "string", "pattern": "BAD"}
GOOD = {"type": "integer"}


class Attempts:
    """Refuses each grammar with the text BAD."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self, grammar: str) -> None:
        self.count += 1
        if "BAD" in grammar:
            raise GrammarError("it is bad")


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": GOOD, "x": BAD}}, ".properties.x"),
        ({"properties": {"a": {"type": "array", "items": {"anyOf": [GOOD, BAD]}}}}, ".properties.a.items.anyOf[1]"),
        ({"properties": {"a": {"allOf": [{"not": BAD}]}}, "additionalProperties": False}, ".properties.a.allOf[0].not"),
        ({"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": BAD}}, ".properties.a"),
        ({"title": "BAD", "properties": {"a": GOOD}}, ""),
        ({"required": ["BAD"], "properties": [], "anyOf": {}}, ""),
    ],
)
async def test_the_place_of_a_fault(schema: dict[str, Any], path: str) -> None:
    assert await find_fault(schema, Attempts()) == SchemaFault(path, "it is bad")


async def test_a_schema_without_a_fault() -> None:
    attempts = Attempts()
    assert await find_fault({"properties": {"a": GOOD}}, attempts) is None
    assert attempts.count == 1


async def test_the_number_of_trials_is_bounded() -> None:
    attempts = Attempts()
    properties = {f"p{index}": GOOD for index in range(1000)}
    assert await find_fault({"properties": {**properties, "x": BAD}}, attempts) == SchemaFault("", "it is bad")
    assert attempts.count == MAX_TRIALS
