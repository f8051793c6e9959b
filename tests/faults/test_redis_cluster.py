"""A Redis Cluster: lanes on different nodes, moving slots, dying masters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.ops.cli.redis_commands import dead
from quire.ops.cli.settings import DeadSettings
from quire.shared.protocol.broker import Admission, Broker, QueueBounds, QueueReader, StepCommit, new_id
from quire.shared.protocol.messages import Delta, Outcome, StepItem, decode_items
from quire.shared.redis.check import check_redis
from quire.shared.redis.clients import blocking_client, command_client, pubsub_client
from quire.shared.redis.connections import NotTheServer
from quire.shared.redis.url import BrokerUnavailable
from tests.support.faults.calls import FAST, assert_same, body, is_ready, longest_pause, start_streams, undisturbed
from tests.support.faults.stack import MODEL, FaultStack, Stream
from tests.support.redis_fleet import Cluster, closing, slot_of, wait

BOUNDS = QueueBounds(10**6, 10**9)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three masters without replicas."""
    with closing(Cluster(tmp_path_factory.mktemp("cluster"))) as cluster:
        yield cluster.start()


class Lane:
    """Both sides of a lane: the connections of a gateway and of a worker."""

    def __init__(self, url: str, lane: str) -> None:
        self.lane = lane
        self.commands = command_client(url, lane)
        self.blocking = blocking_client(url, lane)
        self.subscriber = pubsub_client(url, lane)
        self.broker = Broker(self.commands, lane)
        self.reader = QueueReader(self.blocking, lane, "w")
        self.pubsub = self.subscriber.pubsub()

    async def start(self) -> None:
        await self.pubsub.subscribe(self.broker.keys.channel("g"))
        assert (await self.message())["type"] == "subscribe"
        await self.broker.create_groups()
        await self.reader.pending()

    async def message(self) -> dict[str, Any]:
        found: dict[str, Any] | None = await self.pubsub.get_message(timeout=60)
        assert found is not None
        return found

    async def submit(self) -> str:
        return (await self.broker.submit(new_id(), b"body", Admission(gateway="g", cost=1, bounds=BOUNDS))).id

    async def serve(self) -> None:
        """Serve one request from its submission to its end, with every broker operation."""
        await self.broker.refresh_gateway("g")
        assert await self.broker.live_gateways(["g", "h"]) == {"g"}
        sent = await self.submit()
        (delivery,) = await self.reader.read(1, 2000)
        attempt = new_id()
        claim = await self.broker.claim(delivery, "w", attempt)
        assert claim is not None
        assert claim.request_id == sent
        item = StepItem(sent, 0, (Delta(0, (1, 2), None, None),), None)
        await self.broker.commit_step("w", [StepCommit(attempt, item)])
        assert list(decode_items((await self.message())["data"])) == [item]
        assert await self.broker.renew("w", [(sent, attempt)]) == []
        assert await self.broker.release([(sent, attempt)]) == 1
        (again,) = await self.reader.read(1, 2000)
        claim = await self.broker.claim(again, "w", attempt := new_id())
        assert claim is not None
        assert claim.emitted == 2
        end = StepItem(sent, 2, (), Outcome("stop", ""))
        await self.broker.commit_step("w", [StepCommit(attempt, end)])
        assert list(decode_items((await self.message())["data"])) == [end]
        assert await self.broker.read_output(sent) == [item, end]

    async def close(self) -> None:
        await self.pubsub.aclose()  # type: ignore[no-untyped-call]
        for client in (self.commands, self.blocking, self.subscriber):
            await client.aclose()


@asynccontextmanager
async def using(cluster: Cluster, name: str) -> AsyncIterator[Lane]:
    lane = Lane(cluster.url, name)
    try:
        await lane.start()
        yield lane
    finally:
        await lane.close()


async def test_each_lane_is_at_the_node_of_its_slot(cluster: Cluster) -> None:
    lanes = cluster.lanes()
    assert len({cluster.owner(name).port for name in lanes}) == 3
    for name in lanes:
        async with using(cluster, name) as lane:
            await lane.serve()
            others = [node for node in cluster.nodes if node is not cluster.owner(name)]
            keys = cluster.owner(name).client.keys("*")
            assert {key.decode().partition("}")[0] for key in keys} == {"quire:{" + name}
            assert not [key for node in others for key in node.client.keys(lane.broker.keys.prefix + "*")]
            assert lane.broker.keys.gateway_lease("g").encode() in keys


async def test_clients_follow_a_lane_whose_slot_has_moved(cluster: Cluster) -> None:
    name = cluster.lanes()[0] + "-moves"
    while cluster.owner(name) is not cluster.nodes[0]:
        name += "-"
    async with using(cluster, name) as lane:
        await lane.serve()
        waiting = await lane.submit()
        blocked = asyncio.create_task(lane.reader.read(1, 1000, ("batch",)))
        cluster.move(slot_of(name), cluster.nodes[0], cluster.nodes[1])
        # Each connection gets one MOVED reply, perhaps for a blocked read, so a worker re-reads after a failure.
        await asyncio.gather(blocked, return_exceptions=True)
        for _ in range(3):
            try:
                (delivery,) = await lane.reader.read(1, 0)
                break
            except NotTheServer:
                continue
        assert delivery.request_id == waiting
        await lane.broker.claim(delivery, "w", attempt := new_id())
        end = StepItem(waiting, 0, (), Outcome("stop", ""))
        await lane.broker.commit_step("w", [StepCommit(attempt, end)])
        # The old node forwards messages that are published at the new node.
        assert list(decode_items((await lane.message())["data"])) == [end]
        await lane.serve()


