"""`quire top`: what it shows and does in a real terminal, and what it costs Redis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from redis import Redis

from quire.ops.watch.observer import OLDEST, Observer
from quire.shared.protocol.broker import Admission, Broker, QueueBounds, new_id
from quire.shared.protocol.keys import REGISTRY_LANE, LaneKeys, RegistryKeys
from quire.shared.protocol.messages import WorkerCard
from quire.shared.redis.clients import command_client
from quire.worker.queue.leases import home, pid_here
from tests.conftest import StartQuire
from tests.support.broker_calls import step, take
from tests.support.commands import quire, refusal
from tests.support.terminal import terminal

TERMS = Admission(gateway="g", cost=30, prompt_tokens=10, bounds=QueueBounds(10**6, 10**9))
KEYS = LaneKeys("lane")
CARD = WorkerCard("w", "w", "lane", 100, 8, 100, (), 16, 10, 5, 1, 0, 0)


@pytest.fixture
async def broker(redis_url: str) -> AsyncIterator[Broker]:
    client = command_client(redis_url, "lane")
    broker = Broker(client, "lane")
    await broker.create_groups()
    await broker.beat(CARD, home=home())
    registry = command_client(redis_url, REGISTRY_LANE)
    await registry.zadd(RegistryKeys().models, {"lane": 1})
    await registry.aclose()
    yield broker
    await client.aclose()


async def running(broker: Broker, tokens: int) -> str:
    """Start a request that has emitted so many tokens. Return its id."""
    request_id = new_id()
    await broker.submit(request_id, b"body", TERMS)
    claim = await broker.claim(await take(broker), "w", new_id())
    assert claim is not None
    if tokens:
        await broker.commit_step("w", [step(claim, 0, tuple(range(tokens)))])
    return request_id


async def test_a_look_shows_workers_and_requests_and_the_slowest_first(broker: Broker) -> None:
    observer = Observer([broker])
    started = [await running(broker, tokens) for tokens in (9, 0, 3)]
    waiting = new_id()
    await broker.submit(waiting, b"body", TERMS)
    await observer.look()
    keys = broker.keys
    for request_id, tokens in zip(started, (10, 0, 30), strict=True):
        await broker.client.hset(keys.request(request_id), "emitted", tokens)
    look = await observer.look()
    assert {row.id for row in look.requests[:2]} == {started[1], waiting}, "those without a token"
    assert [row.id for row in look.requests[2:]] == [started[0], started[2]]
    assert [row.tokens for row in look.requests[2:]] == [10, 30]
    [lane], [worker] = look.lanes, look.workers
    assert (lane.running, sum(lane.waiting.values()), lane.accepted) == (3, 1, 4)
    assert (worker.id, worker.rows, worker.blocks) == ("w", 8, 0.5)
    assert worker.rate == pytest.approx(lane.rate)
    assert lane.rate == pytest.approx(sum(row.rate for row in look.requests))
    assert lane.rate > 28
    await broker.cancel(waiting)
    assert (await observer.look()).lanes[0].failed == {"cancelled": 1}


async def test_a_look_costs_no_more_with_many_requests_and_never_scans(broker: Broker, redis_url: str) -> None:
    observer = Observer([broker])

    async def cost() -> dict[str, int]:
        with Redis.from_url(redis_url) as client:
            client.config_resetstat()
            await observer.look()
            stats = client.info("commandstats")
        return {name: entry["calls"] for name, entry in stats.items()}

    for _ in range(3 * OLDEST):
        await broker.submit(new_id(), b"body", TERMS)
    await observer.look()  # makes the connections
    few = await cost()
    for _ in range(1000):
        await broker.submit(new_id(), b"body", TERMS)
    many = await cost()
    assert many == few
    assert not {"cmdstat_scan", "cmdstat_keys"} & set(many)
    assert sum(many.values()) < 120


def test_a_process_is_found_only_on_its_own_machine() -> None:
    assert pid_here(home()) is not None
    assert pid_here(home().replace("pid:", "other:")) is None
    assert pid_here("") is None


@pytest.mark.slow
async def test_a_terminal_shows_and_cancels_and_parks(broker: Broker, redis_url: str) -> None:
    first, second = [await running(broker, tokens) for tokens in (3, 5)]
    command = [sys.executable, "-m", "quire", "top", "--redis-url", redis_url, "--interval-s", "0.3"]
    with terminal(command, 140) as screen:
        screen.wait_for("2 requests run, ")
        screen.wait_for(first[:20])
        screen.type("c")
        screen.wait_for("select a request first")
        screen.type("\x1b[B")
        screen.type("i")
        screen.wait_for(r"accepted \d{4}-")
        screen.wait_for("claimed")
        screen.wait_for("its next token from w")
        screen.type("i")
        screen.type("c")
        chosen = screen.wait_for(r"cancel [0-9a-f]{32}\? y/n").split()[1].rstrip("?")
        screen.type("n")
        screen.wait_for("nothing was done")
        screen.type("cy")
        screen.wait_for("its worker ends it now")
        assert await broker.client.hget(KEYS.request(chosen), "cancel") == b"1"
        other = second if chosen == first else first
        screen.type("k" * 9 + "p")
        if chosen in screen.wait_for(r"park [0-9a-f]{32}\? y/n"):
            screen.type("njp")
            screen.wait_for(rf"park {other}\? y/n")
        screen.type("y")
        screen.wait_for(f"quire parking unpark --id {other}")
        assert await broker.client.hget(KEYS.request(other), "state") == b"parked"
        screen.type("q")
        assert screen.wait() == 0
        assert screen.is_as_before()


@pytest.mark.slow
async def test_ctrl_c_and_a_redis_that_goes_leave_the_terminal_as_it_was(broker: Broker, redis_url: str) -> None:
    command = [sys.executable, "-m", "quire", "top", "--redis-url", redis_url]
    with terminal(command, 60, 12, NO_COLOR="1") as screen:
        screen.wait_for("lane")
        assert "\x1b[3" not in screen.said
        assert not screen.is_as_before()
        screen.type("\x03")
        assert screen.wait() == 130
        assert screen.is_as_before()
        assert "Traceback" not in screen.said


@pytest.mark.slow
def test_a_worker_of_this_machine_is_drained(start_quire: StartQuire, tiny_model: Path, tmp_path: Path) -> None:
    server = start_quire("serve", str(tiny_model), "--port", "0", "--state-dir", str(tmp_path))
    server.wait_ready()
    command = [sys.executable, "-m", "quire", "top", "--state-dir", str(tmp_path)]
    with terminal(command) as screen:
        screen.wait_for("worker-1")
        screen.type("\td")
        screen.wait_for("select a worker first")
        screen.type("jd")
        screen.wait_for(r"drain worker-1 \(process \d+\)\?")
        screen.type("y")
        screen.wait_for("worker-1 drains")
        server.wait_for("worker-1 ended, exit code 0; starting it again")
        screen.type("q")
        assert screen.wait() == 0


class Process:
    """A process of this machine. home: the place of a worker in it."""

    def __init__(self) -> None:
        code = "from quire.worker.queue.leases import home; print(home(), flush=True); input()"
        command = [sys.executable, "-c", code]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.pid, self.home = self._process.pid, self._process.stdout.readline().strip()

    def end(self) -> None:
        """Kill it. Until `close` it is a zombie, to which a signal can be sent."""
        self._process.kill()
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.slow
async def test_a_worker_that_ends_before_the_answer_to_the_question_is_not_signalled(
    broker: Broker, redis_url: str
) -> None:
    with closing(Process()) as process:
        await broker.beat(replace(CARD, worker_id="w2"), home=process.home)
        await broker.client.zrem(KEYS.workers, "w")
        with terminal([sys.executable, "-m", "quire", "top", "--redis-url", redis_url]) as screen:
            screen.wait_for("w2")
            screen.type("\tjd")
            screen.wait_for(rf"drain w2 \(process {process.pid}\)\?")
            process.end()
            screen.type("y")
            screen.wait_for("w2 had ended")


@pytest.mark.slow
async def test_names_with_brackets_are_shown_as_they_are(broker: Broker, redis_url: str) -> None:
    registry = command_client(redis_url, REGISTRY_LANE)
    await registry.zadd(RegistryKeys().models, {"m[q4]": 2})
    await registry.aclose()
    await broker.beat(replace(CARD, worker_id="w[/x]"))
    with terminal([sys.executable, "-m", "quire", "top", "--redis-url", redis_url]) as screen:
        screen.wait_for(r"m\[q4\]")
        screen.wait_for(r"w\[/x\]")


@pytest.mark.slow
async def test_it_prints_one_look_and_says_what_it_lacks(
    broker: Broker, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id = await running(broker, 3)
    look = json.loads(quire("top", "--json", "--interval-s", "0.2", "--redis-url", redis_url).stdout)
    assert [row["id"] for row in look["requests"]] == [request_id]
    assert "needs a terminal; --json prints one look" in refusal(1, "top", "--redis-url", redis_url)
    without = "import sys; sys.modules['rich'] = None; from quire.ops.cli.main import main; sys.exit(main())"
    with terminal([sys.executable, "-c", without, "top", "--redis-url", redis_url], 200) as screen:
        screen.wait_for(r"needs the package rich: .*\[top\]")
        assert screen.wait() == 1
    with terminal([sys.executable, "-m", "quire", "top", "--redis-url", "redis://127.0.0.1:1"], 200) as screen:
        screen.wait_for("no Redis at redis://127.0.0.1:1")
        assert screen.wait() == 1


@pytest.mark.slow
async def test_it_ends_with_its_terminal(broker: Broker, redis_url: str) -> None:
    with terminal([sys.executable, "-m", "quire", "top", "--redis-url", redis_url]) as screen:
        screen.wait_for("requests run")
        screen.hang_up()
        assert screen.process.wait(30) is not None
