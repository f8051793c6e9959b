"""Rows that are free or preemptible, and the end of a beam search."""

from __future__ import annotations

import numpy as np
import pytest

from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.features.beams import BeamSearch
from tests.support.mock_model import make_engine, request, run
from tests.worker.engine.test_scheduler import swapped_engine


def test_rows_are_free_unless_a_waiting_group_will_take_them_and_none_is_while_blocks_are_short() -> None:
    engine = make_engine(num_blocks=20, max_num_batched_tokens=80)
    engine.add(request("long", (1,) * 72, max_tokens=4))
    free = [engine.groups.num_free_rows()]
    for name in ("a", "b"):
        engine.add(request(name, (2, 3), max_tokens=2))
        free.append(engine.groups.num_free_rows())
    assert free == [7, 6, 0], "the waiting groups will take all blocks"
    run(engine)
    assert engine.groups.num_free_rows() == 8
    assert swapped_engine().groups.num_free_rows() == 0, "the swapped group will take the free blocks"


def test_preemptible_rows_are_those_of_lower_classes_that_no_waiting_group_will_take() -> None:
    engine = make_engine(max_num_seqs=4)
    engine.add(request("low", (1, 2), n=3), priority=2)
    engine.step()
    engine.add(request("also low", (1, 2), n=2), priority=2)
    assert [engine.groups.num_preemptible_rows(priority) for priority in range(3)] == [3, 3, 0]
    engine.add(request("standard", (1, 2), n=2), priority=1)
    assert [engine.groups.num_preemptible_rows(priority) for priority in range(3)] == [3, 1, 0]
    engine.add(request("urgent", (1, 2), n=2), priority=0)
    assert [engine.groups.num_preemptible_rows(priority) for priority in range(3)] == [1, 0, 0]
    run(engine)


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