async def test_while_a_slot_moves_its_lane_takes_no_request_and_keeps_those_that_wait(cluster: Cluster) -> None:
    name = "half"
    source, target = cluster.owner(name), next(node for node in cluster.nodes if node is not cluster.owner(name))
    async with using(cluster, name) as lane:
        waiting = await lane.submit()
        with cluster.moving(slot_of(name), source, target), pytest.raises(NotTheServer):
            await lane.submit()
        assert (await lane.broker.read_totals())["accepted"] == 1
        (delivery,) = await lane.reader.read(1, 0)
        assert delivery.request_id == waiting
        await lane.broker.claim(delivery, "w", attempt := new_id())
        await lane.broker.commit_step("w", [StepCommit(attempt, StepItem(waiting, 0, (), Outcome("stop", "")))])
        await lane.message()
        await lane.serve()


async def test_dead_requests_of_all_nodes_are_listed(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    lanes = [name + "-dead" for name in cluster.lanes()]
    fields = {"id": "1", "class": "standard", "worker": "w", "emitted": 0, "body": b"", "metadata": b""}
    for name in lanes:
        async with using(cluster, name) as lane:
            await lane.commands.xadd(lane.broker.keys.dead, fields)  # type: ignore[arg-type]
    await asyncio.to_thread(dead, DeadSettings(redis_url=cluster.url), {})
    listed = capsys.readouterr().out
    assert all(name in listed for name in lanes)


async def test_the_wrong_form_of_a_url_names_the_right_one(cluster: Cluster, redis_url: str) -> None:
    node = cluster.nodes[0].port
    with pytest.raises(BrokerUnavailable, match=r"runs as cluster.*redis\+cluster://"):
        await check_redis(f"redis://127.0.0.1:{node}")
    with pytest.raises(BrokerUnavailable, match=r"no Redis at redis\+sentinel://"):
        await check_redis(f"redis+sentinel://127.0.0.1:{node}/s")
    assert (await check_redis(cluster.url, "any")).split()[0] in ("Redis", "Valkey")


@pytest.fixture
def replicated(tmp_path: Path) -> Iterator[Cluster]:
    """Three masters with a replica each."""
    with closing(Cluster(tmp_path, replicas=1)) as cluster:
        yield cluster.start()


def serve(stack: FaultStack, lane: str) -> str:
    """Start a gateway and two workers for a lane; return the gateway's URL."""
    named = ("--served-model-name", lane)
    workers = [stack.worker(f"{lane}-{name}", *FAST, *named, ready=False) for name in ("a", "b")]
    _, url = stack.gateway(*named)
    for worker in workers:
        worker.wait_for("ready: worker")
    return url


@pytest.mark.faults
def test_streams_go_on_when_the_lanes_master_dies_and_its_replica_takes_over(
    replicated: Cluster, long_model: Path, tmp_path: Path
) -> None:
    other = next(name for name in replicated.lanes() if replicated.owner(name) is not replicated.owner(MODEL))
    stack = FaultStack(tmp_path, long_model, replicated)
    try:
        url, url_of_other = serve(stack, MODEL), serve(stack, other)
        expected = undisturbed(url)
        streams = start_streams(url)
        beside = Stream(url_of_other, body("greedy") | {"model": other, "stream": True, "max_tokens": 400})
        beside.wait_events(10)
        master = replicated.owner(MODEL)
        master.kill()
        assert_same(streams, expected)
        beside.wait_end()
        assert beside.is_complete
        assert beside.longest_pause_s < 2, "the lane of another node has nothing to do with it"
        assert longest_pause(streams) < 15
        wait(lambda: replicated.owner(MODEL) is not master)
        stack.redis = replicated.client(MODEL)
        stack.wait(lambda: is_ready(url))
        assert undisturbed(url) == expected
        stack.assert_invariants()
        assert set(stack.totals()) == {"accepted", "length"}
        # The old master returns as a replica, and the stack is unaffected.
        master.start()
        wait(lambda: master.info("replication")["role"] == "slave")
        assert undisturbed(url) == expected
    finally:
        stack.close()


@pytest.mark.faults
def test_streams_go_on_when_a_node_without_replicas_is_restarted(
    cluster: Cluster, long_model: Path, tmp_path: Path
) -> None:
    stack = FaultStack(tmp_path, long_model, cluster)
    try:
        url = serve(stack, MODEL)
        expected = undisturbed(url)
        streams = start_streams(url)
        node = cluster.owner(MODEL)
        node.kill()
        node.start()
        assert_same(streams, expected)
        stack.wait(lambda: is_ready(url))
        assert undisturbed(url) == expected
        stack.assert_invariants()
        assert set(stack.totals()) == {"accepted", "length"}
    finally:
        stack.close()
