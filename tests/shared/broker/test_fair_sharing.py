"""Fair sharing, by the real scripts: who is taken next, how much each tenant is served, and what may be lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from redis.asyncio import Redis

from quire.shared.protocol.broker import Admission, Broker, Claim, QueueBounds, QueueReader, StepCommit, new_id
from quire.shared.protocol.keys import PRIORITY_CLASSES, LaneKeys
from quire.shared.protocol.messages import Delta, Outcome, StepItem
from quire.shared.protocol.share import FLOOR, INPUT_COST, OUTPUT_COST
from quire.shared.redis.clients import blocking_client
from tests.support.broker_calls import KEYS as ASYNC_KEYS
from tests.support.fair_model import Share
from tests.support.protocol_driver import KEYS, Lane, Patch, finished
from tests.support.redis_server import RedisServer

MANY = QueueBounds(requests=10**6, tokens=10**9)
A, B = Share("acme/flood"), Share("zoo/late")


@dataclass
class Running:
    claim: Claim
    share: Share
    prompt: int
    left: int


@dataclass
class Site:
    """A lane with one worker of a fixed number of rows, without a clock: each step is one token of each row."""

    server: RedisServer
    rows: int = 1
    patch: Patch = ()
    running: list[Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lane = Lane(self.server, (), self.patch)
        self.reader = self.lane.reader("w")
        self.work: dict[str, tuple[Share, int, int]] = {}
        self.served: Counter[str] = Counter()  # weighted tokens by tenant
        self.by_user: Counter[tuple[str, str]] = Counter()

    def submit(
        self, share: Share, prompt: int = 4, answer: int = 4, bounds: QueueBounds = MANY, priority: str = "standard"
    ) -> str:
        request_id = f"r{len(self.work)}"
        finished(
            self.lane.broker.submit(
                request_id,
                b"body",
                Admission(
                    gateway="g",
                    cost=prompt + answer,
                    bounds=bounds,
                    priority_class=priority,
                    metadata=b"metadata",
                    prompt_tokens=prompt,
                    **share._asdict(),
                ),
            )
        )
        self.work[request_id] = (share, prompt, answer)
        return request_id

    def take(self, count: int | None = None) -> list[str]:
        """Fill the free rows; return the requests that were taken."""
        free = self.rows - len(self.running) if count is None else count
        found = finished(self.reader.read(free, 0))
        for delivery in found:
            claim = finished(self.lane.broker.claim(delivery, "w", new_id()))
            assert claim is not None
            share, prompt, answer = self.work[delivery.request_id]
            self.running.append(Running(claim, share, prompt, answer))
            self._count(share, INPUT_COST * prompt)
        return [delivery.request_id for delivery in found]

    def step(self) -> None:
        commits = []
        for one in self.running:
            start = self.work[one.claim.request_id][2] - one.left
            one.left -= 1
            end = Outcome("length") if one.left == 0 else None
            commits.append(StepCommit(one.claim.attempt, StepItem(one.claim.request_id, start, (Delta(0, (1,)),), end)))
            self._count(one.share, OUTPUT_COST)
        finished(self.lane.broker.commit_step("w", commits))
        self.running = [one for one in self.running if one.left]

    def _count(self, share: Share, cost: int) -> None:
        self.served[share.tenant] += cost
        self.by_user[share.tenant, share.user] += cost


@pytest.fixture
def site(redis_server: RedisServer) -> Iterator[Site]:
    site = Site(redis_server)
    yield site
    site.lane.close()


def tenants(count: int, weights: Sequence[int]) -> list[Share]:
    return [Share(f"acme/{index:04}", weight=weights[index % len(weights)]) for index in range(count)]


@pytest.mark.parametrize(
    ("count", "rows", "steps"),
    [
        (2, 1, 600),
        (2, 8, 300),
        pytest.param(20, 8, 900, marks=pytest.mark.slow),
        pytest.param(1000, 64, 500, id="1000", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("weights", [(100,), (100, 300)], ids=["equal", "weighted"])
def test_tenants_are_served_by_their_weights(
    redis_server: RedisServer, count: int, rows: int, steps: int, weights: Sequence[int]
) -> None:
    """While all wait, service by weight differs by at most twice the larger of a prompt and a full batch."""
    site, chance = Site(redis_server, rows), Random(1)
    shares = tenants(count, weights)
    # Some ask for much and some for little.
    sizes = {share.tenant: (chance.randrange(1, 30), chance.randrange(2, 12)) for share in shares}
    waiting: Counter[str] = Counter()
    bound = 2 * max(
        max(INPUT_COST * prompt for prompt, _ in sizes.values()),
        OUTPUT_COST * rows * max(prompt + answer for prompt, answer in sizes.values()),
    )
    try:
        for share in shares:
            for _ in range(3 if count > rows else 3 * rows):
                site.submit(share, *sizes[share.tenant])
                waiting[share.tenant] += 1
        start: dict[str, int] = {}
        for number in range(steps):
            for request_id in site.take():
                share = site.work[request_id][0]
                site.submit(share, *sizes[share.tenant])
            site.step()
            if number == rows:
                start = dict(site.served)
            if number > rows and number % 10 == 0:
                served = {
                    one.tenant: (site.served[one.tenant] - start.get(one.tenant, 0)) / one.weight for one in shares
                }
                spread = max(served.values()) - min(served.values())
                assert spread <= bound / min(weights), number
        if count <= 20:  # long enough for the shares themselves
            total = sum(site.served.values())
            for share in shares:
                fair = total * share.weight / sum(one.weight for one in shares)
                assert site.served[share.tenant] == pytest.approx(fair, rel=0.15 if count > 2 else 0.05)
        counters = site.lane.client.hgetall(KEYS.served("standard"))
        assert {name.decode() for name in counters} == {share.tenant for share in shares} | {FLOOR}
    finally:
        site.lane.close()


def test_a_tenant_cannot_gain_by_many_users_and_its_users_share(site: Site) -> None:
    site.rows = 2
    crowd = [Share("acme/crowd", f"{index:02x}") for index in range(10)]
    for _ in range(15):
        for share in (*crowd, *[B] * 10):
            site.submit(share)
        site.submit(crowd[0])  # asks for twice as much as the others
    for _ in range(300):
        site.take()
        site.step()
    assert site.served["acme/crowd"] == pytest.approx(site.served[B.tenant], rel=0.05)
    shares = [site.by_user["acme/crowd", share.user] for share in crowd]
    assert max(shares) - min(shares) <= 2 * (INPUT_COST * 4 + OUTPUT_COST * 4)


def test_a_request_whose_hash_is_lost_does_not_stop_its_line(site: Site) -> None:
    for _ in range(4):
        site.submit(A)
    site.lane.client.delete(KEYS.request("r0"), KEYS.request("r1"))
    found = finished(site.reader.read(4, 0))
    claims = [finished(site.lane.broker.claim(delivery, "w", new_id())) for delivery in found]
    assert [claim and claim.request_id for claim in claims] == [None, None, "r2", "r3"]
    assert site.lane.broker.corrupt["queue entry"] == 2
    assert site.lane.client.exists(KEYS.waiting, KEYS.tenants("standard")) == 0


@pytest.mark.parametrize("what", ["served", "tenants", "users", "line", "waiting", "entry"])
def test_nothing_waits_for_ever_if_a_part_is_lost_or_corrupt(site: Site, what: str) -> None:
    for share in (A, A, B, B):
        site.submit(share)
    client = site.lane.client
    if what == "served":
        client.delete(KEYS.served("standard"))
        client.hset(KEYS.served("standard"), A.tenant, "not a number")
    elif what == "entry":
        client.xtrim(KEYS.queue("waiting:standard"), 0)
    else:
        made = {"tenants": KEYS.tenants("standard"), "users": KEYS.users("standard", A.tenant)}
        made |= {"line": KEYS.line("standard", A.tenant), "waiting": KEYS.waiting}
        client.delete(made[what])
    site.submit(A)
    site.submit(B)
    taken = set(site.take(10))
    # Requests whose place is lost do not come back; all others come.
    assert taken >= {"r4", "r5"}
    assert taken >= ({"r0", "r1", "r2", "r3"} if what in ("served", "waiting", "tenants", "users") else set())
    assert site.submit(A) in site.take(10)


def test_forgotten_counters_begin_at_the_least_counter(redis_server: RedisServer) -> None:
    site = Site(redis_server, 1, ((">= MAX_COUNTERS then", ">= 4 then"),))
    try:
        site.submit(A, answer=50)
        for index in range(12):
            site.submit(Share(f"many/{index}"))
        assert site.lane.client.hlen(KEYS.served("standard")) <= 5
        taken = []
        for _ in range(13):
            taken += site.take(1)
        assert sorted(taken) == sorted(site.work)
    finally:
        site.lane.close()


async def test_a_worker_that_blocks_is_woken_by_lines(broker: Broker, client: Redis, redis_url: str) -> None:
    """Two requests that came between the last look of a worker and its blocking read wait in lines."""
    await broker.create_groups()
    blocking = blocking_client(redis_url)
    reader = QueueReader(blocking, "lane", "w")
    assert await reader.read(10, 1) == []  # the next read blocks without a look
    for name, share in (("a", A), ("b", B)):
        await broker.submit(name, b"body", Admission(gateway="g", cost=1, bounds=MANY, **share._asdict()))
    assert await client.xlen(ASYNC_KEYS.queue()) == 0
    async with asyncio.timeout(60):
        found = await reader.read(10, 60_000)
    assert {one.request_id for one in found} == {"a", "b"}
    await reader.read(10, 0)
    assert (await client.xpending(ASYNC_KEYS.wake, "workers"))["pending"] == 0
    await blocking.aclose()


async def test_workers_wake_each_other_while_requests_wait(broker: Broker, client: Redis, redis_url: str) -> None:
    await broker.create_groups()
    clients = [blocking_client(redis_url) for _ in range(3)]
    readers = [QueueReader(one, "lane", f"w{index}") for index, one in enumerate(clients)]
    for reader in readers:
        assert await reader.read(4, 1) == []
    for index in range(6):
        tenant = (A, B)[index % 2].tenant
        await broker.submit(f"r{index}", b"body", Admission(gateway="g", cost=1, bounds=MANY, tenant=tenant))
    async with asyncio.timeout(60):
        found = await asyncio.gather(*(reader.read(4, 60_000) for reader in readers[:2]))
    assert sorted(one.request_id for part in found for one in part) == [f"r{index}" for index in range(6)]
    # A worker that ends leaves no consumer behind.
    for reader in readers:
        assert await broker.enlist(reader.worker_id, "i", "home", 1.0)
        await broker.retire(reader.worker_id, "i")
    names = {one["name"] for one in await client.xinfo_consumers(ASYNC_KEYS.wake, "workers")}
    assert names <= {one["name"] for one in await client.xinfo_consumers(ASYNC_KEYS.queue(), "workers")}
    for one in clients:
        await one.aclose()


def test_a_request_of_a_late_worker_group_is_in_one_place(site: Site) -> None:
    """Before the first worker there is no consumer group; requests wait in the stream and in lines."""
    site.lane.client.flushall()
    for share in (A, A, B):
        site.submit(share)
    finished(site.lane.broker.create_groups())
    assert sorted(site.take(10)) == ["r0", "r1", "r2"]
    assert all(site.lane.client.xlen(LaneKeys("lane").queue(f"waiting:{name}")) == 0 for name in PRIORITY_CLASSES)
