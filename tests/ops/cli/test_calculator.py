"""The calculator computes arithmetic exactly, and answers anything else with a reason."""

from __future__ import annotations

import json
import re
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.ops.cli.calculator import _PATTERN, CALCULATOR, MAX_LENGTH, CalculatorError, calculate, run_call


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("17 * 23", "391"),
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("10 - 4 - 3", "3"),
        ("12 / 4 / 3", "1"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.333333333"),
        ("-1 / 3", "-0.333333333"),
        ("--5", "5"),
        ("2*-3", "-6"),
        ("-1 / 999999999999", "0"),
        (" 7 ", "7"),
    ],
)
def test_arithmetic(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "a number is missing"),
        ("1 +", "a number is missing"),
        ("* 2", "a number is missing"),
        ("1 2", "'2' is at a wrong place"),
        ("(1 + 2", "a parenthesis is not closed"),
        ("1)", "')' is at a wrong place"),
        ("1 / (2 - 2)", "division by zero"),
        ("2 ** 3", "a number is missing"),
        ("__import__('os')", "'_' is neither a number"),
        ("1e9", "'e' is neither a number"),
        ("٣ + 1", "'٣' is neither a number"),
        ("(" * 100 + "1" + ")" * 99, "nested more than 20 deep"),
        ("1" * (MAX_LENGTH + 1), "longer than 200 characters"),
    ],
)
def test_what_is_no_arithmetic_has_a_reason(expression: str, reason: str) -> None:
    with pytest.raises(CalculatorError, match=re.escape(reason)):
        calculate(expression)


def binary(sides: st.SearchStrategy[tuple[str, Fraction]]) -> st.SearchStrategy[tuple[str, Fraction]]:
    """Sums, differences and products of two expressions, in parentheses, with their values."""

    def join(left: tuple[str, Fraction], sign: str, right: tuple[str, Fraction]) -> tuple[str, Fraction]:
        (a, x), (b, y) = left, right
        return f"({a}{sign}{b})", {"+": x + y, "-": x - y, "*": x * y}[sign]

    return st.builds(join, sides, st.sampled_from("+-*"), sides)


numbers = st.integers(0, 999).map(lambda number: (str(number), Fraction(number)))


@given(st.recursive(numbers, binary, max_leaves=12))
def test_every_tree_of_operations_has_its_value(tree: tuple[str, Fraction]) -> None:
    text, value = tree
    assert calculate(text) == str(value)


@given(st.from_regex(_PATTERN, fullmatch=True, alphabet="0123456789.+-*/() "))
def test_every_expression_of_the_schema_can_be_read(expression: str) -> None:
    result = run_call("calculate", json.dumps({"expression": expression}))
    assert re.fullmatch(r"-?\d+(\.\d+)?|error: (division by zero|the expression is longer .*)", result)


@given(st.text())
def test_any_arguments_have_a_result(arguments: str) -> None:
    assert run_call("calculate", arguments).startswith("error: ")


@pytest.mark.parametrize("arguments", ["", "[" * 100_000, "[]", '{"expression": 5}', '{"expr": "1"}'])
def test_arguments_of_another_form_are_an_error(arguments: str) -> None:
    assert run_call("calculate", arguments) == 'error: the arguments must be like {"expression": "17 * 23"}'


def test_another_tool_is_an_error() -> None:
    assert run_call("eval", "{}") == "error: there is no tool 'eval'; the only tool is calculate"


@pytest.mark.parametrize("expression", ["*".join(["9" * 9] * 20), "-" * 199 + "1", "/".join(["7"] * 100)])
def test_the_longest_expressions_take_no_time(expression: str) -> None:
    started = time.perf_counter()
    calculate(expression)
    assert time.perf_counter() - started < 0.1


def test_the_tool_is_a_function_of_the_api() -> None:
    assert CALCULATOR["type"] == "function"
    assert CALCULATOR["function"]["name"] == "calculate"
