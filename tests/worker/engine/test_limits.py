"""Requests that exceed the limits of an engine are refused, and no other request notices."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from quire.worker.engine.limits import EngineLimits, RequestRefused
from tests.support.mock_model import continuation, final, make_engine, request, run, text


def test_limits_do_not_change_while_an_engine_runs() -> None:
    limits = EngineLimits(num_blocks=1, block_size=1, max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1)
    with pytest.raises(FrozenInstanceError):
        limits.num_blocks = 2  # type: ignore[misc]


@pytest.mark.parametrize("params", [{"n": 9}, {"best_of": 9, "temperature": 1.0}, {"beam_width": 9}])
def test_more_sequences_than_there_are_rows_are_refused_alone(params: dict[str, Any]) -> None:
    engine = make_engine()
    engine.add(request("good", (1, 2)))
    with pytest.raises(RequestRefused, match=r"9 sequences at once are more than the 8 that run here"):
        engine.add(request("wide", (1, 2), **params))
    assert text(run(engine), "good") == continuation((1, 2), 8)


def test_a_request_that_can_never_fit_with_all_its_sequences_is_refused_alone() -> None:
    engine = make_engine(num_blocks=13)
    engine.add(request("three", (1,) * 6, n=3, max_tokens=10))
    with pytest.raises(RequestRefused, match=r"16 tokens in 5 sequences need 16 KV blocks and the cache has 13"):
        engine.add(request("five", (1,) * 6, n=5, max_tokens=10))
    assert [list(one.token_ids) for one in final(run(engine), "three")] == [continuation((1,) * 6, 10)] * 3
