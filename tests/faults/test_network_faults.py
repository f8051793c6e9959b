"""Messages, replies and whole networks that get lost between Redis and a gateway or a worker."""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.shared.protocol.broker.scripts import script_source
from quire.shared.protocol.messages import decode_items
from tests.conftest import QuireProcess
from tests.support.faults.calls import (
    FAST,
    REQUESTS,
    assert_same,
    body,
    longest_pause,
    owned,
    owner,
    start_streams,
    undisturbed,
)
from tests.support.faults.proxy import Proxy
from tests.support.faults.stack import FaultStack, Stream

pytestmark = pytest.mark.slow

# Limit of the delay that a lost message causes, and the extra allowance for one of several on a busy machine.
REPAIR_S = 0.5
BUSY_S = 0.75
# Wrong wall clocks have no effect: Quire uses Redis' clock and monotonic clocks.
SKEW_S = 3600
# The hashes by which scripts are called.
SUBMIT, CLAIM, COMMIT = (
    hashlib.sha1(script_source(name).encode()).hexdigest().encode() for name in ("submit", "claim", "commit_step")
)


class Net:
    """A gateway and two workers, each with its own proxy to Redis. One worker's clock is fast, the gateway's slow."""

    def __init__(self, stack: FaultStack) -> None:
        self.stack = stack
        self.proxies = {name: stack.proxy() for name in ("gateway", "a", "b")}
        gateway, self.url = stack.gateway(via=self.proxies["gateway"], TEST_CLOCK_S=str(-SKEW_S))
        self.workers = {
            name: stack.worker(name, *FAST, ready=False, via=self.proxies[name], TEST_CLOCK_S=clock)
            for name, clock in (("a", "0"), ("b", str(SKEW_S)))
        }
        for worker in self.workers.values():
            worker.wait_for("ready: worker")
        self.processes: dict[str, QuireProcess] = {"gateway": gateway, **self.workers}
        self.expected = undisturbed(self.url)

    def gateway_proxy(self) -> Proxy:
        return self.proxies["gateway"]

    def heal(self) -> None:
        for proxy in self.proxies.values():
            proxy.heal()

    def assert_well(self) -> None:
        """Check that no process died and that the stack works as before."""
        self.heal()
        assert [name for name, process in self.processes.items() if process.process.poll() is not None] == []
        self.stack.assert_invariants()
        assert set(self.stack.totals()) <= {"accepted", "length", "deadline"}


@pytest.fixture(scope="module")
def module_net(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> Iterator[Net]:
    stack = FaultStack(tmp_path_factory.mktemp("net"), long_model)
    try:
        yield Net(stack)
    finally:
        stack.close()


@pytest.fixture
def net(module_net: Net) -> Iterator[Net]:
    yield module_net
    module_net.heal()


def first(commands: Callable[[list[bytes]], bool], count: int = 1) -> Callable[[list[bytes]], bool]:
    """Return a predicate that is true for the `count`-th matching command only."""
    seen = 0

    def fits(command: list[bytes]) -> bool:
        nonlocal seen
        seen += commands(command)
        return commands(command) and seen == count

    return fits


def is_submit(command: list[bytes]) -> bool:
    return command[:2] == [b"EVALSHA", SUBMIT]


def is_claim(command: list[bytes]) -> bool:
    return command[:2] == [b"EVALSHA", CLAIM]


def is_commit(command: list[bytes]) -> bool:
    """Return True for a commit with items. Items are the last argument before the notices; none are an empty array."""
    return command[:2] == [b"EVALSHA", COMMIT] and command[6] != b"\x90"


def is_read(command: list[bytes]) -> bool:
    return command[0] == b"XREADGROUP" or (command[0] == b"EVALSHA" and command[3].endswith(b":queue:handed"))


def test_a_submission_whose_reply_is_lost_makes_one_request(net: Net) -> None:
    before = net.stack.totals()["accepted"]
    net.gateway_proxy().lose_reply = first(is_submit)
    stream = Stream(net.url, body("greedy") | {"stream": True})
    assert_same({"greedy": stream}, net.expected)
    assert net.gateway_proxy().lost == 1
    assert net.stack.totals()["accepted"] == before + 1
    net.assert_well()


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(is_claim, marks=pytest.mark.faults),
        pytest.param(is_commit),
        pytest.param(is_read, marks=pytest.mark.faults),
    ],
)
def test_what_a_worker_did_without_hearing_of_it_is_done_once(net: Net, command: Callable[[list[bytes]], bool]) -> None:
    before = [net.proxies[name].lost for name in net.workers]
    for name in net.workers:
        net.proxies[name].lose_reply = first(command, 3 if command is is_commit else 1)
    streams = {name: Stream(net.url, body(name) | {"stream": True}) for name in REQUESTS}
    assert_same(streams, net.expected)
    assert [net.proxies[name].lost for name in net.workers] != before
    net.assert_well()


def assert_repaired_in_time(streams: dict[str, Stream]) -> None:
    assert statistics.median(stream.longest_pause_s for stream in streams.values()) < REPAIR_S
    assert longest_pause(streams) < REPAIR_S + BUSY_S


@pytest.mark.alone
def test_dropped_messages_are_repaired_from_the_log(net: Net) -> None:
    draw = random.Random(5)
    proxy = net.gateway_proxy()
    proxy.drop_message = lambda payload: draw.random() < 0.05
    streams = start_streams(net.url)
    assert_same(streams, net.expected)
    assert proxy.dropped > 0
    assert_repaired_in_time(streams)
    net.assert_well()


def has_an_end(payload: bytes) -> bool:
    return any(item.outcome is not None for item in decode_items(payload))


