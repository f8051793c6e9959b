"""Options of a call: parameters that contradict each other are refused; any parameters are accepted or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.gateway.api import parameters
from quire.gateway.api.call import Options
from quire.gateway.api.options import read_options
from quire.gateway.errors.api_errors import ApiError, body
from quire.shared.messages import GenerationRequest
from tests.support.gateway.refusals import CHAT, COMPLETIONS, check
from tests.support.gateway.running import MODEL, RunningGateway, chat_body


async def test_parameters_that_contradict_each_other(server: RunningGateway) -> None:
    await check(server, CHAT, chat_body(min_tokens=9, max_tokens=8), 400, "min_tokens", "more than the 8")
    await check(server, CHAT, chat_body(max_tokens=8, max_completion_tokens=9), 400, "max_completion_tokens")
    await check(server, CHAT, chat_body(stream_options={"include_usage": True}), 400, "stream_options")
    options = {"stream": True, "stream_options": {"surprise": 1}}
    await check(server, CHAT, chat_body(**options), 400, "stream_options.surprise")
    options = {"stream": True, "stream_options": {"include_usage": 1}}
    await check(server, CHAT, chat_body(**options), 400, "stream_options.include_usage")


BEAMS = {"use_beam_search": True}
RANKING: dict[str, tuple[dict[str, Any], str, str]] = {
    "fewer than n": ({"n": 3, "best_of": 2}, "best_of", "best_of is 2, which is less than n = 3"),
    "a stream of the best": (
        {"best_of": 3, "stream": True},
        "best_of",
        "best_of 3 with n 1 cannot be streamed: which choices are the best is known at the end only",
    ),
    "a stream of beams": (
        {**BEAMS, "stream": True},
        "use_beam_search",
        "use_beam_search is not supported with stream: which beams are the best",
    ),
    "the best of beams": (
        {**BEAMS, "best_of": 1},
        "best_of",
        "best_of is not supported with use_beam_search: beam_width says",
    ),
    "fewer beams than n": (
        {**BEAMS, "n": 3, "beam_width": 2},
        "beam_width",
        "beam_width is 2, which is less than n = 3",
    ),
    "a width of no beams": ({"beam_width": 4}, "beam_width", "beam_width is allowed only with use_beam_search: true"),
    "a penalty of no beams": (
        {"length_penalty": 1},
        "length_penalty",
        "length_penalty is allowed only with use_beam_search: true",
    ),
    "an end of no beams": (
        {"use_beam_search": False, "early_stopping": False},
        "early_stopping",
        "early_stopping is allowed only with use_beam_search: true",
    ),
    "temperature": (
        {**BEAMS, "temperature": 1},
        "temperature",
        "temperature is 1.0, but use_beam_search draws no tokens",
    ),
    "top_p": ({**BEAMS, "top_p": 0.9}, "top_p", "let it be 1"),
    "top_k": ({**BEAMS, "top_k": 5}, "top_k", "top_k is 5"),
    "min_p": ({**BEAMS, "min_p": 0.1}, "min_p", "let it be 0"),
    "stop": ({**BEAMS, "stop": ["x", "y"]}, "stop", "stop is not supported with use_beam_search"),
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("asked", "param", "says"), RANKING.values(), ids=RANKING)
async def test_rankings_that_contradict_themselves(
    server: RunningGateway, path: str, asked: dict[str, Any], param: str, says: str
) -> None:
    base = chat_body() if path == CHAT else {"model": MODEL, "prompt": "x"}
    await check(server, path, {**base, **asked}, 400, param, says)


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
