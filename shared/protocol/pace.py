"""The pace of workers: what requests cost in time. Each worker learns its own (`worker/engine/pace.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class Pace(NamedTuple):
    """The costs that a worker has learnt in its last steps. A number that it has not learnt is 0.

    prompt_us: microseconds of a token of a prompt. Tokens found in the prefix cache count, so they lower it.
    token_us: microseconds from a token of an answer to the next one. request_us: microseconds from the end of a request
    to the end of the next one while the worker is full. rows: requests that run at once in a full worker.
    answer: median length of answers, in tokens, without those that ignore end tokens. charge: tokens by which a request
    raises the counter of its tenant (docs/protocol.md, Counters).
    """

    prompt_us: int = 0
    token_us: int = 0
    request_us: int = 0
    rows: int = 0
    answer: int = 0
    charge: int = 0


UNKNOWN_PACE = Pace()


class LanePace(NamedTuple):
    """The costs that all workers of a lane have learnt, as `too_late` in `_deadlines.lua` reads it.

    prompt_us, token_us: of the fastest worker. request_us: from the end of a request to that of the next one at any
    worker. held_us: largest time for which a token holds up the queue. rows: of all workers. charge: as in `Pace`.
    """

    prompt_us: int
    token_us: int
    request_us: int
    held_us: int
    rows: int
    charge: int


def lane_pace(paces: Iterable[Pace]) -> LanePace | None:
    """Return the pace of a lane from those of its workers; None if none of them has been full.

    A worker that has not been full counts as fast as the fastest that has.
    """
    all_paces = list(paces)
    learnt = [pace for pace in all_paces if pace.request_us]
    if not learnt:
        return None
    fastest = min(pace.request_us for pace in learnt)
    prompt_us, token_us = (min(pace[i] for pace in learnt) for i in range(2))
    rows = sum(max(1, pace.rows) for pace in all_paces)
    return LanePace(
        prompt_us,
        token_us,
        request_us=math.ceil(1 / sum(1 / (pace.request_us or fastest) for pace in all_paces)),
        held_us=math.ceil(max(prompt_us / len(all_paces), token_us / rows)),
        rows=rows,
        charge=max(1, min(pace.charge for pace in learnt)),
    )
