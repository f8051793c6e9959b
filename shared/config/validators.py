"""Checks of values that come from outside: from clients, from Redis, from files.

A check is a function of the name of a value and the value. The function returns the value in its final form, or raises
InvalidValue. `str` of a check describes the values that the check accepts. The checks are strict: true is not the
integer 1, and 1.0 is not an integer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar, cast

T = TypeVar("T")
# Takes a name and a value. The value is of any type, so its parameter cannot have a narrower one.
Check = Callable[[str, Any], T]

MAX_TOKEN_ID = 2**31 - 1


class InvalidValue(ValueError):
    """The value `name` is wrong: `problem` continues a sentence that begins with its name."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name = name


def shown(value: Any) -> str:
    """Return a value as an error message quotes it: short, on one line, without characters that cannot be encoded."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else f"an array of {len(value)}"
    text = json.dumps(value) if value is None or type(value) is bool else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def wrong(name: str, expected: object, value: Any) -> InvalidValue:
    """Return the error for a value that differs from what `expected` says."""
    return InvalidValue(name, f"must be {expected}, not {shown(value)}")


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer from `low` to `high`, both included."""

    low: int
    high: int

    def __call__(self, name: str, value: Any) -> int:
        if type(value) is not int or not self.low <= value <= self.high:
            raise wrong(name, self, value)
        return value

    def __str__(self) -> str:
        return f"an integer from {_bound(self.low)} to {_bound(self.high)}"


def _bound(number: int) -> str:
    """Return a number as people write it: 2^64-1 rather than its twenty digits."""
    for power, rest in ((number, ""), (number + 1, "-1")):
        size = abs(power)
        if size > 2**32 and size.bit_count() == 1:
            return f"{'-' if power < 0 else ''}2^{size.bit_length() - 1}{rest}"
    return str(number)


@dataclass(frozen=True, slots=True)
class Number:
    """A number from `low` to `high`, both included. The result is a float."""

    low: float
    high: float

    def __call__(self, name: str, value: Any) -> float:
        if type(value) not in (int, float) or not self.low <= value <= self.high:
            raise wrong(name, self, value)
        return float(value)

    def __str__(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def __call__(self, name: str, value: Any) -> bool:
        if type(value) is not bool:
            raise wrong(name, self, value)
        return value

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few strings."""

    choices: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> str:
        if type(value) is not str or value not in self.choices:
            raise wrong(name, self, value)
        return value

    def __str__(self) -> str:
        return f"one of {', '.join(self.choices)}"


@dataclass(frozen=True, slots=True)
class Text:
    """A string of `low` to `high` characters, or of any length. Errors never show it: it may be a secret, or long."""

    low: int = 0
    high: int | None = None

    def __call__(self, name: str, value: Any) -> str:
        if type(value) is not str:
            raise wrong(name, self, value)
        if self.high is not None and not self.low <= len(value) <= self.high:
            raise InvalidValue(name, f"must be {self}, not of {len(value)}")
        return value

    def __str__(self) -> str:
        return "a string" if self.high is None else f"a string of {self.low} to {self.high} characters"


@dataclass(frozen=True, slots=True)
class Texts:
    """An array of at most `most` strings of `low` to `high` characters each. The result is a tuple."""

    most: int
    low: int
    high: int

    def __call__(self, name: str, value: Any) -> tuple[str, ...]:
        if type(value) is not list:
            raise wrong(name, self, value)
        if len(value) > self.most:
            raise InvalidValue(name, f"must have at most {self.most} strings, not {len(value)}")
        for text in value:
            if type(text) is not str:
                raise wrong(name, self, text)
            if not self.low <= len(text) <= self.high:
                raise InvalidValue(
                    name, f"must have strings of {self.low} to {self.high} characters, not of {len(text)}"
                )
        return tuple(value)

    def __str__(self) -> str:
        return f"an array of at most {self.most} strings of {self.low} to {self.high} characters each"


@dataclass(frozen=True, slots=True)
class TokenIds:
    """An array of at most `most` token ids up to `high`. The result is a tuple.

    `high` None leaves the largest token id to a later check, which knows the vocabulary.
    """

    most: int
    high: int | None = MAX_TOKEN_ID

    def __call__(self, name: str, value: Any) -> tuple[int, ...]:
        if type(value) is not list:
            raise wrong(name, self, value)
        if len(value) > self.most:
            raise InvalidValue(name, f"must have at most {self.most} token ids, not {len(value)}")
        for token_id in value:
            if type(token_id) is not int or token_id < 0 or (self.high is not None and token_id > self.high):
                raise wrong(name, self, token_id)
        return tuple(value)

    def __str__(self) -> str:
        return f"an array of at most {self.most} token ids"


def fixed_array(name: str, value: Any, length: int) -> list[Any]:
    """Return a list of exactly `length` items. Raise InvalidValue."""
    if type(value) is not list or len(value) != length:
        raise InvalidValue(name, f"must be an array of {length}, not {shown(value)}")
    return value


def short_array(name: str, value: Any, most: int) -> list[Any]:
    """Return a list of at most `most` items. Raise InvalidValue."""
    if type(value) is not list or len(value) > most:
        raise InvalidValue(name, f"must be an array of at most {most}, not {shown(value)}")
    return value


def checked(check: Check[Any], default: Any = MISSING) -> Any:
    """Declare a field of a dataclass that `read_map` reads."""
    return field(default=default, metadata={"check": check})


def read_map(cls: type[T], name: str, value: Any) -> T:
    """Return a dataclass whose fields have checks, from a map with exactly these fields. Raise InvalidValue."""
    if type(value) is not dict:
        raise InvalidValue(name, f"must be a map, not {type(value).__name__}")
    checks = {declared.name: declared.metadata["check"] for declared in fields(cast(Any, cls))}
    if value.keys() != checks.keys():
        odd = sorted(str(key) for key in value.keys() ^ checks.keys())
        raise InvalidValue(name, f"has unknown or missing fields: {', '.join(odd)[:200]}")
    return cls(**{key: check(key, value[key]) for key, check in checks.items()})
