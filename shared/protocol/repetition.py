"""The parameter `repetition_detection`: which repetition ends an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from quire.shared.config.schema_parts import Schema, with_nulls
from quire.shared.config.validators import Integer, InvalidValue, shown, wrong

# Of the parts that an answer may not repeat: their length, and the tokens of all repetitions.
MAX_PATTERN_SIZE = 1024
MAX_REPEATED_TOKENS = 8192
# A call without a rule, although its server may have one for calls that do not say.
OFF = (0, 0, 0)


class RepetitionDetection:
    """vLLM's object; the final form is (min_pattern_size, max_pattern_size, min_count), and OFF if it is off."""

    fields: ClassVar[Mapping[str, Integer]] = {
        "max_pattern_size": Integer(0, MAX_PATTERN_SIZE),
        "min_pattern_size": Integer(0, MAX_PATTERN_SIZE),
        "min_count": Integer(0, MAX_REPEATED_TOKENS),
    }

    @property
    def schema(self) -> Schema:
        return with_nulls({}, self.fields)

    def __call__(self, name: str, value: Any) -> tuple[int, ...]:
        if type(value) is not dict:
            raise wrong(name, self, value)
        for key, number in value.items():
            if number is not None and key not in self.fields:
                raise InvalidValue(name, f"has the unknown key {shown(key)}; it may have {', '.join(self.fields)}")
        given = {key: check(f"{name}.{key}", value.get(key) or 0) for key, check in self.fields.items()}
        if not given["max_pattern_size"]:
            return OFF
        pattern = max(1, given["min_pattern_size"]), given["max_pattern_size"], given["min_count"]
        return repetition_limits(name, [*pattern])

    def __str__(self) -> str:
        return "an object with `max_pattern_size`, `min_count` and perhaps `min_pattern_size`"


def repetition_limits(name: str, value: Any) -> tuple[int, ...]:
    """Return the final form of `repetition_detection`, from an array. Raise InvalidValue."""
    if type(value) is not list or len(value) not in (0, 3) or any(type(number) is not int for number in value):
        raise InvalidValue(name, "must be three integers, or none")
    if not value:
        return ()
    shortest, longest, count = value
    if not 1 <= shortest <= longest <= MAX_PATTERN_SIZE:
        raise InvalidValue(name, f"must have 1 <= min_pattern_size <= max_pattern_size <= {MAX_PATTERN_SIZE}")
    if count < 2:
        raise InvalidValue(name, "must have a min_count of at least 2")
    if longest * count > MAX_REPEATED_TOKENS:
        raise InvalidValue(name, f"must have max_pattern_size * min_count of at most {MAX_REPEATED_TOKENS}")
    return (shortest, longest, count)
