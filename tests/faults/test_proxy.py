"""Each control of the proxy has its documented effect."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from quire.ops.local.embedded_redis import EmbeddedRedis
from tests.support.faults.proxy import Proxy


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    server = EmbeddedRedis(tmp_path)
    server.start()
    proxy = Proxy(server.url)
    try:
        yield proxy
    finally:
        proxy.close()
        server.stop()


def connect(proxy: Proxy, timeout_s: float = 5) -> Redis:
    return Redis.from_url(proxy.url, socket_timeout=timeout_s, retry=Retry(NoBackoff(), 0), protocol=2)


def test_it_passes_on_slices_delays_and_cuts(proxy: Proxy) -> None:
    with connect(proxy) as client:
        proxy.slice_bytes = 3
        client.set("key", b"\r\n*1\r\n" * 1000)
        assert client.get("key") == b"\r\n*1\r\n" * 1000
        proxy.heal()
        proxy.delay_s = 0.1
        began = time.monotonic()
        client.ping()
        assert time.monotonic() - began >= 0.2
        proxy.heal()
        before = client.client_id()
        proxy.cut()
        assert client.client_id() != before  # a new connection
        proxy.cut()
        proxy.refuse()
        for _ in range(2):
            with pytest.raises(RedisConnectionError):
                client.ping()
        proxy.admit()
        client.ping()


def test_what_a_black_hole_held_back_arrives_late(proxy: Proxy) -> None:
    with connect(proxy, 0.2) as client, connect(proxy) as other:
        client.ping()
        proxy.black_hole(to_client=False)
        with pytest.raises(RedisTimeoutError):
            client.incr("count")
        proxy.heal()
        while other.get("count") != b"1":
            time.sleep(0.01)
        client.ping()  # connected again
        proxy.black_hole(to_server=False)
        with pytest.raises(RedisTimeoutError):
            client.incr("count")
        proxy.heal()
        assert other.get("count") == b"2"


def test_messages_and_replies_are_lost_one_by_one(proxy: Proxy) -> None:
    with connect(proxy) as client, client.pubsub() as pubsub:
        pubsub.subscribe("channel")
        proxy.drop_message = lambda payload: payload == b"b"
        proxy.lose_reply = lambda command: command[0] == b"INCRBY"
        for text in "abc":
            client.publish("channel", text)
        found = [pubsub.get_message(timeout=60) for _ in range(3)]
        assert [message["data"] for message in found] == [1, b"a", b"c"]
        assert proxy.dropped == 1
        with pytest.raises(RedisConnectionError):
            client.incr("count")
        assert proxy.lost == 1
        proxy.heal()
        assert client.get("count") == b"1"
