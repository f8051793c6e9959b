"""A folder of ten models on a host with room for three: whatever is killed, each answer is that of its model alone."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from quire.ops.local.embedded_redis import EmbeddedRedis
from quire.shared.protocol.keys import GROUP, QUEUES, LaneKeys
from tests.conftest import QuireProcess, children_of, clean_environ, has_ended
from tests.support.faults.model_folder import ARITHMETIC, StubbornClient, answers, call, fill

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

FLAGS = tuple(word for name, value in ARITHMETIC.items() for word in (f"--{name.replace('_', '-')}", str(value)))


class HostStack:
    """One Redis, two gateways that discover models, and one host."""

    def __init__(self, folder: Path, state: Path, *flags: str) -> None:
        self.redis_server = EmbeddedRedis(state)
        self.redis_server.start()
        self.redis = Redis.from_url(self.redis_server.url)
        self.folder, self.flags = folder, flags
        self.processes: list[QuireProcess] = []
        self.gateways: dict[str, QuireProcess] = {}
        # The URLs of gateways that are ready.
        self.urls: list[str] = []
        self.start_host()
        for _ in range(2):
            self.start_gateway()

    def _start(self, *words: str) -> QuireProcess:
        process = QuireProcess((*words, "--redis-url", self.redis_server.url), clean_environ(), None)
        self.processes.append(process)
        return process

    def start_host(self) -> None:
        lease = ("--lease-s", "1", "--beat-s", "0.25", "--drain-s", "0.2")
        where = ("--models-dir", str(self.folder), "--worker-id", "host")
        self.host = self._start("worker", *where, *FLAGS, *lease, *self.flags)
        self.host.wait_for("ready: host")

    def start_gateway(self, port: str = "0") -> None:
        process = self._start("gateway", "--discover-models", "--port", port)
        url = process.wait_for(r"(http://[\d.]+:\d+)")[1]
        self.wait(lambda: status_of(f"{url}/readyz") == 200)
        self.gateways[url] = process
        self.urls.append(url)

    def kill_host(self) -> None:
        """Kill the host as the kernel does; its workers end with it. Start another."""
        workers = self.workers()
        self.host.kill()
        assert all(has_ended(pid) for pid in (self.host.pid, *workers))
        self.start_host()

    def kill_worker(self, choose: random.Random) -> None:
        """Kill one of the workers that run at the moment, whatever it does."""
        self.wait(self.workers)
        if workers := self.workers():
            os.kill(choose.choice(workers), signal.SIGKILL)

    def kill_gateway(self) -> None:
        """Kill the gateway that clients use; they go to the other one, and the port gets a new one."""
        url = self.urls.pop(0)
        self.gateways[url].kill()
        has_ended(self.gateways[url].pid)
        self.start_gateway(url.rpartition(":")[2])

    def workers(self) -> list[int]:
        """The pids of the workers of the host."""
        return sorted(children_of(self.host.pid)) if self.host.process.poll() is None else []

    def wait(self, condition: Any, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.host.stderr[-3000:]
            time.sleep(0.02)

    def states(self) -> dict[str, str]:
        with urllib.request.urlopen(f"{self.urls[0]}/v1/models", timeout=60) as response:
            return {card["id"]: card["status"] for card in json.load(response)["data"]}

    def assert_nothing_is_left(self, names: list[str]) -> None:
        """All requests have ended once, and none is pending."""
        for name in names:
            keys = LaneKeys(name)
            totals = {key.decode(): int(value) for key, value in self.redis.hgetall(keys.totals).items()}
            totals.pop("arrivals")
            accepted = totals.pop("accepted")
            assert totals == {"length": accepted}
            for queue in map(keys.queue, QUEUES):
                if self.redis.exists(queue):
                    assert (self.redis.xlen(queue), self.redis.xpending(queue, GROUP)["pending"]) == (0, 0)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.close()
        self.redis.close()
        self.redis_server.stop()


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.fixture
def stacks(tmp_path: Path) -> Iterator[list[HostStack]]:
    started: list[HostStack] = []
    yield started
    for stack in started:
        stack.close()


def run_calls(stack: HostStack, names: list[str], rounds: int, tokens: int, faults: list[Any]) -> None:
    """Send calls to all models at once, do `faults` meanwhile, and compare every answer."""
    calls = [call(name, seed, tokens) for seed in range(rounds) for name in names]
    expected = answers(stack.folder, calls)
    clients = [StubbornClient(stack.urls, body) for body in calls]
    for fault in faults:
        fault()
    found = [client.wait(180) for client in clients]
    assert [body["model"] for body, a, b in zip(calls, found, expected, strict=True) if a != b] == []
    assert [client.refusals for client in clients if client.refusals] == []
    stack.assert_nothing_is_left(names)


@pytest.mark.promise
def test_ten_models_on_a_host_with_room_for_three_answer_as_alone_whatever_is_killed(
    folder: Path, tmp_path: Path, stacks: list[HostStack]
) -> None:
    names = fill(folder, copies=3)
    assert len(names) == 10
    stack = HostStack(folder, tmp_path / "state", "--models-max", "3")
    stacks.append(stack)
    choose = random.Random(3)

    def loaded(count: int) -> Any:
        seen = len(stack.host.stderr.split(" loaded "))
        return lambda: stack.wait(lambda: len(stack.host.stderr.split(" loaded ")) >= seen + count)

    run_calls(
        stack,
        names,
        rounds=2,
        tokens=300,
        faults=[
            loaded(1),
            lambda: stack.kill_worker(choose),
            stack.kill_gateway,
            stack.kill_host,
        ],
    )
    assert set(stack.states()) == set(names)
