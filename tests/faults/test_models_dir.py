"""A folder of ten models on a host with room for three: whatever is killed, each answer is that of its model alone."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
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
        # All at once: most of a start is the import of packages.
        self.host = self._begin_host("host")
        gateways = [self._begin_gateway() for _ in range(2)]
        self.host.wait_for("ready: host")
        for process in gateways:
            self._await_gateway(process)

    def _start(self, *words: str) -> QuireProcess:
        process = QuireProcess((*words, "--redis-url", self.redis_server.url), clean_environ(), None)
        self.processes.append(process)
        return process

    def another_host(self, name: str) -> QuireProcess:
        host = self._begin_host(name)
        host.wait_for("ready: host")
        return host

    def _begin_host(self, name: str) -> QuireProcess:
        lease = ("--lease-s", "1", "--beat-s", "0.25", "--drain-s", "0.2")
        where = ("--models-dir", str(self.folder), "--worker-id", name)
        return self._start("worker", *where, *FLAGS, *lease, *self.flags)

    def _begin_gateway(self, port: str = "0") -> QuireProcess:
        return self._start("gateway", "--discover-models", "--port", port)

    def _await_gateway(self, process: QuireProcess) -> None:
        url = process.wait_for(r"(http://[\d.]+:\d+)")[1]
        self.wait(lambda: status_of(f"{url}/readyz") == 200)
        self.gateways[url] = process
        self.urls.append(url)

    def kill_host(self) -> None:
        """Kill the host as the kernel does; its workers end with it. Start another."""
        workers = self.workers()
        self.host.kill()
        assert all(has_ended(pid) for pid in (self.host.pid, *workers))
        self.host = self.another_host("host")

    def kill_worker(self, choose: random.Random) -> None:
        """Kill one of the workers that run at the moment, whatever it does."""
        if workers := self.workers():
            os.kill(choose.choice(workers), signal.SIGKILL)

    def kill_gateway(self, then: Callable[[], None] = lambda: None) -> None:
        """Kill the gateway that clients use; they go to the other one, and the port gets a new one.

        then: another fault, while the new one starts.
        """
        url = self.urls.pop(0)
        self.gateways[url].kill()
        has_ended(self.gateways[url].pid)
        process = self._begin_gateway(url.rpartition(":")[2])
        then()
        self._await_gateway(process)

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


def post(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return status and body of one call, which is not repeated."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/v1/completions", data, headers), timeout=120
        ) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def run_calls(
    stack: HostStack, names: list[str], rounds: int, tokens: int, faults: list[Any], timeout_s: float = 180
) -> None:
    """Send calls to all models at once, do `faults` meanwhile, and compare every answer."""
    calls = [call(name, seed, tokens) for seed in range(rounds) for name in names]
    clients = [StubbornClient(stack.urls, body) for body in calls]
    for fault in faults:
        if any(client.token_ids is None for client in clients):
            fault()
    expected = answers(stack.folder, calls)
    found = [client.wait(timeout_s) for client in clients]
    assert [body["model"] for body, a, b in zip(calls, found, expected, strict=True) if a != b] == []
    assert [client.refusals for client in clients if client.refusals] == []
    stack.assert_nothing_is_left(names)


@pytest.fixture
def two(folder: Path) -> list[str]:
    return fill(folder, copies=0, families=("llama", "qwen3"))


@pytest.mark.promise
def test_ten_models_on_a_host_with_room_for_three_answer_as_alone_whatever_is_killed(
    folder: Path, tmp_path: Path, stacks: list[HostStack]
) -> None:
    names = fill(folder, copies=3)
    assert len(names) == 10
    stack = HostStack(folder, tmp_path / "state", "--models-max", "3")
    stacks.append(stack)
    choose = random.Random(3)

    def wait_for_loads(count: int) -> None:
        seen = len(stack.host.stderr.split(" loaded "))
        stack.wait(lambda: len(stack.host.stderr.split(" loaded ")) >= seen + count)

    def kill_host() -> None:
        wait_for_loads(2)
        stack.kill_host()

    run_calls(
        stack,
        names,
        rounds=2,
        tokens=300,
        faults=[
            lambda: wait_for_loads(1),
            lambda: stack.kill_worker(choose),
            lambda: stack.kill_gateway(then=kill_host),
        ],
    )
    assert set(stack.states()) == set(names)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_ten_models_survive_minutes_of_random_kills(folder: Path, tmp_path: Path, stacks: list[HostStack]) -> None:
    names = fill(folder, copies=3)
    stack = HostStack(folder, tmp_path / "state", "--models-max", "2", "--models-slice-s", "5")
    stacks.append(stack)
    choose = random.Random(5)

    def kill_at_random() -> None:
        kinds = (stack.kill_host, stack.kill_gateway, *[lambda: stack.kill_worker(choose)] * 3)
        time.sleep(choose.uniform(0, 8))  # a moment of any kind
        choose.choice(kinds)()

    run_calls(stack, names, rounds=6, tokens=600, faults=[kill_at_random] * 20, timeout_s=900)


def test_a_model_whose_slice_is_over_hands_its_requests_back_and_continues(
    folder: Path, two: list[str], tmp_path: Path, stacks: list[HostStack]
) -> None:
    stack = HostStack(folder, tmp_path / "state", "--models-slice-s", "0.1", "--max-num-seqs", "1")
    stacks.append(stack)
    # More answers than a slice has time for, one after the other.
    calls = [call("llama", seed, 900) for seed in range(6)] + [call("qwen3", 1, 50)]
    expected = answers(folder, calls)
    clients = [StubbornClient(stack.urls, body) for body in calls[:-1]]
    stack.host.wait_for("loaded llama")
    clients.append(StubbornClient(stack.urls, calls[-1]))
    assert [client.wait(120) for client in clients] == expected
    stack.host.wait_for(r"unloading llama \(slice, for qwen3\)")
    stack.assert_nothing_is_left(two)


def test_a_model_that_cannot_be_loaded_costs_the_others_nothing_and_is_tried_again_when_it_is_mended(
    folder: Path, two: list[str], tmp_path: Path, stacks: list[HostStack]
) -> None:
    weights = folder / "llama" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    big = folder / "big"
    big.mkdir()
    for file in (folder / "llama").iterdir():
        (big / file.name).write_bytes(file.read_bytes())
    with (big / "model.safetensors").open("ab") as file:
        file.truncate(2**31)  # a hole: it takes no room on the disk
    stack = HostStack(folder, tmp_path / "state", "--models-memory-gb", "1")
    stacks.append(stack)
    refused = {name: post(stack.urls[0], call(name, 0, 5)) for name in ("llama", "big")}
    assert {name: (status, body["error"]["code"]) for name, (status, body) in refused.items()} == dict.fromkeys(
        ("llama", "big"), (503, "model_not_loaded")
    )
    assert "llama/model.safetensors" in refused["llama"][1]["error"]["message"]
    assert "--models-memory-gb is 1" in refused["big"][1]["error"]["message"]
    assert str(folder) not in str(refused)
    assert stack.states() | {"qwen3": ""} == {"llama": "failed", "big": "failed", "qwen3": ""}
    assert post(stack.urls[0], call("qwen3", 0, 5))[0] == 200
    weights.write_bytes(whole)
    stack.wait(lambda: stack.states()["llama"] == "not_loaded")
    status, body = post(stack.urls[0], call("llama", 0, 5))
    assert (status, body["choices"][0]["token_ids"]) == (200, answers(folder, [call("llama", 0, 5)])[0])


def test_models_come_and_go_while_the_host_runs(
    folder: Path, two: list[str], tmp_path: Path, stacks: list[HostStack]
) -> None:
    stack = HostStack(folder, tmp_path / "state")
    stacks.append(stack)

    def models(*words: str) -> str:
        process = stack._start("models", *words, "--models-dir", str(folder))
        assert process.wait() == 0, process.stderr
        return process.stdout

    assert post(stack.urls[0], call("llama", 0, 5))[0] == 200
    models("add", str(folder / "llama"), "--name", "third")
    stack.wait(lambda: set(stack.states()) == {*two, "third"})
    assert post(stack.urls[0], call("third", 0, 5))[0] == 200
    listed = {row["name"]: row for row in json.loads(models("list", "--json"))}
    assert {name: row["status"] for name, row in listed.items()} == {
        "llama": "not_loaded",
        "qwen3": "not_loaded",
        "third": "loaded",
    }
    assert (listed["qwen3"]["last_used"], listed["third"]["last_used"] is None) == (None, False)
    # What runs may end; nothing new comes.
    client = StubbornClient(stack.urls, call("third", 0, 900))
    stack.wait(lambda: stack.redis.hget(LaneKeys("third").totals, "accepted") == b"2")
    models("remove", "third", "--yes")
    assert client.wait(60) == answers(folder, [call("llama", 0, 900)])[0]
    stack.wait(lambda: set(stack.states()) == set(two))
    assert post(stack.urls[0], call("third", 0, 5))[0] == 404
    stack.wait(lambda: not stack.workers())


def test_two_hosts_of_a_folder_share_the_models(
    folder: Path, two: list[str], tmp_path: Path, stacks: list[HostStack]
) -> None:
    stack = HostStack(folder, tmp_path / "state")
    stacks.append(stack)
    other = stack.another_host("other")
    calls = [call(name, seed, 300) for seed in range(4) for name in two]
    clients = [StubbornClient(stack.urls, body) for body in calls]
    assert [client.wait(120) for client in clients] == answers(folder, calls)
    # Each has loaded one model, once.
    logs = stack.host.stderr + other.stderr
    assert sorted(re.findall(r" loaded (\S+) after", logs)) == two
    assert (len(stack.workers()), len(children_of(other.pid))) == (1, 1)
    assert stack.host.stop() == 0
    assert post(stack.urls[0], calls[0])[0] == post(stack.urls[0], calls[1])[0] == 200
    with pytest.raises(AssertionError, match="the worker id 'other' is in use"):
        stack.another_host("other")
