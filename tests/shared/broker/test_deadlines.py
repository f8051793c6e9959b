"""Deadlines that cannot be met, by the real scripts: what is refused, what is dropped, and what never is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire.shared.protocol.broker import (
    Admission,
    Claim,
    DeadlineUnreachable,
    IdempotencyConflict,
    QueueBounds,
    StepCommit,
    new_id,
)
from quire.shared.protocol.keys import PRIORITY_CLASSES, LaneKeys
from quire.shared.protocol.messages import Delta, Outcome, StepItem
from quire.shared.protocol.pace import LanePace, Pace, lane_pace
from tests.support.fair_model import ANYBODY, Share
from tests.support.protocol_driver import LANE, Lane, finished
from tests.support.redis_server import RedisServer

KEYS = LaneKeys(LANE)
MANY = QueueBounds(requests=10**6, tokens=10**9)
# A request ends every 0.1 s, of a lane with two rows; one of 10 and 20 tokens runs for 0.21 s, and charges 50.
PACE = LanePace(prompt_us=1000, token_us=10_000, request_us=100_000, held_us=10_000, rows=2, charge=50)
PROMPT, ANSWER, SERVICE_MS = 10, 20, 210
FLOOD, LATE = Share("acme/flood"), Share("zoo/late")


class Site:
    """A lane, and one worker that takes what the test says."""

    def __init__(self, server: RedisServer) -> None:
        self.lane = Lane(server, ())
        self.reader = self.lane.reader("w")
        self.count = 0

    def submit(
        self,
        deadline_ms: int = 0,
        share: Share = ANYBODY,
        pace: LanePace | None = PACE,
        request_id: str = "",
        **terms: Any,
    ) -> str:
        """Return the id of an accepted request. Raises DeadlineUnreachable."""
        self.count += 1
        terms = {"prompt_tokens": PROMPT, "cost": PROMPT + 1000, "answer": ANSWER} | terms | share._asdict()
        admission = Admission("g", MANY, metadata=b"m", deadline_ms=deadline_ms, pace=pace, **terms)
        return str(finished(self.lane.broker.submit(request_id or f"r{self.count}", b"body", admission)).id)

    def waits_ms(self, **terms: Any) -> int | None:
        """Return the estimated wait of a request, which is refused in any case; None if it is accepted."""
        try:
            self.submit(1, **terms)
        except DeadlineUnreachable as error:
            return error.wait_ms
        return None

    def fill(self, count: int = 2, **terms: Any) -> list[Claim]:
        """Have the worker run new requests."""
        return [claim for claim in (self.take(self.submit(**terms)) for _ in range(count)) if claim is not None]

    def take(self, request_id: str, pace: Pace = Pace()) -> Claim | None:  # noqa: B008
        """Claim the next request, which must be this one."""
        [entry] = finished(self.reader.read(1, 0))
        assert entry.request_id == request_id
        claim: Claim | None = finished(self.lane.broker.claim(entry, "w", new_id(), "", pace))
        return claim

    def serve(self, claim: Claim, tokens: int) -> None:
        """End a request with this many tokens."""
        item = StepItem(claim.request_id, 0, (Delta(0, (1,) * tokens),), Outcome("stop"))
        finished(self.lane.broker.commit_step("w", [StepCommit(claim.attempt, item)]))

    def outcome(self, request_id: str) -> tuple[str, str] | None:
        items = finished(self.lane.broker.read_output(request_id))
        return (items[-1].outcome.name, items[-1].outcome.detail) if items else None


@pytest.fixture
def site(redis_server: RedisServer) -> Iterator[Site]:
    site = Site(redis_server)
    yield site
    site.lane.close()


def test_a_request_behind_a_queue_is_refused_with_the_times_that_would_do(site: Site) -> None:
    site.fill()
    for _ in range(5):
        site.submit()
    with pytest.raises(DeadlineUnreachable) as refused:
        site.submit(500 + SERVICE_MS - 1)
    assert (refused.value.ahead, refused.value.wait_ms, refused.value.service_ms) == (5, 500, SERVICE_MS)
    assert site.submit(500 + SERVICE_MS)
    # Nothing of a refused request is in Redis.
    assert finished(site.lane.broker.queued())[0] == 6
    assert int(site.lane.client.hget(KEYS.totals, "accepted")) == 8


@pytest.mark.parametrize(
    "terms",
    [{"deadline_ms": 0}, {"pace": None}, {"pace": PACE._replace(rows=8)}],
    ids=["without a deadline", "before anything is learnt", "with a free row"],
)
def test_what_is_never_refused(site: Site, terms: dict[str, Any]) -> None:
    site.fill()
    for _ in range(5):
        site.submit()
    assert site.submit(**{"deadline_ms": 1, **terms})


def test_an_idle_lane_accepts_any_deadline_and_a_full_one_what_can_run_in_time(site: Site) -> None:
    assert [site.waits_ms(), site.waits_ms()] == [None, None]
    site.take("r1")
    site.take("r2")  # both were late by then
    site.fill()
    assert site.waits_ms() == 0
    assert site.submit(SERVICE_MS)


def test_the_tokens_of_the_queue_bound_what_many_small_requests_take(site: Site) -> None:
    """The mean request of the past says nothing about a queue of embeddings."""
    site.fill()
    for _ in range(10):
        site.submit(cost=5)
    assert site.waits_ms() == 10 * 5 * PACE.held_us / 1000


def test_the_backlog_of_one_tenant_refuses_no_call_of_another(site: Site) -> None:
    site.fill(share=FLOOD)
    for _ in range(40):
        site.submit(share=FLOOD)
    assert site.waits_ms(share=FLOOD) == 4000
    assert site.waits_ms(share=LATE) == 0
    # Each later request of that tenant is behind its own ones, and as many of the other tenant.
    for count in range(1, 4):
        site.submit(share=LATE)
        assert site.waits_ms(share=LATE) == 200 * count
    # The users of a tenant share in the same way.
    assert site.waits_ms(share=FLOOD._replace(user="aa")) == 0


def test_a_tenant_that_was_served_more_comes_later(site: Site) -> None:
    first, _ = site.fill(share=LATE)
    site.submit(share=FLOOD)
    site.serve(first, tokens=95)
    for _ in range(10):
        site.submit(share=FLOOD)
    # The two requests of the tenant that was served have charged it two prompts and an answer: 210 tokens. The other
    # tenant began where this one was before its second request, at 10, and is taken until it has as many.
    assert site.waits_ms(share=LATE, pace=PACE._replace(rows=1)) == 100 * (210 - 10) / PACE.charge


def test_higher_classes_come_first_but_starve_none(site: Site) -> None:
    site.fill()
    for _ in range(20):
        site.submit(priority_class="interactive")
    assert {name: site.waits_ms(priority_class=name) for name in PRIORITY_CLASSES} == {
        "interactive": 2000,
        "standard": 300,
        "batch": 700,
    }


def test_a_repeated_call_gets_the_answer_of_the_first_one(site: Site) -> None:
    first = site.submit(5000, idempotency_key="k", fingerprint="f")
    site.take(first)
    site.fill(2)
    for _ in range(5):
        site.submit()
    assert site.submit(1, idempotency_key="k", fingerprint="f") == first
    assert site.submit(1, request_id=first) == first
    with pytest.raises(IdempotencyConflict):
        site.submit(1, idempotency_key="k", fingerprint="another")


SLOW = Pace(prompt_us=1000, token_us=100_000)


@pytest.mark.parametrize("others", [0, 1])
def test_a_request_that_has_waited_for_too_long_is_dropped_if_others_wait(site: Site, others: int) -> None:
    hopeless = site.submit(1900, pace=None)  # it would take 2.01 s
    for _ in range(others):
        site.submit(pace=None)
    claim = site.take(hopeless, SLOW)
    if not others:
        assert claim is not None
        return
    assert claim is None
    assert site.outcome(hopeless) == ("deadline", "the request has waited for too long to end before its deadline")
    assert site.lane.broker.hopeless == 1
    assert site.lane.client.hget(KEYS.request(hopeless), "deliveries") == b"0"
    # Its tenant was charged nothing.
    assert int(site.lane.client.hget(KEYS.served("standard"), ANYBODY.tenant)) == 0


@pytest.mark.parametrize(
    ("terms", "pace"),
    [
        ({"deadline_ms": 3000}, SLOW),
        ({"deadline_ms": 1900}, Pace()),
        ({"deadline_ms": 1900, "answer": -1}, SLOW),
        ({"deadline_ms": 0}, SLOW),
    ],
    ids=["in time", "pace unknown", "not estimated", "without a deadline"],
)
def test_other_requests_are_claimed(site: Site, terms: dict[str, Any], pace: Pace) -> None:
    request_id = site.submit(pace=None, **terms)
    site.submit(pace=None)
    assert site.take(request_id, pace) is not None


def test_a_request_that_has_run_is_not_dropped(site: Site) -> None:
    request_id = site.submit(1900, pace=None)
    claim = site.take(request_id)
    assert claim is not None
    item = StepItem(request_id, 0, (Delta(0, (1,)),), None)
    finished(site.lane.broker.commit_step("w", [StepCommit(claim.attempt, item)]))
    assert finished(site.lane.broker.release([(request_id, claim.attempt)])) == 1
    site.submit(pace=None)
    again = site.take(request_id, SLOW)
    assert again is not None
    assert again.emitted == 1


def test_a_lane_is_as_fast_as_all_of_its_workers_together() -> None:
    slow = Pace(prompt_us=400, token_us=8000, request_us=30_000, rows=4, answer=50, charge=100)
    fast = Pace(prompt_us=100, token_us=4000, request_us=15_000, rows=8, answer=60, charge=120)
    assert lane_pace([slow, fast]) == LanePace(100, 4000, 10_000, 334, 12, 100)
    # A worker that has not been full yet counts as fast as the others.
    assert lane_pace([fast, Pace(rows=8)]) == LanePace(100, 4000, 7500, 250, 16, 120)
    assert lane_pace([Pace(rows=8)]) is None
    assert lane_pace([]) is None
