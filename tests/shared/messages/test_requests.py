"""Decoding accepts every encoded request and worker card, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.shared.messages import (
    POOLINGS,
    GenerationRequest,
    MessageError,
    SamplingParams,
    WorkerCard,
)
from quire.shared.sampling_params import EARLY_STOPPING, MAX_ALLOWED_TOKENS, MAX_GRAMMAR_LENGTH

requests = st.builds(
    GenerationRequest,
    id=st.text(min_size=1, max_size=40),
    model=st.text(max_size=40),
    prompt=st.lists(st.integers(0, 2**32 - 1), max_size=20).map(tuple),
    sampling=st.builds(
        SamplingParams,
        max_tokens=st.integers(0, 2_000_000),
        seed=st.integers(0, 2**64 - 1),
        logit_bias=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 100)), max_size=4).map(tuple),
        grammar=st.text(max_size=40),
        n=st.integers(1, 128),
        temperature=st.floats(0, 2),
        top_p=st.floats(0, 1),
        stop=st.lists(st.text(min_size=1, max_size=5), max_size=16).map(tuple),
        stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=80).map(tuple),
        ignore_eos=st.booleans(),
        include_stop_str_in_output=st.booleans(),
        bad_words=st.lists(st.text("ab ", min_size=1, max_size=5).filter(str.strip), max_size=64).map(tuple),
        allowed_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=80).map(tuple),
        prompt_logprobs=st.integers(-1, 20),
        returns_prompt=st.booleans(),
        skip_special_tokens=st.booleans(),
        best_of=st.integers(0, 128),
        beam_width=st.integers(0, 128),
        length_penalty=st.floats(-10, 10),
        early_stopping=st.sampled_from(EARLY_STOPPING),
        logprobs=st.booleans(),
        top_logprobs=st.integers(0, 20),
    ),
    cache_salt=st.text(max_size=256),
    pooling=st.sampled_from(["", *POOLINGS]),
)
REQUEST = GenerationRequest("r", "m", (1, 2), SamplingParams(max_tokens=3, stop=("x",)))
CARD = WorkerCard("w", "1", "m", 100, 64, 50, (2,), 16, 10, 5, 0, 0, 7)


@given(requests)
def test_a_request_comes_back_as_it_was(request: GenerationRequest) -> None:
    assert GenerationRequest.decode(request.encode()) == request


def test_a_worker_card_comes_back_as_it_was() -> None:
    assert WorkerCard.decode(CARD.encode()) == CARD


def _map(message: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = msgpack.unpackb(message.encode())
    return decoded


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(GenerationRequest)])
def test_every_field_of_a_request_is_required_and_typed(name: str) -> None:
    missing = _map(REQUEST)
    del missing[name]
    wrong = {**_map(REQUEST), name: 1.5}
    for broken in (missing, wrong):
        with pytest.raises(MessageError, match=name):
            GenerationRequest.decode(msgpack.packb(broken))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
@pytest.mark.parametrize("value", [None, "x", -(10**9), b"x", [1], {}])
def test_every_sampling_parameter_is_checked(name: str, value: Any) -> None:
    broken = _map(REQUEST)
    # "x" is a valid grammar, and [1] is a valid list of token ids: these get values that are too long.
    wrong = {
        ("grammar", "x"): "x" * (MAX_GRAMMAR_LENGTH + 1),
        ("stop_token_ids", "[1]"): [1] * 81,
        ("allowed_token_ids", "[1]"): [1] * (MAX_ALLOWED_TOKENS + 1),
    }
    broken["sampling"][name] = wrong.get((name, str(value)), value)
    with pytest.raises(MessageError, match=name):
        GenerationRequest.decode(msgpack.packb(broken))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", True),
        ("ignore_eos", 1),
        ("temperature", float("nan")),
        ("top_p", float("inf")),
        ("n", 2.0),
        ("best_of", 2.0),
        ("best_of", 129),
        ("beam_width", True),
        ("beam_width", 129),
        ("length_penalty", 10.5),
        ("length_penalty", float("nan")),
        ("early_stopping", True),
        ("early_stopping", "Never"),
    ],
)
def test_python_is_more_lenient_than_the_protocol(name: str, value: Any) -> None:
    broken = _map(REQUEST)
    broken["sampling"][name] = value
    with pytest.raises(MessageError, match=name):
        GenerationRequest.decode(msgpack.packb(broken))


def test_a_salt_has_at_most_256_characters() -> None:
    salted = dataclasses.replace(REQUEST, cache_salt="ä" * 256)
    assert GenerationRequest.decode(salted.encode()) == salted
    for salt in ("x" * 257, b"x", None, 1):
        with pytest.raises(MessageError, match="cache_salt"):
            GenerationRequest.decode(msgpack.packb({**_map(REQUEST), "cache_salt": salt}))


@pytest.mark.parametrize(
    ("params", "sequences", "streamed"),
    [
        ({}, 1, True),
        ({"n": 3}, 3, True),
        ({"n": 3, "best_of": 3}, 3, True),
        ({"n": 1, "best_of": 3}, 3, False),
        ({"n": 2, "beam_width": 4}, 4, False),
        ({"n": 4, "beam_width": 4}, 4, False),
    ],
)
def test_what_runs_at_once_is_what_admission_counts(params: dict[str, int], sequences: int, streamed: bool) -> None:
    sampling = SamplingParams(max_tokens=10, **params)  # type: ignore[arg-type]
    assert (sampling.num_sequences, sampling.is_streamed) == (sequences, streamed)
    assert GenerationRequest("r", "m", (1, 2), sampling).cost == 2 + 10 * sequences


@pytest.mark.parametrize("number", [0, 65537, True, 1.0])
def test_a_card_says_how_many_sequences_run_at_once(number: Any) -> None:
    with pytest.raises(MessageError, match="max_num_seqs"):
        WorkerCard.decode(msgpack.packb({**_map(CARD), "max_num_seqs": number}))


def test_an_embedding_costs_its_prompt() -> None:
    assert REQUEST.cost == 2 + 3
    assert dataclasses.replace(REQUEST, pooling="mean").cost == 2
    with pytest.raises(MessageError, match="pooling"):
        GenerationRequest.decode(dataclasses.replace(REQUEST, pooling="max").encode())
