"""JSON Schema keyword by keyword: a grammar accepts what the schema says."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.shared.text.grammar_error import GrammarError
from quire.shared.text.schema import patterns
from quire.shared.text.schema.document import Document
from quire.shared.text.schema.negation import complement
from tests.support.schema_values import accepted, accepts

# --- arrays -----------------------------------------------------------------------------------------------------------


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
    ],
)  # fmt: skip
def test_an_array_is_what_the_schema_says(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    assert accepted(schema, *good) == good
    assert accepted(schema, *bad) == []


@pytest.mark.slow
def test_many_values_come_in_the_order_of_their_list() -> None:
    schema = {"uniqueItems": True, "items": {"enum": list("abcdefgh")}, "minItems": 1}
    assert accepted(schema, ["a", "b", "h"], ["c"], ["b", "a"], ["a", "a"]) == [["a", "b", "h"], ["c"]]


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


# --- bounds -----------------------------------------------------------------------------------------------------------


BOUNDS_INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}
LARGEST = 2**63 - 1024


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (BOUNDS_INTEGER | {"minimum": -(2**63), "maximum": 2**63 - 1}, [0, -LARGEST, LARGEST], [2**63, -(2**63) - 1]),
        (BOUNDS_INTEGER | {"minimum": -(2**63) + 1}, [-5], [-(2**64)]),
        (BOUNDS_INTEGER | {"minimum": 2**53 + 1}, [2**53 + 2], [2**53]),
        (BOUNDS_INTEGER | {"maximum": 2**53 + 3}, [2**53 + 2], [2**53 + 4]),
        (BOUNDS_INTEGER | {"minimum": 10**18}, [10**18, LARGEST], [10**18 - 1]),
        (BOUNDS_INTEGER | {"exclusiveMaximum": -(10**18)}, [-(10**18) - 128], [-(10**18), 0]),
        (NUMBER | {"minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}, [0, 1.5, -1e15], []),
        (NUMBER | {"minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, [0, 1.5, -1e15], []),
        (NUMBER | {"minimum": 5e-324}, [1, 0.5], [0, -1]),
        (NUMBER | {"exclusiveMinimum": 5e-324}, [1, 0.5], [0, -1]),
        (NUMBER | {"minimum": -5e-324}, [0, 1], [-1, -0.5]),
        (NUMBER | {"maximum": 5e-324}, [0, -1], [1, 0.5]),
        (NUMBER | {"maximum": -5e-324}, [-0.5, -1], [0, 1]),
        ({"minimum": -(2**63)}, [0, "a", None], []),
        ({"exclusiveMinimum": 0, "type": "number", "maximum": 0.5}, [0.25, 0.5], [0, 1]),
    ],
)
def test_numbers_follow_their_bounds(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    assert accepted(schema, *good) == good
    assert accepted(schema, *bad) == []


@pytest.mark.parametrize("bound", [{"minimum": 2**63}, {"maximum": -(2**63)}, {"exclusiveMinimum": 1e300}])
def test_a_bound_without_numbers_beyond_it_is_refused_by_name(bound: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match=f"{next(iter(bound))} is beyond -?{LARGEST}"):
        accepts(NUMBER | bound, 1)


# --- conditions -------------------------------------------------------------------------------------------------------


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


# --- negation ---------------------------------------------------------------------------------------------------------


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


# --- patterns ---------------------------------------------------------------------------------------------------------


TEXTS = ["", "f", "fo", "foo", "foox", "b", "bar", "a.b", "a/b", "ä", "\n"]


def matches(pattern: str, text: str) -> bool:
    """Search as Python does, which writes `\\x{e4}` in another way."""
    pattern = re.sub(r"\\x\{([0-9a-f]+)\}", lambda code: re.escape(chr(int(code[1], 16))), pattern)
    return bool(re.search(pattern.replace("$", r"\Z"), text))  # `$` of Python matches before a newline, too


@given(st.lists(st.sampled_from(TEXTS), max_size=5), st.sampled_from(TEXTS) | st.text("fobar./ä", max_size=4))
def test_patterns_of_texts(texts: list[str], text: str) -> None:
    outside, elsewhere = patterns.none_of(texts), patterns.none_starting_with(texts)
    assert outside is not None
    assert matches(outside, text) is (text not in texts)
    assert (elsewhere is not None and matches(elsewhere, text)) is (not text.startswith(tuple(texts)))


def test_llguidance_reads_these_patterns() -> None:
    for pattern in (patterns.none_of(["foo", "a/b", "ä"]), patterns.none_starting_with(["fo", "ä"])):
        assert pattern is not None
        expected = [text for text in TEXTS if matches(pattern, text)]
        assert accepted({"type": "string", "pattern": pattern}, *TEXTS) == expected
    assert accepted({"type": "string", "pattern": patterns.length_between(1, 3)}, *TEXTS) == [
        text for text in TEXTS if 1 <= len(text) <= 3
    ]


def test_texts_that_are_too_long_have_no_complement() -> None:
    assert patterns.none_of(["x" * 3000]) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "^(?=.*[0-9])(?=.{3,5}$)[a-z0-9]+$",
        "^(?!foo|bar)[a-z]+$",
        "^(?!foo$)[a-z]*$",
        "^(?!(?:foo|bar)$).*$",
        r"^(?!a\.b).+$",
        "^(?=fo)(?!foo)[^|]*$",
        "^(?!)a",
    ],
)
def test_lookaheads_at_the_beginning_become_patterns(pattern: str) -> None:
    texts = [*TEXTS, "ab1", "abcdef1", "foo1", "barx", "baz", "a"]
    found = patterns.without_lookaheads(pattern)
    if found is None:
        assert pattern == "^(?!)a"
        return
    assert not any("(?=" in one or "(?!" in one for one in found)
    for text in texts:
        assert all(matches(one, text) for one in found) is matches(pattern, text), text
    assert accepted({"type": "string", "pattern": pattern}, *texts) == [
        text for text in texts if matches(pattern, text)
    ]


@pytest.mark.parametrize("pattern", ["a", "^a(?=b)", "^(?!a)b|c", "^(?!a+)b", "^(?!.*a)b", "(?=a)b", "^(?=a"])
def test_other_lookaheads_are_left_to_llguidance(pattern: str) -> None:
    assert patterns.without_lookaheads(pattern) is None


# --- unevaluated ------------------------------------------------------------------------------------------------------


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
