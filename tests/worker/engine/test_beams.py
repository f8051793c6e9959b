"""Beam search on hand-made candidates: when it ends, and which beams continue."""

from __future__ import annotations

import numpy as np
import pytest

from quire.shared.messages import SamplingParams
from quire.worker.engine.beams import BeamSearch

END = 0


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "best", "goes_on"),
    [
        ("false", 1.0, -1.9, True),  # -0.95 a token is better than the worst that ended, -1.0
        ("false", 1.0, -2.0, False),  # as good is not better
        ("never", 1.0, -2.2, True),  # better still, were it drawn out to ten tokens
        ("never", 0.5, -2.2, True),
        ("true", 1.0, -1.9, False),
        ("never", -1.0, -1.7, True),  # that would only make it worse here
    ],
)
def test_a_full_search_continues_while_a_better_beam_is_possible(
    early_stopping: str, length_penalty: float, best: float, goes_on: bool
) -> None:
    params = SamplingParams(
        10, n=2, temperature=0.0, beam_width=2, length_penalty=length_penalty, early_stopping=early_stopping
    )
    search = BeamSearch(params, frozenset([END]))
    first = search.advance(np.float32([[-1.0, -1.25, -1.5, -9]]), np.int32([[END, 5, 6, 7]]), [()])
    assert first == [(0, 5), (0, 6)]
    logprobs, token_ids = np.float32([[-0.6, best + 1.25, -9, -9]] * 2), np.int32([[END, 5, 6, 7]] * 2)
    logprobs[1] = -9
    found = search.advance(logprobs, token_ids, [(5,), (6,)])
    assert {one.token_ids for one in search.ended} == {(END,), (5, END)}
    assert search.ended[0].score > search.ended[1].score
    assert (found is not None) == goes_on


def test_all_beams_continue_even_if_every_end_token_of_each_is_likelier() -> None:
    search = BeamSearch(SamplingParams(10, temperature=0.0, beam_width=2, early_stopping="never"), frozenset([0, 1, 2]))
    count = search.num_candidates
    logprobs, token_ids = -np.arange(1, count + 1, dtype=np.float32)[None], np.arange(count, dtype=np.int32)[None]
    assert search.advance(logprobs, token_ids + 3, [()]) == [(0, 3), (0, 4)]
    logprobs[:, 3:] -= 9
    assert search.advance(logprobs.repeat(2, 0), token_ids.repeat(2, 0), [(3,), (4,)]) == [(0, 3), (0, 4)]
    assert [one.token_ids for one in search.ended] == [(3, 0), (3, 1)], "what ends below the first places is left out"
