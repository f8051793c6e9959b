"""The tool of `quire chat --tools`: a calculator for `+`, `-`, `*`, `/` and parentheses."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Any

MAX_LENGTH = 200
MAX_NESTING = 20
# Results that are not whole are rounded to this number of digits after the point.
DECIMALS = 9

_NUMBER = r"[0-9]{1,9}(\.[0-9]{1,6})?"
_TERM = rf"(-?{_NUMBER}|\({_NUMBER}( [-+*/] {_NUMBER}){{1,3}}\))"
# Expressions with one level of parentheses. A server that enforces the schema never writes one that cannot be read.
_PATTERN = rf"^{_TERM}( [-+*/] {_TERM}){{1,4}}$"

NAME = "calculate"
CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Computes an arithmetic expression, such as 17 * (23 - 4).",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "pattern": _PATTERN}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
}

_TOKENS = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|[-+*/()])", re.ASCII)


class CalculatorError(ValueError):
    """A call that cannot be computed. The text says why, for the model and for the user."""


def run_call(name: str, arguments: str) -> str:
    """Return the result of a tool call: a number, or `error: ` and the reason, which the model reads instead.

    arguments: the text that the model wrote, perhaps not even JSON.
    """
    try:
        if name != NAME:
            raise CalculatorError(f"there is no tool {name[:80]!r}; the only tool is {NAME}")
        return calculate(_expression(arguments))
    except CalculatorError as error:
        return f"error: {error}"


def calculate(expression: str) -> str:
    """Return the value of an expression as a decimal number, exact if it is whole.

    Time and memory are bounded by the length of the expression: there are no powers. Raise CalculatorError.
    """
    if len(expression) > MAX_LENGTH:
        raise CalculatorError(f"the expression is longer than {MAX_LENGTH} characters")
    value = _Parser(expression).value()
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(abs(value) * 10**DECIMALS)
    whole, fraction = divmod(scaled, 10**DECIMALS)
    digits = f"{whole}.{fraction:0{DECIMALS}d}".rstrip("0").rstrip(".")
    return f"-{digits}" if value < 0 and scaled else digits


def _expression(arguments: str) -> str:
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        given = None
    expression = given.get("expression") if isinstance(given, dict) else None
    if not isinstance(expression, str):
        raise CalculatorError('the arguments must be like {"expression": "17 * 23"}')
    return expression


class _Parser:
    """Recursive descent: a sum of products of numbers, signed numbers and sums in parentheses."""

    def __init__(self, expression: str) -> None:
        self._tokens: list[str] = []
        end = 0
        text = expression.rstrip()
        while end < len(text):
            match = _TOKENS.match(text, end)
            if match is None:
                raise CalculatorError(f"{text[end:].lstrip()[:1]!r} is neither a number nor one of + - * / ( )")
            self._tokens.append(match[1])
            end = match.end()
        self._at = self._nesting = 0

    def value(self) -> Fraction:
        """Return the value of the whole expression. Raise CalculatorError."""
        value = self._sum()
        if token := self._next():
            raise CalculatorError(f"{token!r} is at a wrong place")
        return value

    def _next(self, *wanted: str) -> str:
        """Consume the next token if it is one of `wanted`, or if nothing is wanted. Return it, or an empty text."""
        token = self._tokens[self._at] if self._at < len(self._tokens) else ""
        if wanted and token not in wanted:
            return ""
        self._at += 1
        return token

    def _sum(self) -> Fraction:
        value = self._product()
        while sign := self._next("+", "-"):
            term = self._product()
            value = value + term if sign == "+" else value - term
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while sign := self._next("*", "/"):
            factor = self._factor()
            if sign == "/" and not factor:
                raise CalculatorError("division by zero")
            value = value * factor if sign == "*" else value / factor
        return value

    def _factor(self) -> Fraction:
        negative = False
        while sign := self._next("+", "-"):
            negative ^= sign == "-"
        token = self._next()
        if token == "(":
            self._nesting += 1
            if self._nesting > MAX_NESTING:
                raise CalculatorError(f"parentheses are nested more than {MAX_NESTING} deep")
            value = self._sum()
            if not self._next(")"):
                raise CalculatorError("a parenthesis is not closed")
            self._nesting -= 1
        elif token and token not in "*/)":
            value = Fraction(token)
        else:
            raise CalculatorError("a number is missing")
        return -value if negative else value
