"""Limits after the clock of Redis was set back: buckets fill at their rate, and no budget is renewed twice."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from quire.shared.accounts.account import Account
from quire.shared.accounts.charge import Charge, LimitReached, Price
from quire.shared.accounts.limits import AccountLimits
from quire.shared.broker import QueueBounds
from quire.shared.keys import AccountKeys
from tests.shared.test_limits_machine import CLOCK
from tests.support.protocol_driver import Lane, finished
from tests.support.redis_server import RedisServer

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
# Ten minutes before midnight.
START_MS = int(datetime(2026, 3, 4, 23, 50, tzinfo=UTC).timestamp() * 1000)
BOUNDS = QueueBounds(requests=1000, tokens=10**9)


class Key:
    """Submits requests of one API key at times of Redis that the test chooses."""

    def __init__(self, lane: Lane, **limits: int) -> None:
        self.lane = lane
        self.account = Account(kind="key", id="a" * 16, name="a", limits=AccountLimits.of(limits))
        self.count = 0

    def submit(self, now_ms: int, tokens: int = 10) -> LimitReached | str:
        """Return the id of the request, or the limit that refuses it."""
        self.count += 1
        request_id = f"r{self.count}"
        self.lane.client.set("now", now_ms)
        submission = self.lane.broker.submit(
            request_id,
            b"body",
            gateway="g",
            cost=tokens,
            bounds=BOUNDS,
            metadata=b"metadata",
            charge=Charge((self.account,), "model", Price()),
            prompt_tokens=tokens,
            begins_call=True,
        )
        try:
            finished(submission)
        except LimitReached as reached:
            return reached
        return request_id

    def spent(self, name: str) -> int:
        value: Any = self.lane.client.hget(AccountKeys().spent(self.account.place), name)
        return int(float(value))


@pytest.fixture
def lane(redis_server: RedisServer) -> Iterator[Lane]:
    lane = Lane(redis_server, ("g",), CLOCK)
    yield lane
    lane.close()


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute"])
def test_a_bucket_fills_at_its_rate_after_the_clock_was_set_back(lane: Lane, limit: str) -> None:
    key = Key(lane, **{limit: 30 if limit == "requests_per_minute" else 300})
    for _ in range(30):
        assert isinstance(key.submit(START_MS), str)
    # Two hours back, the bucket is as empty as before: a call has to wait two seconds, and then it is allowed.
    back = START_MS - 2 * HOUR_MS
    for passed, is_allowed in ((0, False), (1_000, False), (2_000, True), (2_001, False), (4_000, True)):
        reply = key.submit(back + passed)
        assert isinstance(reply, str) == is_allowed, (passed, reply)


def test_a_budget_of_a_day_is_not_renewed_twice(lane: Lane) -> None:
    key = Key(lane, tokens_per_day=100)
    tomorrow = START_MS + HOUR_MS
    assert isinstance(key.submit(START_MS, 100), str)
    assert isinstance(key.submit(tomorrow, 60), str)
    # Back over midnight, and over it again: 60 of the 100 tokens are still spent.
    for now in (START_MS + 1, tomorrow - 1, tomorrow + 1):
        assert isinstance(key.submit(now, 60), LimitReached), now
        assert key.spent("day_tokens") == 60
    # What a request reserved after the step is settled on the same day.
    request_id = key.submit(START_MS + 2, 40)
    assert isinstance(request_id, str)
    assert key.spent("day_tokens") == 100
    finished(lane.broker.cancel(request_id))
    assert key.spent("day_tokens") == 60
    assert isinstance(key.submit(tomorrow + DAY_MS, 100), str)


def test_a_clock_that_was_far_ahead_freezes_no_budget(lane: Lane) -> None:
    key = Key(lane, tokens_per_day=100)
    assert isinstance(key.submit(START_MS + 40 * DAY_MS, 100), str)
    assert isinstance(key.submit(START_MS, 100), str)
