"""Validators: what each accepts, returns and refuses, and what its text says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from quire.shared.config.validators import (
    Flag,
    Integer,
    InvalidValue,
    Number,
    OneOf,
    Text,
    Texts,
    TokenIds,
    checked,
    fixed_array,
    read_map,
    short_array,
    shown,
)

ACCEPTED: list[tuple[Any, Any, Any]] = [
    (Integer(0, 5), 0, 0),
    (Integer(0, 5), 5, 5),
    (Number(0, 2), 2, 2.0),
    (Number(0, 2), 0.5, 0.5),
    (Flag(), True, True),
    (OneOf(("a", "b")), "b", "b"),
    (Text(), "", ""),
    (Text(1, 3), "abc", "abc"),
    (Texts(2, 1, 3), ["a", "abc"], ("a", "abc")),
    (TokenIds(2), [0, 2**31 - 1], (0, 2**31 - 1)),
    (TokenIds(1, high=None), [2**40], (2**40,)),
]
REFUSED: list[tuple[Any, Any, str]] = [
    (Integer(0, 5), 6, "x must be an integer from 0 to 5, not 6"),
    (Integer(0, 5), True, "x must be an integer from 0 to 5, not true"),
    (Integer(0, 5), 1.0, "x must be an integer from 0 to 5, not 1.0"),
    (Integer(-(2**63), 2**64 - 1), None, "x must be an integer from -2^63 to 2^64-1, not null"),
    (Number(0, 2), 2.1, "x must be a number from 0 to 2, not 2.1"),
    (Number(0, 2), float("nan"), "x must be a number from 0 to 2, not nan"),
    (Number(0, 2), False, "x must be a number from 0 to 2, not false"),
    (Flag(), 1, "x must be true or false, not 1"),
    (OneOf(("a", "b")), "c", "x must be one of a, b, not 'c'"),
    (OneOf(("a", "b")), ["a"], "x must be one of a, b, not an array of 1"),
    (Text(), 5, "x must be a string, not 5"),
    (Text(1, 3), "secret", "x must be a string of 1 to 3 characters, not of 6"),
    (Texts(2, 1, 3), "a", "x must be an array of at most 2 strings of 1 to 3 characters each, not 'a'"),
    (Texts(2, 1, 3), ["a"] * 3, "x must have at most 2 strings, not 3"),
    (Texts(2, 1, 3), [""], "x must have strings of 1 to 3 characters, not of 0"),
    (Texts(2, 1, 3), [5], "x must be an array of at most 2 strings of 1 to 3 characters each, not 5"),
    (TokenIds(2), [1, 2, 3], "x must have at most 2 token ids, not 3"),
    (TokenIds(2), [2**31], "x must be an array of at most 2 token ids, not 2147483648"),
    (TokenIds(2), [-1], "x must be an array of at most 2 token ids, not -1"),
    (TokenIds(2), {}, "x must be an array of at most 2 token ids, not an object"),
]


@pytest.mark.parametrize(("check", "value", "expected"), ACCEPTED)
def test_a_value_in_its_final_form(check: Any, value: Any, expected: Any) -> None:
    found = check("x", value)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(("check", "value", "message"), REFUSED)
def test_the_error_names_the_value_and_what_it_must_be(check: Any, value: Any, message: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        check("x", value)
    assert (str(refused.value), refused.value.name) == (message, "x")


def test_arrays_have_a_length() -> None:
    assert fixed_array("x", [1, 2], 2) == short_array("x", [1, 2], 2) == [1, 2]
    assert short_array("x", [], 2) == []
    for value in ([1], [1, 2, 3], (1, 2), None):
        with pytest.raises(InvalidValue, match="x must be an array of 2, not"):
            fixed_array("x", value, 2)
    for value in ([1, 2, 3], "ab"):
        with pytest.raises(InvalidValue, match="x must be an array of at most 2, not"):
            short_array("x", value, 2)


@dataclass(frozen=True, slots=True)
class Point:
    x: int = checked(Integer(0, 9))
    y: int = checked(Integer(0, 9), default=5)


def test_a_map_has_exactly_the_fields() -> None:
    assert read_map(Point, "point", {"x": 1, "y": 2}) == Point(1, 2)
    assert Point(3) == Point(3, 5)
    for value, message in (
        ({"x": 1}, "point has unknown or missing fields: y"),
        ({"x": 1, "y": 2, "z": 3}, "point has unknown or missing fields: z"),
        ({"x": 1, "y": 10}, "y must be an integer from 0 to 9, not 10"),
        ([1, 2], "point must be a map, not list"),
    ):
        with pytest.raises(InvalidValue) as refused:
            read_map(Point, "point", value)
        assert str(refused.value) == message


def test_a_value_is_shown_short_and_on_one_line() -> None:
    assert shown("a\nb") == r"'a\nb'"
    assert shown("x" * 100) == "'" + "x" * 56 + "..."
    assert [shown(value) for value in (None, True, {}, [])] == ["null", "true", "an object", "an array of 0"]
