"""The reader of bodies, on anything at all: an object, or an error of this API."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import parameters
from gateway.conversation import read_messages
from gateway.errors import ApiError, InvalidRequest, body
from gateway.parsing import parse_object
from gateway.rendering import read_prompts
from gateway.submission import CompletionRate

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from([*parameters.CHAT, *parameters.COMPLETIONS, *parameters.UNSUPPORTED]) | st.text(max_size=5)


def refused(act: Callable[[], object]) -> dict[str, Any] | None:
    """The error as a client would get it; any other exception is a fault of the gateway."""
    try:
        act()
    except ApiError as error:
        found: dict[str, Any] = json.loads(body(error))["error"]
        return found
    return None


@given(st.binary(max_size=100))
def test_any_bytes_are_an_object_or_an_error(data: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        assert isinstance(parse_object(data), dict)


@given(st.dictionaries(st.text(), values, max_size=4))
def test_what_python_writes_as_json_is_read_back_or_refused(value: dict[str, Any]) -> None:
    try:
        assert parse_object(json.dumps(value).encode()) == value
    except InvalidRequest as error:
        json.loads(body(error))


@given(st.dictionaries(names, values, max_size=5))
def test_any_parameters_are_accepted_or_refused_by_name(given_values: dict[str, Any]) -> None:
    for table in (parameters.CHAT, parameters.COMPLETIONS):
        refusal = refused(lambda table=table: parameters.options(parameters.read(given_values, table), max_n=16))
        assert refusal is None or refusal["param"] is not None


@given(values)
def test_any_messages_and_prompts_are_accepted_or_refused_by_name(value: Any) -> None:
    for read in (read_messages, lambda prompt: read_prompts(prompt, 8, 100)):
        refusal = refused(lambda read=read: read(value))
        assert refusal is None or refusal["param"] is not None


def test_many_keys_of_which_one_occurs_twice_cost_little() -> None:
    pairs = ",".join(f'"{index}":0' for index in range(200_000))
    with pytest.raises(InvalidRequest, match="'7' occurs twice"):
        parse_object(f'{{{pairs},"7":1}}'.encode())


@pytest.mark.parametrize(("ends", "waiting", "expected"), [(0, 100, 5), (30, 100, 1), (2, 1000, 50), (1, 10_000, 60)])
async def test_retry_after_follows_the_rate_of_completions(ends: int, waiting: int, expected: int) -> None:
    rate = CompletionRate()
    for _ in range(ends):
        rate.count()
    assert rate.retry_after_s(waiting) == expected
