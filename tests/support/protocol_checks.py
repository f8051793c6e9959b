"""What must hold after each step of a walk: the state of Redis is that of the model, and its invariants hold."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache

from quire.shared.protocol.keys import PRIORITY_CLASSES, RETENTION_S
from quire.shared.protocol.messages import OUTCOMES, StepItem, decode_items
from tests.support.fair_model import Group
from tests.support.protocol_driver import API_KEYS, KEYS, TENANTS, FairSnapshot, Snapshot
from tests.support.protocol_model import ProtocolModel

LEASE_MS = 30_000


def token(request_id: str, index: int) -> int:
    """Return the token that every worker computes at this position."""
    return (31 * int(request_id[1:]) + index) % 1000


@lru_cache(maxsize=4096)
def decoded(data: bytes) -> tuple[StepItem, ...]:
    return tuple(decode_items(data))


class ProtocolChecks:
    """model: what must be. settled: finished and checked requests, with the length of their logs.

    seen: what a gateway has of each request that was ever published.
    """

    model: ProtocolModel
    settled: dict[str, int]
    seen: defaultdict[str, int]
    ends_seen: Counter[str]

    def check_published(self, snapshot: Snapshot, frames: list[tuple[str, bytes]]) -> None:
        expected: defaultdict[str, bytes] = defaultdict(bytes)
        for gateway, items in self.model.published:
            expected[KEYS.channel(gateway)] += b"".join(items)
        self.model.published.clear()
        published: defaultdict[str, bytes] = defaultdict(bytes)
        for channel, frame in frames:
            published[channel] += frame
            # I2: what a client sees is in the log, and it never sees a gap.
            for item in decoded(frame):
                entry = f"{item.end}-{1 if item.outcome else 0}"
                assert item.request_id in snapshot.requests, "published after the end"
                log = snapshot.requests[item.request_id].log
                assert (entry, item) in [(entry, *decoded(data)) for entry, data in log]
                assert item.start <= self.seen[item.request_id]
                self.seen[item.request_id] = max(item.end, self.seen[item.request_id])
                self.ends_seen[item.request_id] += item.outcome is not None
                assert self.ends_seen[item.request_id] <= 1
        assert published == expected

    def check_counts(self, snapshot: Snapshot) -> None:
        # I1: each accepted request has one outcome, or waits, or runs, or is parked; load counts the waiting requests.
        assert snapshot.totals == self.model.totals
        assert snapshot.recoveries == +self.model.recoveries
        going = [request for request in snapshot.requests.values() if request.state != "done"]
        ended = sum(snapshot.totals.get(outcome, 0) for outcome in OUTCOMES)
        assert snapshot.totals.get("accepted", 0) == ended + len(going)
        waiting = [request for request in going if request.state == "queued"]
        for name in ("", *PRIORITY_CLASSES):
            costs = [request.cost for request in waiting if name in ("", request.priority_class)]
            suffix = f":{name}" if name else ""
            assert snapshot.load.get(f"requests{suffix}", 0) == len(costs)
            assert snapshot.load.get(f"tokens{suffix}", 0) == sum(costs)
        assert snapshot.dead == len(self.model.dead) == snapshot.totals.get("quarantined", 0)

    def check_held(self, snapshot: Snapshot) -> None:
        held = dict(snapshot.held)
        total = int(held.pop("", 0))
        assert held == {name: f"{size} {key}" for name, (key, size) in self.model.held.items()}
        assert total == sum(size for _, size in self.model.held.values())
        assert snapshot.holders == {key: self.model.held_by(key) for key, _ in self.model.held.values()}
        parked = [one for one in self.model.requests.values() if one.state == "parked"]
        for key in API_KEYS:
            assert snapshot.parked_of[key] == {one.request_id for one in parked if one.key == key}

    def check_queues(self, snapshot: Snapshot) -> None:
        for name, entries in snapshot.streams.items():
            assert entries == {entry: request_id for entry, (request_id, *_) in self.model.streams[name].items()}
        assert snapshot.pending.keys() == self.model.pending.keys()
        for place, (consumer, idle_ms) in snapshot.pending.items():
            assert (consumer, idle_ms > LEASE_MS) == (
                self.model.pending[place].worker,
                self.model.pending[place].is_old,
            )

    def check_shares(self, snapshot: Snapshot) -> None:
        costs: defaultdict[str, list[int]] = defaultdict(list)
        for name, found in snapshot.fair.items():
            check_group(found, self.model.fair.tenants[name])
            for tenant in TENANTS:
                check_group(found.users[tenant], self.model.fair.users[name, tenant])
                for user, entries in found.users[tenant].lines.items():
                    line = self.model.fair.lines[name, tenant, user]
                    assert [snapshot.streams[f"waiting:{name}"].get(entry) for entry in entries] == [
                        one[1] for one in line
                    ]
                    costs[tenant] += [self.model.requests[request_id].cost for _, request_id, *_ in line]
        expected = {f"requests {tenant}": len(found) for tenant, found in costs.items() if found}
        expected |= {f"tokens {tenant}": sum(found) for tenant, found in costs.items() if found}
        assert snapshot.waiting == expected
        # A worker that blocks reads this entry, so no line waits while a worker is idle.
        assert snapshot.wakes == 1 or not expected

    def check_request(self, request_id: str, snapshot: Snapshot) -> None:
        request, redis = self.model.requests[request_id], snapshot.requests[request_id]
        assert redis.log == request.log
        # I2, by the log alone: contiguous, the terminal entry once and last.
        end, outcome = 0, None
        for entry, data in redis.log:
            [item] = decoded(data)
            assert outcome is None
            assert item.start == end
            end, outcome = item.end, item.outcome
            assert entry == f"{end}-{1 if outcome else 0}"
            for delta in item.deltas:
                assert delta.token_ids == tuple(token(request_id, index) for index in range(item.start, end))
        assert redis.emitted == end
        assert (redis.state == "done") == (outcome is not None) == (redis.outcome != "")
        assert outcome is None or outcome.name == redis.outcome
        is_there = bool(redis.queue) and snapshot.streams[redis.queue].get(redis.entry) == request_id
        assert (request_id in snapshot.parked) == (redis.state == "parked")
        if redis.state == "done":
            # A finished request is neither pending nor in a queue, keeps its body for forks, and all its keys expire.
            assert not is_there
            assert (redis.queue, redis.entry) not in snapshot.pending
            assert redis.has_body == request.counts_stored
            retention_s = request.retention_s or RETENTION_S
            for ttl in (redis.ttl, redis.log_ttl, *((redis.conversation_ttl,) if request.conversation else ())):
                assert retention_s - 60 < ttl <= retention_s
            self.settled[request_id] = len(redis.log)
        else:
            assert is_there == (redis.state != "parked")
            assert not request.waits_in_line or redis.state == "queued"
            assert (redis.queue, redis.entry) in snapshot.pending or redis.state != "running"
            assert (redis.ttl, redis.has_body) == (-1, True)
            assert redis.conversation_ttl == (-1 if request.conversation else -2)
        assert redis.conversation == request.conversation
        assert redis.state == request.state
        assert (redis.queue, redis.entry, redis.gateway) == (request.queue, request.entry, request.gateway)
        assert (redis.is_cancelled, redis.outcome) == (request.is_cancelled, request.outcome)
        assert (redis.deaths, redis.all_deaths) == (request.deaths, request.all_deaths)


def check_group(found: FairSnapshot, group: Group) -> None:
    assert found.served == group.stored()
    assert found.waiting.keys() == group.waiting
    assert all(bound <= group.counters[name] for name, bound in found.waiting.items())
