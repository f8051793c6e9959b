"""The reader of bodies, on anything at all: an object, or an error of this API."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.gateway.api import parameters
from quire.gateway.api.chat_messages import read_messages
from quire.gateway.api.completions import read_prompts
from quire.gateway.api.errors import ApiError, InvalidRequest, body
from quire.gateway.api.options import Options, read_options
from quire.gateway.api.parsing import has_more_values, max_values, parse_object
from quire.shared.messages import GenerationRequest

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
        refusal = refused(lambda table=table: read_options(given_values, table, {}))
        assert refusal is None or refusal["param"] is not None


@given(
    st.fixed_dictionaries(
        {"model": st.just("m"), "prompt": st.just("x")},
        optional={
            "n": st.integers(1, 5),
            "best_of": st.integers(1, 6),
            "use_beam_search": st.booleans(),
            "beam_width": st.integers(2, 6),
            "length_penalty": st.floats(-10, 10),
            "early_stopping": st.sampled_from([False, True, "never"]),
            "stream": st.booleans(),
            "temperature": st.sampled_from([0, 0.0, 0.5, 1]),
            "top_p": st.sampled_from([0.5, 1]),
            "stop": st.sampled_from([[], "x"]),
        },
    )
)
def test_what_is_accepted_can_be_ranked_and_streamed_as_asked(given_values: dict[str, Any]) -> None:
    def read() -> Options:
        return read_options(given_values, parameters.COMPLETIONS, {})

    if (refusal := refused(read)) is not None:
        assert refusal["param"] in given_values
        return
    options = read()
    sampling = options.sampling
    assert sampling.num_sequences >= sampling.n == given_values.get("n", 1)
    assert sampling.num_sequences == max(options.counts.values())
    assert sampling.is_streamed or not options.stream
    assert bool(sampling.beam_width) == given_values.get("use_beam_search", False)
    assert not sampling.beam_width or (sampling.temperature, sampling.stop, sampling.best_of) == (0.0, (), 0)
    request = GenerationRequest("r", "m", (1,), sampling)
    assert GenerationRequest.decode(request.encode()) == request


@given(values)
def test_any_messages_and_prompts_are_accepted_or_refused_by_name(value: Any) -> None:
    for read in (read_messages, lambda prompt: read_prompts(prompt, 8, 100)):
        refusal = refused(lambda read=read: read(value))
        assert refusal is None or refusal["param"] is not None


def test_many_keys_of_which_one_occurs_twice_cost_little() -> None:
    pairs = ",".join(f'"{index}":0' for index in range(200_000))
    with pytest.raises(InvalidRequest, match="'7' occurs twice"):
        parse_object(f'{{{pairs},"7":1}}'.encode(), 10**6)


def count(value: object) -> int:
    """Keys, elements behind the first, and brackets."""
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + len(value) + sum(map(count, value.values()))
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(count, value))
    return 0


tricky = st.text(alphabet='",:[]{}\\a\u00e9', max_size=8)


@given(
    st.recursive(
        st.none() | st.integers() | tricky,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(tricky, inner, max_size=4),
        max_leaves=12,
    ),
    st.booleans(),
)
def test_values_are_counted_as_the_parser_finds_them(value: object, is_ascii: bool) -> None:
    text, found = json.dumps(value, ensure_ascii=is_ascii), count(value)
    strings = text.replace("\\\\", "").replace('\\"', "").count('"') // 2
    assert not has_more_values(text, max(found, strings))
    if found:
        assert has_more_values(text, found - 1)


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt":[' + "[]," * 40_000 + "[]]}",
        '{"messages":[' + "{}," * 40_000 + "{}]}",
        "{" + ",".join(f'"{i}":0' for i in range(40_000)) + "}",
        '{"prompt":[' + "1," * 70_000 + "1]}",
        '{"stop":[' + '"",' * 70_000 + '""]}',
        '{"prompt":[' + "[" * 70_000,  # no JSON, and no RecursionError either
    ],
)
def test_a_body_with_too_many_values_is_refused_before_it_is_parsed(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*_: object, **__: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(json, "loads", parsed)
    with pytest.raises(InvalidRequest, match="more than 65536 values") as caught:
        parse_object(body.encode())
    assert caught.value.code == "too_many_values"


def test_long_texts_are_not_counted_as_values() -> None:
    prompt = 'a, "b": [{c}], \\ ' * 20_000
    assert parse_object(json.dumps({"prompt": prompt}).encode()) == {"prompt": prompt}
    prompts = [prompt[:500]] * 600
    assert parse_object(json.dumps({"prompt": prompts}).encode()) == {"prompt": prompts}


def test_larger_bodies_may_have_more_values() -> None:
    assert (max_values(1024), max_values(1 << 22), max_values(1 << 26)) == (1 << 16, 1 << 18, 1 << 22)
    body = b'{"prompt":[' + b"1," * 70_000 + b"1]}"
    assert len(parse_object(body, max_values(1 << 22))["prompt"]) == 70_001
