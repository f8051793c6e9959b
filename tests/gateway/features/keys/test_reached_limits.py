"""How long a gateway remembers a refusal, and which ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quire.gateway.errors.api_errors import RateLimited
from quire.gateway.features.keys import reached_limits
from quire.gateway.features.keys.reached_limits import ReachedLimits
from quire.shared.accounts.account import Account
from quire.shared.accounts.limits import AccountLimits
from quire.shared.protocol.broker import Admission, QueueBounds
from quire.shared.protocol.charge import LimitReached
from quire.shared.protocol.keys import LaneKeys

PROJECT = Account(kind="project", id="acme/web", name="web", limits=AccountLimits(requests_per_minute=5))
KEYS = [Account(kind="key", id=digit * 16, name="test") for digit in "ab"]
CALLERS = [(key, PROJECT) for key in KEYS]
TERMS = Admission(gateway="g", bounds=QueueBounds(1, 1), accounts=CALLERS[0])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(reached_limits, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.mark.parametrize(("wait_ms", "until"), [(300, 100.3), (12_000, 101.0)])
def test_until_the_limit_allows_a_call_and_for_a_second_at_most(
    clock: SimpleNamespace, wait_ms: int, until: float
) -> None:
    found = ReachedLimits()
    found.note(LimitReached("requests_per_minute", PROJECT.place, wait_ms), TERMS)
    clock.now = until - 0.01
    for caller in CALLERS:
        with pytest.raises(RateLimited) as caught:
            found.check(caller)
        left = wait_ms - 1000 * (clock.now - 100)
        assert left - 2 < int(caught.value.headers["Retry-After-Ms"]) <= left
    found.check(KEYS)
    clock.now = until
    found.check(CALLERS[0])
    found.note(LimitReached("requests_per_minute", KEYS[0].place, 1), TERMS)
    assert list(found._refused) == [KEYS[0].place]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("reached", "terms"),
    [
        (LimitReached("tokens_per_minute", PROJECT.place, 9000), TERMS),
        (LimitReached("concurrent_requests", PROJECT.place, 0), TERMS),
        (LimitReached("tokens_per_day", PROJECT.place, -1), TERMS),
        (
            LimitReached("requests_per_minute", PROJECT.place, 9000),
            TERMS._replace(account_prefix=LaneKeys("model").prefix),
        ),
    ],
    ids=["a smaller call may pass", "a call may end", "a budget", "a counter of one model"],
)
def test_a_refusal_that_does_not_hold_for_every_call_is_forgotten(reached: LimitReached, terms: Admission) -> None:
    found = ReachedLimits()
    found.note(reached, terms)
    found.check(CALLERS[0])
