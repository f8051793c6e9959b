"""JSON that was cut off is read as the SDK reads it."""

from __future__ import annotations

import json
import time
from typing import Any

import jiter
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.gateway.api.messages.partial_json import read_partial_object

WHOLE = '{"path": "a\\"}b", "lines": [1, 20, {"deep": [true, null]}], "text": "x", "n": 1.5}'


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        ("{", {}),
        ('{"a', {}),
        ('{"a": ', {}),
        ('{"a": "x', {}),
        ('{"a": "x"', {"a": "x"}),
        ('{"a": "x", "b": [1, 2', {"a": "x", "b": [1, 2]}),
        ('{"a": {"b": {"c": "x', {"a": {"b": {}}}),
        ('{"a": "}', {}),
        ('{"a": tru', {}),
        ("[1", {}),
        (WHOLE, json.loads(WHOLE)),
    ],
)
def test_a_beginning(text: str, value: dict[str, Any]) -> None:
    assert read_partial_object(text) == value


values = st.recursive(
    st.none() | st.booleans() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), values, max_size=4), st.data())
def test_every_beginning_is_read_as_the_sdk_reads_it(value: dict[str, Any], data: Any) -> None:
    text = json.dumps(value)
    cut = text[: data.draw(st.integers(1, len(text)))]
    assert read_partial_object(cut) == jiter.from_json(cut.encode(), partial_mode=True)


@pytest.mark.parametrize("text", ['{"a": ' * 20_000, '{"a": [' + "1," * 100_000 + '"x', '{"a": "' + "\\" * 100_001])
def test_a_long_text_takes_no_long_time(text: str) -> None:
    began = time.process_time()
    assert type(read_partial_object(text)) is dict
    assert time.process_time() - began < 2