@pytest.mark.faults
@pytest.mark.alone
def test_the_last_message_of_a_stream_is_repaired_too(net: Net) -> None:
    proxy = net.gateway_proxy()
    dropped = proxy.dropped
    proxy.drop_message = has_an_end
    streams = start_streams(net.url)
    assert_same(streams, net.expected)
    assert proxy.dropped > dropped
    assert_repaired_in_time(streams)
    net.assert_well()


@pytest.mark.faults
@pytest.mark.alone
def test_99_of_100_lost_ends_are_repaired_within_half_a_second(net: Net) -> None:
    net.gateway_proxy().drop_message = has_an_end
    call = {"model": "tiny", "max_tokens": 20, "ignore_eos": True, "stream": True, "temperature": 0}
    pauses = []
    for wave in range(10):
        streams = [Stream(net.url, call | {"prompt": f"w{wave} w{number}"}) for number in range(10)]
        assert all(stream.wait_end().is_complete for stream in streams)
        pauses += [stream.longest_pause_s for stream in streams]
    assert sorted(pauses)[98] < REPAIR_S
    net.assert_well()


def test_a_subscription_that_is_killed_again_and_again_loses_nothing(net: Net) -> None:
    gateway = net.processes["gateway"]
    streams = start_streams(net.url)
    again = gateway.stderr.count("subscribed again")
    for kill in range(1, 7):
        net.stack.redis.client_kill_filter(_type="pubsub")
        net.stack.wait(lambda kill=kill: gateway.stderr.count("subscribed again") >= again + kill)
    assert_same(streams, net.expected)
    net.assert_well()


@pytest.mark.faults
def test_connections_that_are_cut_again_and_again_lose_nothing(net: Net) -> None:
    streams = start_streams(net.url)
    for _ in range(8):
        for proxy in net.proxies.values():
            proxy.cut()
            time.sleep(0.1)
    assert_same(streams, net.expected)
    net.assert_well()


@pytest.mark.faults
@pytest.mark.promise
def test_redis_that_cannot_be_reached_for_a_while_costs_a_pause(net: Net) -> None:
    streams = start_streams(net.url)
    for proxy in net.proxies.values():
        proxy.refuse()
        proxy.cut()
    refused = Stream(net.url, body("greedy")).wait_end()
    assert refused.status == 503
    assert int(refused.response_headers["retry-after"]) > 0
    time.sleep(2)
    net.heal()
    assert_same(streams, net.expected)
    net.assert_well()


@pytest.mark.faults
def test_a_slow_network_that_cuts_everything_into_slices_changes_nothing(net: Net) -> None:
    for proxy in net.proxies.values():
        proxy.slice_bytes = 7
        proxy.delay_s = 0.05
    assert_same(start_streams(net.url), net.expected)
    net.assert_well()


@pytest.mark.faults
@pytest.mark.parametrize("to_server", [True, False])
def test_a_gateway_behind_a_partition_catches_up(net: Net, to_server: bool) -> None:
    """The partition lasts longer than the gateway trusts a silent subscription."""
    streams = start_streams(net.url)
    net.gateway_proxy().black_hole(to_server=to_server, to_client=True)
    time.sleep(5)
    assert not any(stream.is_complete for stream in streams.values())
    net.heal()
    assert_same(streams, net.expected)
    net.assert_well()


def partition(net: Net, *, to_server: bool) -> None:
    """Partition the owner of running requests for longer than its lease, while new requests are in flight to it."""
    streams = start_streams(net.url)
    name = next(name for name, worker in net.workers.items() if worker is owner(net.stack, net.workers))
    fenced = net.workers[name].stderr.count("is lost: it ended")
    mine = len(owned(net.stack, name))
    assert mine
    net.proxies[name].black_hole(to_server=to_server, to_client=True)
    late = {each: Stream(net.url, body(each) | {"stream": True}) for each in REQUESTS}
    net.stack.wait(lambda: not owned(net.stack, name), 20)
    net.proxies[name].heal()
    assert_same(streams, net.expected)
    assert_same(late, net.expected)
    net.stack.wait(lambda: net.workers[name].stderr.count("is lost: it ended") > fenced, 20)
    net.assert_well()
    # The worker works again, also as the only one.
    (other,) = set(net.workers) - {name}
    net.proxies[other].black_hole()
    stream = Stream(net.url, body("greedy") | {"stream": True})
    assert_same({"greedy": stream}, net.expected)
    net.assert_well()


@pytest.mark.faults
@pytest.mark.promise
def test_a_worker_behind_a_partition_is_replaced_and_fenced_when_it_returns(net: Net) -> None:
    partition(net, to_server=True)


@pytest.mark.faults
def test_a_worker_that_is_heard_but_does_not_hear_is_replaced_and_fenced(net: Net) -> None:
    partition(net, to_server=False)


@pytest.mark.faults
@pytest.mark.promise
def test_wrong_clocks_change_neither_deadlines_nor_leases(net: Net) -> None:
    answer = Stream(net.url, body("greedy") | {"timeout": 30}).wait_end().answer
    assert answer["created"] < time.time() - SKEW_S / 2  # its clock really is wrong
    assert answer["choices"][0]["text"] == net.expected["greedy"][0]
    late = [Stream(net.url, body("greedy") | {"timeout": 0.5, "max_tokens": 1500}) for _ in range(4)]
    for stream in late:  # a deadline by the wrong clock would be an hour later, and no test waits for it
        assert stream.wait_end().status == 504
        assert stream.answer["error"]["code"] == "deadline_exceeded"
    net.assert_well()
