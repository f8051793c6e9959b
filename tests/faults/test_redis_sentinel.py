"""A master, a replica, and Sentinels: the master dies, hangs, or is replaced on purpose."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from quire.shared.protocol.broker import Admission, Broker, QueueBounds, QueueReader, new_id
from quire.shared.redis import places
from quire.shared.redis.check import check_redis
from quire.shared.redis.clients import blocking_client, command_client, pubsub_client
from quire.shared.redis.connections import NotTheServer
from quire.shared.redis.url import BrokerUnavailable
from tests.support.faults.calls import FAST, assert_same, is_ready, longest_pause, start_streams, undisturbed
from tests.support.faults.stack import STEP_S, FaultStack
from tests.support.redis_fleet import SERVICE, Watched, closing, wait

BOUNDS = QueueBounds(10**6, 10**9)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    """A master, its replica and three Sentinels."""
    with closing(Watched(tmp_path)) as watched:
        yield watched.start()


async def test_clients_leave_a_master_that_has_become_a_replica(tmp_path: Path) -> None:
    with closing(Watched(tmp_path, sentinels=1)) as watched:
        watched.start()
        commands, blocking = command_client(watched.url, "lane"), blocking_client(watched.url, "lane")
        subscriber = pubsub_client(watched.url, "lane")
        pubsub = subscriber.pubsub()
        try:
            broker, reader = Broker(commands, "lane"), QueueReader(blocking, "lane", "w")
            await broker.create_groups()
            await reader.pending()
            await pubsub.subscribe("news")
            assert (await pubsub.get_message(timeout=60))["type"] == "subscribe"
            old = watched.master()
            # Clients follow the Sentinels: they stay at the old master until the Sentinels announce the new one.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(places, "RECHECK_S", 60.0)  # independent of the duration of the failover
                watched.swap()
                with pytest.raises(NotTheServer):
                    await broker.submit(new_id(), b"", Admission(gateway="g", cost=1, bounds=BOUNDS))
            await broker.submit(new_id(), b"", Admission(gateway="g", cost=1, bounds=BOUNDS))
            new = watched.master()
            assert new is not old
            # Other connections follow without an error.
            assert len(await reader.read(1, 2000)) == 1
            await pubsub.ping()
            assert (await pubsub.get_message(timeout=60))["type"] == "subscribe"
            new.client.publish("news", b"heard")
            found = [await pubsub.get_message(timeout=60) for _ in range(2)]
            assert b"heard" in [message["data"] for message in found if message]
            async with asyncio.timeout(60):  # the server notices the closed connection after a moment
                while subscribers(old.client):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            await pubsub.aclose()  # type: ignore[no-untyped-call]
            for client in (commands, blocking, subscriber):
                await client.aclose()


def subscribers(server: Redis) -> list[str]:
    """Return the names of the subscribers of this server, without Sentinels, which subscribe to every server."""
    names = [client["name"] for client in server.client_list(_type="pubsub")]
    return [name for name in names if not name.startswith("sentinel-")]


async def test_a_service_that_no_sentinel_knows(tmp_path: Path) -> None:
    with closing(Watched(tmp_path, sentinels=1)) as watched:
        watched.start()
        wrong = watched.url.replace(f"/{SERVICE}/", "/nothing/")
        with pytest.raises(BrokerUnavailable, match=r"knows no service 'nothing'.*--redis-url"):
            await check_redis(wrong)
        with pytest.raises(BrokerUnavailable, match=r"runs as sentinel.*redis\+sentinel://"):
            await check_redis(f"redis://127.0.0.1:{watched.sentinels[0].port}")


def serve(stack: FaultStack, step_s: float = STEP_S) -> str:
    """Start a gateway and two workers; return the gateway's URL."""
    workers = [stack.worker(name, *FAST, ready=False, TEST_STEP_S=str(step_s)) for name in ("a", "b")]
    _, url = stack.gateway()
    for worker in workers:
        worker.wait_for("ready: worker")
    return url


def assert_well(stack: FaultStack, watched: Watched, url: str, expected: dict[str, list[str]]) -> None:
    """Check at the new master that new requests get the usual answers and that every request is counted once."""
    wait(watched.master)
    stack.redis = watched.master().client
    stack.wait(lambda: is_ready(url))
    assert undisturbed(url) == expected
    stack.assert_invariants()
    assert set(stack.totals()) == {"accepted", "length"}


@pytest.mark.faults
def test_streams_go_on_when_the_master_is_killed(watched: Watched, long_model: Path, tmp_path: Path) -> None:
    stack = FaultStack(tmp_path, long_model, watched)
    try:
        url = serve(stack)
        expected = undisturbed(url)
        streams = start_streams(url)
        old = watched.master()
        old.kill()
        assert_same(streams, expected)
        assert longest_pause(streams) < 15
        assert watched.master() is not old
        assert_well(stack, watched, url, expected)
        # The old master returns without data and becomes a replica of the new master.
        old.start()
        wait(lambda: old.info("replication")["role"] == "slave")
        assert_well(stack, watched, url, expected)
    finally:
        stack.close()


@pytest.mark.faults
def test_streams_go_on_when_the_master_falls_silent_and_wakes_up_again(
    watched: Watched, long_model: Path, tmp_path: Path
) -> None:
    stack = FaultStack(tmp_path, long_model, watched)
    try:
        url = serve(stack)
        expected = undisturbed(url)
        streams = start_streams(url)
        old = watched.master()
        old.send(signal.SIGSTOP)
        try:
            assert_same(streams, expected)
        finally:
            old.send(signal.SIGCONT)
        wait(lambda: old.info("replication")["role"] == "slave")
        assert_well(stack, watched, url, expected)
    finally:
        stack.close()


@pytest.mark.faults
def test_streams_go_on_over_a_failover_on_purpose(watched: Watched, long_model: Path, tmp_path: Path) -> None:
    stack = FaultStack(tmp_path, long_model, watched)
    try:
        url = serve(stack, step_s=0.05)
        expected = undisturbed(url)
        streams = start_streams(url)
        old = watched.master()
        # Data that the replica has not received is lost, so a planned failover waits for the replica.
        accepted = old.info("replication")["master_repl_offset"]
        wait(lambda: old.info("replication")["slave0"]["offset"] >= accepted)
        watched.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)
        wait(lambda: watched.master() is not old)
        assert not all(stream.is_complete for stream in streams.values()), "they had ended before"
        assert_same(streams, expected)
        assert_well(stack, watched, url, expected)
    finally:
        stack.close()


@pytest.mark.faults
def test_what_the_replica_lacks_is_sent_again(watched: Watched, long_model: Path, tmp_path: Path) -> None:
    """Replication is asynchronous: here the replica lags when the master dies."""
    stack = FaultStack(tmp_path, long_model, watched)
    try:
        url = serve(stack)
        expected = undisturbed(url)
        streams = start_streams(url)
        watched.cut_replica()
        counts = {name: len(stream.pieces) for name, stream in streams.items()}
        for name, stream in streams.items():
            stream.wait_events(counts[name] + 15)
        watched.nodes[0].kill()
        assert_same(streams, expected)
        assert_well(stack, watched, url, expected)
        said = "".join(process.stderr for process in stack.processes)
        assert "sending the rest again" in said
    finally:
        stack.close()
