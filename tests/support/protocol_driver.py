"""Drives the real Broker synchronously: its client answers immediately, so that a coroutine ends without an event loop.

Also injects bugs into scripts, reads the state of a lane in one round trip, and records all published frames.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import hiredis
import msgpack
import redis
from redis.exceptions import NoScriptError

from quire.shared.protocol.broker import Broker, QueueReader
from quire.shared.protocol.broker.scripts import script_source
from quire.shared.protocol.keys import GROUP, PRIORITY_CLASSES, QUEUES, WAITING_QUEUES, LaneKeys
from tests.support.fair_model import Share
from tests.support.redis_server import RedisServer

LANE = "lane"
KEYS = LaneKeys(LANE)

# The shares of requests.
SHARES = (
    Share(),
    Share("acme/web"),
    Share("acme/web", "aa"),
    Share("acme/web", "bb"),
    Share("acme/batch", weight=300),
    Share("zoo/app", "aa", 7),
)
TENANTS = tuple(dict.fromkeys(share.tenant for share in SHARES))
USERS = tuple(dict.fromkeys(share.user for share in SHARES))
# Ids of API keys; empty for calls without one.
API_KEYS = ("", "a", "b")

# Names of the scripts, by the hash of what Redis runs.
SCRIPTS = {
    hashlib.sha1(script_source(path.name[:-4]).encode()).hexdigest(): path.name[:-4]
    for path in (files("quire.shared.protocol") / "scripts").iterdir()
    if path.name.endswith(".lua") and not path.name.startswith("_")
}

# A bug: pairs of a text in the scripts and its replacement.
Patch = tuple[tuple[str, str], ...]


def finished(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the coroutine waits")


class InstantClient:
    """The interface of redis-py's asyncio client over a synchronous client."""

    def __init__(self, client: redis.Redis, patch: Patch = ()) -> None:
        self.latest_script = ""
        self._client = client
        self._patch = patch
        # Hashes of the patched scripts, by those of the real ones.
        self._patched: dict[str, str] = {}
        sources = [path.read_text() for path in (files("quire.shared.protocol") / "scripts").iterdir()]
        if missing := [old for old, _ in patch if not any(old in source for source in sources)]:
            raise ValueError(f"no script has the text that the patch is for: {missing}")

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)

        async def instant(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        return instant

    async def execute_command(self, name: str, script: str, *args: Any) -> Any:
        """Run a script, patched."""
        if name == "EVALSHA":
            self.latest_script = SCRIPTS[script]
        if self._patch and name == "EVALSHA":
            if script not in self._patched:
                raise NoScriptError
            script = self._patched[script]
        elif self._patch:
            original = hashlib.sha1(script.encode()).hexdigest()
            for old, new in self._patch:
                script = script.replace(old, new)
            self._patched[original] = hashlib.sha1(script.encode()).hexdigest()
        return self._client.execute_command(name, script, *args)

    def pipeline(self, transaction: bool) -> Any:
        pipe = self._client.pipeline(transaction=transaction)
        execute = pipe.execute

        async def instant() -> Any:
            return execute()

        pipe.execute = instant  # type: ignore[method-assign, assignment]
        return pipe


class Connection:
    """A connection for the two calls after each step, several times as fast as one of redis-py."""

    def __init__(self, server: RedisServer) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(10)
        self._socket.connect(str(server.socket))
        self._reader = hiredis.Reader()

    def send(self, *words: str | int) -> None:
        self._socket.sendall(hiredis.pack_command(words))

    def receive(self) -> Any:
        while (reply := self._reader.gets()) is False:
            data = self._socket.recv(65536)
            assert data, "Redis has closed the connection"
            self._reader.feed(data)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def close(self) -> None:
        self._socket.close()


# Per request {hash, TTL, log, TTL of the log, conversation, TTL of the conversation}, from the `ARGV[2]`th request on
# {state, length of the log}. Then load, totals, recoveries, dead entries, for each queue its entries and its
# pending entries, and the lines: see `FairSnapshot`. Then the bytes that are held, the bytes by API key, and the parked
# requests, those of each API key and all.
SNAPSHOT = """
local prefix, full = ARGV[1], tonumber(ARGV[2])
local requests, settled = {}, {}
for i = full + 3, #ARGV do
    settled[i - full - 2] = {redis.call('HGET', prefix .. 'req:' .. ARGV[i], 'state'),
        redis.call('XLEN', prefix .. 'out:' .. ARGV[i])}
end
for i = 3, full + 2 do
    local req, out = prefix .. 'req:' .. ARGV[i], prefix .. 'out:' .. ARGV[i]
    local log = redis.call('XRANGE', out, '-', '+')
    local fields = redis.call('HMGET', req, 'state', 'queue', 'entry', 'class', 'cost', 'gateway',
        'emitted', 'outcome', 'cancel', 'deaths', 'all_deaths', 'body')
    local conversation = prefix .. 'conversation:' .. ARGV[i]
    requests[i - 2] = {fields, redis.call('TTL', req), log, redis.call('TTL', out), redis.call('GET', conversation),
        redis.call('TTL', conversation)}
end
local queues = {}
for i, name in ipairs({'handed', 'interactive', 'standard', 'batch'}) do
    local key = prefix .. 'queue:' .. name
    queues[i] = {redis.call('XRANGE', key, '-', '+'), redis.call('XPENDING', key, 'workers', '-', '+', 1000)}
end
local fair = {}
for i, class in ipairs({'interactive', 'standard', 'batch'}) do
    queues[4 + i] = {redis.call('XRANGE', prefix .. 'queue:waiting:' .. class, '-', '+'), {}}
    fair[i] = {redis.call('HGETALL', prefix .. 'served:' .. class),
        redis.call('ZRANGE', prefix .. 'tenants:' .. class, 0, -1, 'WITHSCORES'), {}}
    for j, tenant in ipairs(TENANTS) do
        local place, lines = class .. ':' .. tenant, {}
        for k, user in ipairs(USERS) do
            lines[k] = redis.call('ZRANGE', prefix .. 'line:' .. place .. ':' .. user, 0, -1)
        end
        fair[i][3][j] = {redis.call('HGETALL', prefix .. 'served:' .. place),
            redis.call('ZRANGE', prefix .. 'users:' .. place, 0, -1, 'WITHSCORES'), lines}
    end
end
local parked = {}
for i, key in ipairs(PARKED_OF) do
    parked[i] = redis.call('SMEMBERS', key)
end
parked[#parked + 1] = redis.call('ZRANGE', PARKED, 0, -1)
return cmsgpack.pack({requests, settled, redis.call('HGETALL', prefix .. 'load'),
    redis.call('HGETALL', prefix .. 'totals'), redis.call('HGETALL', prefix .. 'recoveries'),
    redis.call('XLEN', prefix .. 'dead'), queues, fair, redis.call('HGETALL', prefix .. 'waiting'),
    redis.call('XLEN', prefix .. 'wake'), redis.call('HGETALL', HELD),
    redis.call('ZRANGE', HOLDERS, 0, -1, 'WITHSCORES'), parked})
"""
SNAPSHOT = f"""
local TENANTS, USERS = {{'{"', '".join(TENANTS)}'}}, {{'{"', '".join(USERS)}'}}
local HELD, HOLDERS, PARKED = '{KEYS.held}', '{KEYS.holders}', '{KEYS.parked}'
local PARKED_OF = {{'{"', '".join(map(KEYS.parked_of, API_KEYS))}'}}
{SNAPSHOT}"""
assert QUEUES == ("handed", "interactive", "standard", "batch")


# Returns the key, the value and the time to live of every key.
SAVE = """
local saved = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
    saved[#saved + 1] = key
    saved[#saved + 1] = redis.call('DUMP', key)
    saved[#saved + 1] = redis.call('PTTL', key)
end
return saved
"""
Saved = list[tuple[bytes, bytes, int]]


class Snapshot:
    """The state of a lane in Redis at one moment."""

    def __init__(self, data: bytes, ids: list[str], settled_ids: list[str]) -> None:
        parts = msgpack.unpackb(data, raw=True, strict_map_key=False)
        requests, settled, load, totals, recoveries, self.dead, queues, fair, waiting, self.wakes = parts[:10]
        held, holders, (*parked_of, parked) = parts[10:]
        self.held = {name.decode(): value.decode() for name, value in zip(held[::2], held[1::2], strict=True)}
        self.holders = _numbers(holders)
        self.parked = {name.decode() for name in parked}
        self.parked_of = {
            key: {name.decode() for name in names} for key, names in zip(API_KEYS, parked_of, strict=True)
        }
        self.waiting = _numbers(waiting)
        self.fair = {name: FairSnapshot.of(*one) for name, one in zip(PRIORITY_CLASSES, fair, strict=True)}
        self.requests = {
            request_id: RequestSnapshot.of(*request) for request_id, request in zip(ids, requests, strict=True)
        }
        self.settled = {
            request_id: (state.decode(), length)
            for request_id, (state, length) in zip(settled_ids, settled, strict=True)
        }
        self.load = {name.decode(): int(count) for name, count in zip(load[::2], load[1::2], strict=True)}
        self.totals = {name.decode(): int(count) for name, count in zip(totals[::2], totals[1::2], strict=True)}
        counts = zip(recoveries[::2], recoveries[1::2], strict=True)
        self.recoveries = {name.decode(): int(count) for name, count in counts}
        self.streams: dict[str, dict[str, str]] = {}
        self.pending: dict[tuple[str, str], tuple[str, int]] = {}  # (queue, entry) to consumer and idle time
        for name, (entries, pending) in zip((*QUEUES, *WAITING_QUEUES), queues, strict=True):
            self.streams[name] = {entry.decode(): fields[1].decode() for entry, fields in entries}
            for entry, consumer, idle, _ in pending:
                self.pending[name, entry.decode()] = (consumer.decode(), idle)


@dataclass(slots=True)
class FairSnapshot:
    """Counters, who waits with which lower bound, and the lines, of the tenants of a class or of a tenant's users."""

    served: dict[str, int]
    waiting: dict[str, int]
    users: dict[str, FairSnapshot]
    lines: dict[str, list[str]]

    @classmethod
    def of(cls, served: list[bytes], waiting: list[bytes], tenants: list[Any]) -> FairSnapshot:
        users = {
            tenant: cls(
                _numbers(counters),
                _numbers(bounds),
                {},
                {user: [entry.decode() for entry in line] for user, line in zip(USERS, lines, strict=True)},
            )
            for tenant, (counters, bounds, lines) in zip(TENANTS, tenants, strict=True)
        }
        return cls(_numbers(served), _numbers(waiting), users, {})


def _numbers(values: list[bytes]) -> dict[str, int]:
    return {name.decode(): int(number) for name, number in zip(values[::2], values[1::2], strict=True)}


@dataclass(slots=True)
class RequestSnapshot:
    state: str
    queue: str
    entry: str
    priority_class: str
    cost: int
    gateway: str
    emitted: int
    outcome: str
    is_cancelled: bool
    deaths: int
    all_deaths: int
    has_body: bool
    ttl: int
    log: list[tuple[str, bytes]]
    log_ttl: int
    conversation: bytes
    conversation_ttl: int

    @classmethod
    def of(
        cls,
        fields: list[Any],
        ttl: int,
        log: list[Any],
        log_ttl: int,
        conversation: bytes | bool,
        conversation_ttl: int,
    ) -> RequestSnapshot:
        state, queue, entry, priority_class, cost, gateway, emitted, outcome, cancel, deaths, all_deaths, body = fields
        return cls(
            _text(state),
            _text(queue),
            _text(entry),
            _text(priority_class),
            int(cost),
            _text(gateway),
            int(emitted),
            _text(outcome),
            bool(cancel),
            int(deaths or 0),
            int(all_deaths or 0),
            bool(body),
            ttl,
            [(entry_id.decode(), item) for entry_id, (_, item) in log],
            log_ttl,
            conversation or b"",
            conversation_ttl,
        )


def _text(value: bytes | bool) -> str:
    return value.decode() if isinstance(value, bytes) else ""


class Lane:
    """An empty lane on a real Redis: the broker under test, and the connections that inspect its state."""

    def __init__(self, server: RedisServer, gateways: Iterable[str], patch: Patch = ()) -> None:
        self.client = redis.Redis(unix_socket_path=str(server.socket), protocol=2)
        self.client.flushall()
        self._instant: Any = InstantClient(self.client, patch)
        self.broker = Broker(self._instant, LANE)
        self._subscription = Connection(server)
        for channel in map(KEYS.channel, gateways):
            self._subscription.send("SUBSCRIBE", channel)
            assert self._subscription.receive()[0] == b"subscribe"
        self._watch = Connection(server)
        self._watch.send("SCRIPT", "LOAD", SNAPSHOT)
        self._snapshot_script = self._watch.receive().decode()
        finished(self.broker.create_groups())

    @property
    def latest_script(self) -> str:
        """The name of the script that ran last."""
        latest: str = self._instant.latest_script
        return latest

    def reader(self, worker_id: str) -> QueueReader:
        return QueueReader(self._instant, LANE, worker_id)

    def look(self, ids: list[str], settled_ids: list[str]) -> tuple[Snapshot, list[tuple[str, bytes]]]:
        """Return a snapshot of the lane, and the (channel, frame) pairs published since the last call.

        For `settled_ids` the snapshot has only the states and the lengths of the logs.
        """
        # Redis sends the answer to a PING after all frames published before it.
        self._subscription.send("PING", "")
        self._watch.send("EVALSHA", self._snapshot_script, 0, KEYS.prefix, len(ids), *ids, *settled_ids)
        snapshot = Snapshot(self._watch.receive(), ids, settled_ids)
        frames = []
        while (reply := self._subscription.receive())[0] != b"pong":
            frames.append((reply[1].decode(), reply[2]))
        return snapshot, frames

    def age(self, worker_id: str, queue: str, entry: str, idle_ms: int) -> None:
        """Make a pending entry look as if its worker had last renewed it that long ago."""
        self.client.xclaim(KEYS.queue(queue), GROUP, worker_id, 0, [entry], idle=idle_ms, justid=True)

    def cut_log(self, request_id: str, kept: list[tuple[str, bytes]], emitted: int) -> None:
        """Cut the log and the state of a request, as after a restart of Redis with older data."""
        pipe = self.client.pipeline(transaction=True)
        pipe.delete(KEYS.output(request_id))
        for entry, item in kept:
            pipe.xadd(KEYS.output(request_id), {"item": item}, id=entry)
        pipe.hset(KEYS.request(request_id), "emitted", emitted)
        pipe.execute()

    def save(self) -> Saved:
        """Return the whole contents of Redis."""
        parts: Any = self.client.eval(SAVE, 0)
        return [tuple(parts[index : index + 3]) for index in range(0, len(parts), 3)]

    def restore(self, saved: Saved) -> None:
        pipe = self.client.pipeline(transaction=True)
        pipe.flushdb()
        for key, value, ttl_ms in saved:
            pipe.restore(key, max(0, ttl_ms), value)
        pipe.execute()

    def close(self) -> None:
        self._subscription.close()
        self._watch.close()
        self.client.close()
