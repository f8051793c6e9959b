"""Answers under schemas that are composed by chance are valid: a grammar never accepts more than its schema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from quire.ops.tools.json_schema_suite import draw
from quire.shared.text import grammar
from quire.shared.text.grammar_error import GrammarError
from tests.support.schema_values import BYTES, VOCABULARY, accepts

SCALARS: list[Any] = [None, True, False, 0, 1, 2, -1, 1.5, 4, "", "a", "b", "ab", "abc", "foo"]
ARRAYS: list[Any] = [[], [1], [1, 1], [1, 2], ["a"], ["a", "b"], [1, "a"], [1, 2, 3], [[1]], [True, False], ["b", 1]]
OBJECTS: list[Any] = [
    {}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": "x"}, {"a": 1, "c": 2}, {"c": 1}, {"a": None},
    {"a": 1, "b": 2, "c": 3}, {"a": {"a": 1}}, {"ab": 1}, {"a": [1]}, {"b": "b"},
]  # fmt: skip
VALUES = SCALARS + ARRAYS + OBJECTS
KINDS = ["null", "boolean", "integer", "number", "string", "array", "object"]
PATTERNS = ["^a", "b$", "^(?!a)", "^(?=a).b", "^[ab]+$", "^(?!foo$)[a-z]*$"]
NAMES: list[Any] = [{"maxLength": 1}, {"pattern": "^a"}, {"enum": ["a", "b"]}, {"const": "a"}, False, {"minLength": 2}]
COUNTS = [
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minContains",
    "maxContains",
    "minProperties",
    "maxProperties",
]
BOUNDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
LISTS = ["prefixItems", "allOf", "anyOf", "oneOf"]
PARTS = [
    "items",
    "contains",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "unevaluatedProperties",
    "unevaluatedItems",
]
OTHERS = [
    "type",
    "const",
    "enum",
    "multipleOf",
    "pattern",
    "uniqueItems",
    "properties",
    "patternProperties",
    "required",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "$ref",
]
# Conditions come twice as often, because a condition alone says little.
KEYWORDS = COUNTS + BOUNDS + LISTS + PARTS + OTHERS + ["not", "oneOf", "if", "then", "else", "contains"]


class Chance(random.Random):
    """Composes schemas."""

    def schema(self, depth: int) -> Any:
        if depth <= 0 or self.random() < 0.08:
            simple = [True, False, {}, {"type": self.choice(KINDS)}, {"const": self.choice(SCALARS)}]
            return self.choice([*simple, {"enum": self.sample(VALUES, 3)}])
        return {key: self.value(key, depth - 1) for key in self.sample(KEYWORDS, self.choice([1, 1, 2, 2, 3]))}

    def value(self, keyword: str, depth: int) -> Any:
        if keyword in COUNTS:
            return self.randint(0, 3)
        if keyword in BOUNDS:
            return self.choice([0, 1, 2, 1.5, -1])
        if keyword in LISTS:
            return [self.schema(depth) for _ in range(self.randint(1, 3))]
        if keyword in PARTS:
            return self.schema(depth)
        names = self.sample("abc", self.randint(1, 2))
        simple: dict[str, Any] = {
            "type": self.choice([*KINDS, ["string", "null"], ["integer", "object"]]),
            "const": self.choice(VALUES),
            "enum": self.sample(VALUES, self.randint(1, 4)),
            "multipleOf": self.choice([2, 0.5]),
            "pattern": self.choice(PATTERNS),
            "uniqueItems": self.random() < 0.8,
            "required": names,
            "propertyNames": self.choice(NAMES),
            "dependentRequired": {name: self.sample("abc", 1) for name in names},
            "$ref": self.choice(["#/$defs/x", "#/$defs/y"]),
        }
        if keyword in simple:
            return simple[keyword]
        return {name: self.schema(depth) for name in (["^a"] if keyword == "patternProperties" else names)}


def faults(seed: int) -> list[Any] | None:
    """Return what a grammar accepts against its schema; None if the schema was refused."""
    chance = Chance(seed)
    schema = {"title": "x", "$defs": {"x": chance.schema(2), "y": chance.schema(1)}}
    schema |= {key: chance.value(key, 2) for key in chance.sample(KEYWORDS, chance.randint(1, 3))}
    text = grammar.write("json_schema", schema)
    try:
        grammar.check(text, VOCABULARY)
    except GrammarError:
        return None
    validator = jsonschema.Draft202012Validator(schema)
    answers = [draw(text, BYTES, random.Random(number)) for number in range(3)]
    try:
        found = [value for value in VALUES if not validator.is_valid(value) and accepts(schema, value)]
        found += [one for one in answers if one is not None and not validator.is_valid(json.loads(one))]
    except RecursionError:  # the schema refers to itself, and has no meaning
        return []
    return [json.dumps(schema), *found] if found else []


def test_no_grammar_accepts_more_than_its_schema() -> None:
    results = [faults(seed) for seed in range(150)]
    assert [found for found in results if found] == []
    assert sum(found is not None for found in results) > 90, "too many are refused"


@pytest.mark.soak
def test_no_grammar_accepts_more_than_its_schema_in_a_long_run() -> None:
    assert [found for found in map(faults, range(1000, 4000)) if found] == []
