from __future__ import annotations

from typing import Any

import pytest

from quire.shared.text.grammar_error import GrammarError
from tests.support.schema_checks import accepted, accepts

INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}
LARGEST = 2**63 - 1024


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (INTEGER | {"minimum": -(2**63), "maximum": 2**63 - 1}, [0, -LARGEST, LARGEST], [2**63, -(2**63) - 1]),
        (INTEGER | {"minimum": -(2**63) + 1}, [-5], [-(2**64)]),
        (INTEGER | {"minimum": 2**53 + 1}, [2**53 + 2], [2**53]),
        (INTEGER | {"maximum": 2**53 + 3}, [2**53 + 2], [2**53 + 4]),
        (INTEGER | {"minimum": 10**18}, [10**18, LARGEST], [10**18 - 1]),
        (INTEGER | {"exclusiveMaximum": -(10**18)}, [-(10**18) - 128], [-(10**18), 0]),
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
