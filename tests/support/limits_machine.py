"""A machine of Hypothesis that compares reservation and settlement in the scripts with a model in plain Python.

Walks have crashes, lost replies, corrupt requests, restores of older data, changed limits and a clock that jumps over
minutes, days and months.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from quire.shared.accounts.account import Account
from quire.shared.accounts.limits import AccountLimits
from quire.shared.protocol.broker import Admission, ComputedTokens, QueueBounds, StepCommit, new_id
from quire.shared.protocol.charge import LimitReached, Price, RateState, packed_limits
from quire.shared.protocol.keys import AccountKeys
from quire.shared.protocol.messages import Delta, Outcome, StepItem
from tests.support.protocol_driver import KEYS, Lane, Patch, finished
from tests.support.redis_server import RedisServer

BOUNDS = QueueBounds(requests=1000, tokens=10**9)
PRICE = Price(3, 7)
ACCOUNTS = AccountKeys()
CLOCK: Patch = (
    (
        "local time = redis.call('TIME')\n    return time[1] * 1000 + math.floor(time[2] / 1000)",
        "return tonumber(redis.call('GET', 'now'))",
    ),
)
# Seconds for which a request may be parked: longer than a walk.
PARK_S = 10**9
START_MS = int(datetime(2024, 2, 28, 23, 58, 30, tzinfo=UTC).timestamp() * 1000)
picks = st.integers(0, 63)
losses = st.sampled_from((False, False, True))
outcomes = st.sampled_from((None, None, "stop", "length", "error"))
limits = st.builds(
    AccountLimits,
    requests_per_minute=st.sampled_from((0, 0, 3, 7)),
    tokens_per_minute=st.sampled_from((0, 0, 60, 200)),
    concurrent_requests=st.sampled_from((0, 0, 2, 4)),
    tokens_per_day=st.sampled_from((0, 0, 60, 300)),
    tokens_per_month=st.sampled_from((0, 0, 500)),
    cost_per_day=st.sampled_from((0, 0, 1500)),
    cost_per_month=st.sampled_from((0, 0, 2500)),
)


def day_of(now: int) -> int:
    return (datetime.fromtimestamp(now // 1000, UTC).date() - datetime(1970, 1, 1).date()).days


def month_of(now: int) -> tuple[int, int]:
    today = datetime.fromtimestamp(now // 1000, UTC)
    return today.year, today.month


@dataclass
class Bucket:
    """The rest of a limit per minute, in calls or tokens; None before its first use."""

    left: Fraction | None = None
    at: int = 0

    def now(self, now: int, limit: int) -> Fraction:
        if self.left is None or not limit:
            return Fraction(limit)
        return min(Fraction(limit), self.left + Fraction(min(60_000, max(0, now - self.at)) * limit, 60_000))

    def take(self, now: int, limit: int, amount: int) -> None:
        left = self.now(now, limit)
        self.left, self.at = (max(Fraction(0), left - amount), now) if limit else (None, 0)


@dataclass
class Spent:
    """The ledger of an account: every request with the day of its acceptance and what it counts now."""

    calls: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)


@dataclass
class Work:
    """A request between two parkings: `counted` is what it counts in all budgets, its reservation until its end.

    computed: tokens that were computed for it, emitted or not.
    most: tokens that are reserved. whole: tokens that it may use. base: its tokens when it was queued. requests: 0 once
    an earlier part was counted. allowed: its tokens before which it is parked.
    """

    request_id: str
    accounts: tuple[Account, ...]
    prompt: int
    most: int
    accepted: int
    counted: int
    cost: int
    emitted: int = 0
    computed: int = 0
    attempt: str = ""
    is_open: bool = True
    debited: tuple[bool, ...] = ()
    whole: int = 0
    base: int = 0
    requests: int = 1
    allowed: int | None = None
    parks: bool = False
    is_parked: bool = False
    is_flagged: bool = False

    @property
    def used(self) -> int:
        return max(self.emitted, self.computed)

    @property
    def last(self) -> int:
        """The tokens of its longest answer."""
        return self.base + self.whole - self.prompt


class LimitsMachine(RuleBasedStateMachine):
    server: ClassVar[RedisServer]
    patch: ClassVar[Patch] = ()

    def __init__(self) -> None:
        super().__init__()
        self.lane = Lane(self.server, ("g",), CLOCK + self.patch)
        self.now = START_MS
        self.clock(0)
        self.accounts = {
            place: Account(kind=kind, id=name, name=name)  # type: ignore[arg-type]
            for kind, name in (("key", "a" * 16), ("key", "b" * 16), ("project", "o/p"), ("organisation", "o"))
            for place in (f"{kind}:{name}",)
        }
        self.spent = {place: Spent() for place in self.accounts}
        self.work: dict[str, Work] = {}
        self.settled: list[Work] = []  # the parts of requests before they were parked
        self.saved: Any = None
        self.count = 0

    def clock(self, passed_ms: int) -> None:
        self.now += passed_ms
        self.lane.client.set("now", self.now)

    def open(self) -> list[Work]:
        return [one for one in self.work.values() if one.is_open]

    def running(self) -> list[Work]:
        return [one for one in self.open() if one.attempt]

    def parts(self) -> list[Work]:
        """Return all requests, those that were parked in parts."""
        return [*self.settled, *(work for work in self.work.values() if not work.is_parked)]

    def parked(self) -> list[Work]:
        return [one for one in self.work.values() if one.is_parked]

    def has_parked(self) -> bool:
        return bool(self.parked())

    def has_open(self) -> bool:
        return bool(self.open())

    def has_running(self) -> bool:
        return bool(self.running())

    # --- what happens -------------------------------------------------------------------------------------------------

    @rule(ms=st.sampled_from((1, 250, 5_000, 61_000, 3_600_000, 86_400_000, 2_000_000_000)))
    def time_passes(self, ms: int) -> None:
        self.clock(ms)

    @rule(which=picks, changed=limits)
    def change_limits(self, which: int, changed: AccountLimits) -> None:
        place = list(self.accounts)[which % 4]
        self.accounts[place] = replace(self.accounts[place], limits=changed)

    @rule(
        key=st.booleans(),
        prompt=st.integers(1, 30),
        answer=st.integers(0, 60),
        begins=st.booleans(),
        parks=st.booleans(),
        lost=losses,
    )
    def submit(self, key: bool, prompt: int, answer: int, begins: bool, parks: bool, lost: bool) -> None:
        places = ("key:" + ("a" if key else "b") * 16, "project:o/p", "organisation:o")
        chain = tuple(self.accounts[place] for place in places)
        self.count += 1
        request_id, most = f"r{self.count}", prompt + answer
        rates: list[Any] = []

        def call() -> Any:
            try:
                submitted = finished(
                    self.lane.broker.submit(
                        request_id,
                        b"body",
                        Admission(
                            gateway="g",
                            cost=most,
                            bounds=BOUNDS,
                            metadata=b"metadata",
                            accounts=chain,
                            model="model",
                            price=PRICE,
                            park_s=PARK_S if parks else 0,
                            prompt_tokens=prompt,
                            begins_call=begins,
                        ),
                    )
                )
            except LimitReached as reached:
                return reached.limit, reached.account, reached.wait_ms
            rates.append(submitted.rates)
            return None

        found, (expected, granted) = call(), self.expected(chain, int(begins), most, prompt, parks)
        if lost and found is None:
            assert call() is None
        if expected is None:
            assert found is None
            self.accept(self.part(request_id, chain, prompt, most, granted, parks), int(begins))
            assert rates[0].get("calls") == self.tightest(chain, "requests_per_minute", "calls")
            assert rates[0].get("tokens") == self.tightest(chain, "tokens_per_minute", "tokens")
        else:
            assert found in expected

    @rule(answer=st.integers(10, 40), part=st.integers(1, 4))
    def submit_with_a_small_budget(self, answer: int, part: int) -> None:
        """The budget of a key suffices for a few tokens of an answer, for a moment."""
        before = dict(self.accounts)
        for place in ("project:o/p", "organisation:o"):
            self.accounts[place] = replace(self.accounts[place], limits=AccountLimits())
        place = "key:" + "a" * 16
        budget = AccountLimits(tokens_per_day=self.counted(place, "counted", day_of) + 10 + part)
        self.accounts[place] = replace(self.accounts[place], limits=budget)
        self.submit(True, 10, answer, True, True, False)
        self.accounts = before
        self.claim()

    def cost(self, prompt: int, answer: int) -> int:
        return prompt * PRICE.prompt + answer * PRICE.completion

    def counted(self, place: str, what: str, same: Any) -> int:
        return sum(
            getattr(work, what)
            for work in self.parts()
            if place in {account.place for account in work.accounts} and same(work.accepted) == same(self.now)
        )

    def part(
        self, request_id: str, chain: tuple[Account, ...], prompt: int, whole: int, granted: int, parks: bool
    ) -> Work:
        cost = self.cost(prompt, granted - prompt)
        work = Work(request_id, chain, prompt, granted, self.now, granted, cost, whole=whole, parks=parks)
        work.allowed = granted - prompt if granted < whole else None
        return work

    def expected(
        self, chain: tuple[Account, ...], calls: int, most: int, prompt: int, parks: bool
    ) -> tuple[set[tuple[str, str, int]] | None, int]:
        """All refusals that are right, None if the request must be accepted; and the tokens that are reserved then."""
        never, waits, full = set(), {}, set()
        granted = most
        for account in chain:
            for name, what, same in (
                ("tokens_per_day", "counted", day_of),
                ("tokens_per_month", "counted", month_of),
                ("cost_per_day", "cost", day_of),
                ("cost_per_month", "cost", month_of),
            ):
                if bound := getattr(account.limits, name):
                    left = bound - self.counted(account.place, what, same)
                    if what == "cost":
                        left = max(-1, prompt + (left - self.cost(prompt, 0)) // PRICE.completion)
                        left = -1 if bound - self.counted(account.place, what, same) < self.cost(prompt, 0) else left
                    if left < most and (not parks or left <= prompt):
                        never.add((name, account.place, -1))
                    granted = min(granted, left)
        if never:
            return never, 0
        most = granted
        for account in chain:
            place, limit = account.place, account.limits
            for name, bucket, need in (
                ("requests_per_minute", self.spent[place].calls, calls),
                ("tokens_per_minute", self.spent[place].tokens, most),
            ):
                bound = getattr(limit, name)
                missing = need - bucket.now(self.now, bound)
                if bound and missing > 0:
                    if need > bound:
                        never.add((name, place, -1))
                    else:
                        waits[name, place] = -int(-missing * 60_000 // bound)
            running = sum(place in {one.place for one in work.accounts} for work in self.open())
            if limit.concurrent_requests and running >= limit.concurrent_requests:
                full.add(("concurrent_requests", place, 0))
        if never:
            return never, 0
        if waits:
            longest = max(waits.values())
            return {(*reached, wait) for reached, wait in waits.items() if wait == longest} | full, 0
        return full or None, granted

    def accept(self, work: Work, calls: int) -> None:
        for account in work.accounts:
            spent = self.spent[account.place]
            spent.calls.take(self.now, account.limits.requests_per_minute, calls)
            spent.tokens.take(self.now, account.limits.tokens_per_minute, work.most)
        work.debited = tuple(bool(account.limits.tokens_per_minute) for account in work.accounts)
        self.work[work.request_id] = work

    def tightest(self, chain: tuple[Account, ...], limit: str, bucket: str) -> RateState | None:
        """Return the limit per minute that has least left."""
        found = []
        for account in chain:
            if most := getattr(account.limits, limit):
                left = getattr(self.spent[account.place], bucket).now(self.now, most)
                found.append(RateState(most, int(left), -int((left - most) * 60_000 // most)))
        return min(found, key=lambda state: state.left, default=None)

    def end(self, work: Work, outcome: str) -> None:
        answer = work.used - work.base
        has_computed = answer > 0 or outcome in ("stop", "length")
        used = work.prompt + answer if has_computed else 0
        for account, is_debited in zip(work.accounts, work.debited, strict=True):
            bucket = self.spent[account.place].tokens
            if is_debited and bucket.left is not None:
                bucket.left += work.most - used
        work.counted, work.cost = used, self.cost(work.prompt, answer) if has_computed else 0
        work.is_open, work.attempt = False, ""

    @rule()
    def claim(self) -> None:
        reader = self.lane.reader("w")
        for delivery in finished(reader.read(2, 0)):
            attempt = new_id()
            claim = finished(self.lane.broker.claim(delivery, "w", attempt))
            work = self.work[delivery.request_id]
            if claim is None:
                if work.is_open:
                    self.end(work, "error")
            else:
                work.attempt = attempt

    @precondition(has_running)
    @rule(
        which=picks,
        size=st.integers(0, 9),
        outcome=st.sampled_from((None, None, "stop", "length", "error")),
        lost=losses,
    )
    def commit(self, which: int, size: int, outcome: str | None, lost: bool) -> None:
        running = self.running()
        work = running[which % len(running)]
        size = min(size, work.last - work.emitted)
        deltas = (Delta(0, tuple(range(size))),) if size else ()
        item = StepItem(work.request_id, work.emitted, deltas, Outcome(outcome) if outcome else None)
        for _ in range(1 + lost):
            finished(self.lane.broker.commit_step("w", [StepCommit(work.attempt, item)]))
        if self.is_used_up(work, work.emitted + size):
            return
        work.emitted += size
        if outcome:
            self.end(work, outcome)

    @precondition(has_running)
    @rule(which=picks, count=st.integers(1, 60), outcome=st.sampled_from((None, "stop", "cancelled")), lost=losses)
    def compute(self, which: int, count: int, outcome: str | None, lost: bool) -> None:
        """Tokens were computed for a request that has emitted less, and perhaps ends with it."""
        work = self.running()[which % len(self.running())]
        computed = ComputedTokens(work.request_id, work.attempt, min(count, work.last))
        item = StepItem(work.request_id, work.emitted, (), Outcome(outcome) if outcome else None)
        for _ in range(1 + lost):
            finished(self.lane.broker.commit_step("w", [StepCommit(work.attempt, item)], (), [computed]))
        if computed.tokens > work.computed:
            if self.is_used_up(work, computed.tokens):
                return
            work.computed = computed.tokens
        if outcome:
            self.end(work, outcome)

    def is_used_up(self, work: Work, used: int) -> bool:
        """Return whether a request may not have so many tokens. Such a request is parked, or ends."""
        if work.allowed is None or used <= work.allowed:
            return False
        if work.is_flagged:
            self.end(work, "cancelled")
        else:
            self.set_aside(work)
        return True

    def set_aside(self, work: Work) -> None:
        self.end(work, "parked")
        self.settled.append(replace(work))
        work.is_parked = True

    @precondition(has_open)
    @rule(which=picks, lost=losses)
    def park(self, which: int, lost: bool) -> None:
        work = self.open()[which % len(self.open())]
        for _ in range(1 + lost):
            finished(self.lane.broker.park(work.request_id, retention_s=PARK_S))
        if not work.is_flagged:
            self.set_aside(work)

    @precondition(has_parked)
    @rule(which=picks, is_checked=st.booleans(), lost=losses)
    def unpark(self, which: int, is_checked: bool, lost: bool) -> None:
        work = self.parked()[which % len(self.parked())]
        chain = tuple(self.accounts[one.place] for one in work.accounts) if is_checked else work.accounts
        prompt, whole = 0 if work.counted else work.prompt, work.whole - work.counted
        limits = packed_limits(chain if is_checked else ())

        def call() -> Any:
            try:
                finished(self.lane.broker.unpark(work.request_id, BOUNDS, limits))
            except LimitReached as reached:
                return reached.limit, reached.account, reached.wait_ms
            return None

        found = call()
        expected, granted = self.expected(chain, 0, whole, prompt, work.parks) if is_checked else (None, whole)
        if lost and found is None:
            assert call() is None
        if expected is not None:
            assert found in expected
            return
        assert found is None
        again = self.part(work.request_id, chain, prompt, whole, granted, work.parks)
        again.emitted, again.computed, again.base = work.emitted, work.computed, work.used
        again.allowed = None if again.allowed is None else work.used + again.allowed
        again.requests = 0
        self.accept(again, 0)

    @precondition(lambda self: any(work.allowed is not None for work in self.running()))
    @rule(which=picks, size=st.integers(1, 9))
    def use_up(self, which: int, size: int) -> None:
        """A request runs until its budget is used up, or until its end."""
        bounded = [work for work in self.running() if work.allowed is not None]
        work = bounded[which % len(bounded)]
        while work.attempt and work.emitted < work.last:
            self.commit(self.running().index(work), size, None, False)

    @precondition(has_running)
    @rule(which=picks, size=st.integers(1, 9), is_checked=st.booleans())
    def continue_after_parking(self, which: int, size: int, is_checked: bool) -> None:
        """A request has tokens, is parked, and runs again."""
        self.commit(which, size, None, False)
        if self.open():  # else its budget has parked it
            self.park(which, False)
        if self.parked():
            self.unpark(63, is_checked, False)
            self.claim()

    @precondition(has_parked)
    @rule(which=picks)
    def cancel_parked(self, which: int) -> None:
        work = self.parked()[which % len(self.parked())]
        finished(self.lane.broker.cancel(work.request_id))
        del self.work[work.request_id]

    @precondition(has_open)
    @rule(which=picks, lost=losses)
    def cancel(self, which: int, lost: bool) -> None:
        work = self.open()[which % len(self.open())]
        for _ in range(1 + lost):
            finished(self.lane.broker.cancel(work.request_id))
        if not work.attempt:
            self.end(work, "cancelled")
        work.is_flagged = True

    @precondition(has_running)
    @rule(which=picks)
    def release(self, which: int) -> None:
        work = self.running()[which % len(self.running())]
        finished(self.lane.broker.release([(work.request_id, work.attempt)]))
        work.attempt = ""

    @precondition(has_open)
    @rule(which=picks)
    def delete(self, which: int) -> None:
        finished(self.lane.broker.delete(self.open()[which % len(self.open())].request_id))

    @precondition(has_open)
    @rule(which=picks, is_wrong_type=st.booleans())
    def lose_the_hash(self, which: int, is_wrong_type: bool) -> None:
        """The request of a queued entry is lost or corrupt; its claim settles it."""
        queued = [work for work in self.open() if not work.attempt]
        if queued:
            request_id = queued[which % len(queued)].request_id
            self.lane.client.delete(KEYS.request(request_id))
            if is_wrong_type:
                self.lane.client.set(KEYS.request(request_id), "x")
            self.claim()
            while self.work[request_id].is_open:
                self.claim()

    @rule()
    def save(self) -> None:
        self.saved = self.lane.save(), deepcopy((self.work, self.spent, self.settled))

    @precondition(lambda self: self.saved is not None)
    @rule()
    def restore(self) -> None:
        """Redis came back with older data: requests and counters are of the same moment."""
        data, (self.work, self.spent, self.settled) = self.saved[0], deepcopy(self.saved[1])
        self.lane.restore(data)
        self.clock(0)

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        days = sorted({day_of(work.accepted) for work in self.parts()})
        pipe: Any = self.lane.client.pipeline(transaction=False)
        pipe.hkeys(KEYS.reserved)
        for key in (*map(ACCOUNTS.spent, self.accounts), *map(ACCOUNTS.usage, days)):
            pipe.hgetall(key)
        reserved, *found = pipe.execute()
        assert {name.decode() for name in reserved} == {work.request_id for work in self.open()}
        for place, stored in zip(self.accounts, found, strict=False):
            raw = {name.decode(): int(float(value)) for name, value in stored.items()}
            of_account = [work for work in self.parts() if place in {one.place for one in work.accounts}]
            assert raw.get("open", 0) == sum(work.is_open for work in of_account)
            if not of_account:
                continue
            last = max(work.accepted for work in of_account)
            today = [work for work in of_account if day_of(work.accepted) == day_of(last)]
            month = [work for work in of_account if month_of(work.accepted) == month_of(last)]
            assert raw["day"] == day_of(last)
            assert (raw["day_tokens"], raw["day_cost"]) == (sum(w.counted for w in today), sum(w.cost for w in today))
            assert raw["month_tokens"] == sum(work.counted for work in month)
            assert raw["month_cost"] == sum(work.cost for work in month)
        self.check_usage(dict(zip(days, found[len(self.accounts) :], strict=True)))

    def check_usage(self, usage: dict[int, dict[bytes, bytes]]) -> None:
        """The usage of each day is the sum over the requests that have ended."""
        for day, stored in usage.items():
            found = {name.decode(): int(count) for name, count in stored.items()}
            expected: dict[str, int] = {}
            for work in self.parts():
                if work.is_open or day_of(work.accepted) != day:
                    continue
                name = f"{work.accounts[0].id} model "
                prompt = work.prompt if work.counted else 0
                for what, amount in (
                    ("requests", work.requests),
                    ("prompt", prompt),
                    ("completion", work.used - work.base),
                    ("cost", work.cost),
                ):
                    expected[name + what] = expected.get(name + what, 0) + amount
            assert found == expected

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                while any(not work.attempt for work in self.open()):
                    self.claim()
                for work in self.running():
                    item = StepItem(work.request_id, work.emitted, (), Outcome("stop"))
                    finished(self.lane.broker.commit_step("w", [StepCommit(work.attempt, item)]))
                    self.end(work, "stop")
                self.holds()
        finally:
            self.lane.close()


def walk(server: RedisServer, walks: int, steps: int, patch: Patch = (), **options: Any) -> None:
    machine = type("Machine", (LimitsMachine,), {"server": server, "patch": patch})
    configuration = settings(
        max_examples=walks,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,  # otherwise as many walks follow the first failure as came before it
        suppress_health_check=list(HealthCheck),
        **{"derandomize": True, "phases": (Phase.generate,), **options},
    )
    run_state_machine_as_test(machine, settings=configuration)
