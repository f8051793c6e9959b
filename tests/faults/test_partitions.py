"""Partitions between machines: packets disappear without notice, and connections stay half-open on both sides."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import QuireProcess
from tests.support.faults.calls import FAST, REQUESTS, assert_same, body, owned, start_streams, undisturbed
from tests.support.faults.machines import Machine, Network, NetworkedRedis, half_open, sweep, why_not
from tests.support.faults.stack import FaultStack, Stream
from tests.support.faults.stalling import Stalling

REASON = why_not()
pytestmark = [pytest.mark.faults, pytest.mark.skipif(bool(REASON), reason=REASON or "-")]

WRITE_TIMEOUT_S = 1.0


class Room:
    """Machines `a` and `b` with a worker each, one with a gateway, and one for a client. Redis runs on the host.

    Redis has its own network; the host reaches the gateway over a second network, and the client over a cable.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        sweep()
        self.inner, self.outer = Network(), Network()
        self.machines = {name: Machine(name, self.inner) for name in ("a", "b")}
        self.machines["gateway"] = Machine("gateway", self.inner, self.outer)
        self.machines["client"] = self.client = Machine("client")
        self.stack = FaultStack(folder, model, redis_server=NetworkedRedis(folder, self.inner))
        door = self.machines["gateway"]
        self.workers = {
            name: self.stack.worker(name, *FAST, ready=False, via=self.machines[name]) for name in ("a", "b")
        }
        self.cable = self.client.cable_to(door)
        flags = ("--host", "0.0.0.0", "--allow-anonymous", "--write-timeout-s", str(WRITE_TIMEOUT_S))
        self.gateway, url = self.stack.gateway(*flags, via=door)
        port = url.rpartition(":")[2]
        self.url = f"http://{door.addresses[self.outer]}:{port}"
        self.clients_url = f"http://{self.cable.address}:{port}"
        for worker in self.workers.values():
            worker.wait_for("ready: worker")
        self.expected = undisturbed(self.url)

    def address(self, name: str) -> str:
        return self.machines[name].addresses[self.inner]

    def cut(self, name: str) -> None:
        self.machines[name].cut(self.inner)

    def heal(self, name: str) -> None:
        self.machines[name].heal(self.inner)

    def owner(self) -> str:
        """Return the name of the worker that owns most of the running requests."""
        return max(self.workers, key=lambda name: len(owned(self.stack, name)))

    def close(self) -> None:
        self.stack.close()
        for machine in self.machines.values():
            machine.close()
        self.inner.close()
        self.outer.close()


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> Iterator[Room]:
    room = Room(tmp_path_factory.mktemp("room"), long_model)
    try:
        yield room
    finally:
        room.close()


def fenced(worker: QuireProcess) -> int:
    return worker.stderr.count("is lost: it ended or is parked, or another worker has claimed it")


def test_a_worker_that_is_cut_off_is_replaced_stops_and_is_fenced_when_it_is_back(room: Room) -> None:
    streams = start_streams(room.url)
    name = room.owner()
    worker, before = room.workers[name], fenced(room.workers[name])
    failures = worker.stderr.count("failed")
    mine = len(owned(room.stack, name))
    connections = half_open(room.address(name))
    assert mine
    assert connections
    room.cut(name)
    try:
        room.stack.wait(lambda: not owned(room.stack, name), 20)
        # Redis has not noticed: the worker's connections still look established.
        assert half_open(room.address(name)) == connections
        assert_same(streams, room.expected)
        # The worker noticed the partition as well, and reports itself as not ready.
        room.stack.wait(lambda: worker.stderr.count("failed") > failures, 20)
        late = {each: Stream(room.url, body(each) | {"stream": True}) for each in REQUESTS}
        assert_same(late, room.expected)
    finally:
        room.heal(name)
    room.stack.wait(lambda: fenced(worker) >= before + mine, 20)
    assert worker.process.poll() is None
    room.stack.assert_invariants()
    # The worker serves again, also as the only one.
    (other,) = set(room.workers) - {name}
    room.cut(other)
    try:
        assert_same({"greedy": Stream(room.url, body("greedy") | {"stream": True})}, room.expected)
    finally:
        room.heal(other)
    room.stack.assert_invariants()


@pytest.mark.promise
def test_a_gateway_that_is_cut_off_repairs_its_streams_when_it_is_back(room: Room) -> None:
    streams = start_streams(room.url)
    connections = half_open(room.address("gateway"))
    repairs = room.gateway.stderr.count("subscribed again")
    assert connections >= 2  # commands, subscription
    room.cut("gateway")
    try:
        assert half_open(room.address("gateway")) == connections
        # The workers continue and finish.
        room.stack.wait(lambda: not any(owned(room.stack, name) for name in room.workers), 20)
        room.gateway.wait_for("the subscription is broken", 20)
        assert not any(stream.is_complete or stream.failure for stream in streams.values())
        refused = Stream(room.url, body("greedy")).wait_end()
        assert (refused.status, refused.answer["error"]["code"]) == (503, "broker_unavailable")
    finally:
        room.heal("gateway")
    assert_same(streams, room.expected)
    # The output log alone could complete the streams, so the subscription is checked separately.
    room.stack.wait(lambda: room.gateway.stderr.count("subscribed again") > repairs, 20)
    room.stack.assert_invariants()


def test_a_client_that_is_cut_off_blocks_nobody_and_its_request_is_cancelled(room: Room) -> None:
    cancelled = room.stack.totals().get("cancelled", 0)
    asks = body("greedy") | {"stream": True, "n": 2, "temperature": 1, "seed": 1, "max_tokens": 1900}
    with room.client.entered():
        stalled = Stalling(room.clients_url, asks)
    try:
        assert stalled.read(100)
        room.cable.cut()
        began = time.monotonic()
        streams = start_streams(room.url)
        assert_same(streams, room.expected)
        # Once the kernel's buffer is full, writes block. After a timeout the gateway drops connection and request.
        room.stack.wait(lambda: room.stack.totals().get("cancelled", 0) == cancelled + 1, 60)
        assert time.monotonic() - began > WRITE_TIMEOUT_S
    finally:
        room.cable.heal()
        stalled.close()
    room.stack.assert_invariants()


def test_a_client_that_is_cut_off_for_less_than_its_time_gets_everything(room: Room) -> None:
    with room.client.entered():
        stalled = Stalling(room.clients_url, body("greedy") | {"stream": True})
    try:
        assert stalled.read(100)
        room.cable.cut()
        room.stack.wait(lambda: room.stack.is_drained(), 20)
        room.cable.heal()
        while stalled.read(65536):
            pass
        assert stalled.events()[-1] == "[DONE]"
        assert stalled.text() == room.expected["greedy"][0]
    finally:
        room.cable.heal()
        stalled.close()
    room.stack.assert_invariants()
