"""Every panel shows something: a real Prometheus watches a real stack under load, while much of it breaks."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from quire.ops.local.ports import free_port
from tests.conftest import QuireProcess
from tests.support.boards import alerts, metrics_of, rules, targets
from tests.support.checkpoints import make_checkpoint
from tests.support.faults.calls import owned
from tests.support.faults.stack import KEYS, MODEL, FaultStack, Stream
from tests.support.monitoring import MISSING, Monitoring

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (Debian's packages of these names)"),
]

CLASSES = ("interactive", "standard", "batch")
DEADLY = 44
PREFIX = "Tell me again, from the beginning, the story of the fox that was asked to guard the hens of the village. " * 2
# Few blocks, so that requests give way to each other: some come back by swapping, others by computing again.
WORKER = ("--num-blocks", "64", "--max-model-len", "1024", "--max-num-seqs", "8", "--lease-s", "1", "--beat-s", "0.25")

# Panels that may show 0 and nothing else although all this happens: what must not happen, what nothing here asks for,
# and what chance decides.
MAY_STAY_0 = {
    "queue / Clients that went away / cut for not reading",
    "queue / Repairs of streams / corrupt messages",
    "queue / Repairs of streams / gap repairs",
    "redis / Append-only file / after rewrite {{instance}}",
    "redis / Clients / refused/s",
    "redis / Evicted keys / evicted",
    "redis / Fork / {{instance}}",
    "redis / Keys that went / evicted",
    "redis / Keys that went / expired",
    "redis / Memory / limit {{instance}}",
    "redis / Replicas / {{instance}}",
    "redis / Slow commands / entries",
    "redis / Slow commands / last, seconds",
    "redis / State of persistence / late syncs",
    "workers / Overtaken attempts / fenced",  # one of the two, which `overtake` waits for
    "workers / Overtaken attempts / leases lost",
    "workers / Requests per commit, and behind / uncommitted",
    "workers / Resends and failed commits / resends",
    "workers / Shared and pinned blocks / pinned",
}


class Scene:
    """Two gateways, two workers, and Prometheus, which looks at them at ports that do not change."""

    def __init__(self, folder: Path, closing: ExitStack) -> None:
        model = make_checkpoint(folder / "model", "llama", max_position_embeddings=2048)
        self.stack = FaultStack(folder / "redis", model)
        closing.callback(self.stack.close)
        self.ports = {name: free_port() for name in ("g1", "g2", "a", "b")}
        jobs = {"gateway": [self.ports["g1"], self.ports["g2"]], "worker": [self.ports["a"], self.ports["b"]]}
        self.monitoring = Monitoring(folder / "prometheus", jobs, self.stack.redis_server.url)
        closing.callback(self.monitoring.close)
        self.urls = [
            self.stack.gateway("--max-queued-requests", "24", "--internal-port", str(self.ports[name]))[1]
            for name in ("g1", "g2")
        ]
        self.workers = {name: self.worker(name) for name in ("a", "b")}
        for worker in self.workers.values():
            worker.wait_for("ready: worker")
        self.wait(self.monitoring.is_complete)

    def worker(self, name: str, **faults: str) -> QuireProcess:
        return self.stack.worker(name, *WORKER, "--internal-port", str(self.ports[name]), ready=False, **faults)

    def wait(self, condition: Callable[[], Any]) -> None:
        self.stack.wait(condition, 90)

    def ask(self, index: int, headers: dict[str, str] | None = None, **parameters: Any) -> Stream:
        """A streamed completion, at one gateway or the other."""
        body = {"model": MODEL, "prompt": f"{PREFIX} {index}", "max_tokens": 60, "ignore_eos": True, "stream": True}
        return Stream(self.urls[index % 2], body | parameters, headers or {})

    def chat(self, index: int, **parameters: Any) -> Stream:
        talk = {"messages": [{"role": "user", "content": PREFIX}], "model": MODEL, "max_tokens": 30}
        return Stream(self.urls[index % 2], talk | parameters, path="/v1/chat/completions")

    def load(self) -> None:
        """All classes and dialects, with several choices, over and over the same beginning; more than fits at once."""
        calls = [
            self.ask(i, max_tokens=120, n=1 + i % 2, temperature=1, seed=i, priority=CLASSES[i % 3]) for i in range(18)
        ]
        calls += [self.chat(i, stream=bool(i % 2)) for i in range(4)]
        for call in calls:
            assert call.wait_end(90).status == 200, call.text_body
        self.wait(self.stack.is_drained)

    def displace(self) -> None:
        """Batch requests fill the workers, and then interactive requests arrive."""
        batch = [self.ask(i, max_tokens=500, priority="batch").wait_events(1) for i in range(8)]
        urgent = [self.ask(i, max_tokens=100, priority="interactive") for i in range(12)]
        for call in batch + urgent:
            assert call.wait_end(90).is_complete, call.error

    def refuse(self) -> None:
        """Wrong, late, too many, and gone."""
        statuses = [
            self.ask(0, max_tokens=-1).wait_end().status,
            Stream(self.urls[0], {}, path="/v1/nothing").wait_end().status,
            self.ask(1, max_tokens=800, timeout=0.3, stream=False, priority="interactive").wait_end().status,
        ]
        assert statuses == [400, 404, 504]
        many = [self.ask(i, max_tokens=200) for i in range(60)]
        for call in many[::2]:
            call.wait_events(1, 90).leave()
        assert {call.wait_end(90).status for call in many} == {200, 429}
        self.wait(self.stack.is_drained)

    def come_back(self) -> None:
        """Resume streams at the other gateway, and send one call twice."""
        for i in range(2):
            left = self.ask(i, max_tokens=100, background=True).wait_events(5)
            call_id, seen = left.parsed[0]["id"], left.events[-1].id
            left.leave()
            rest = Stream(self.urls[1 - i], {}, {"Last-Event-ID": seen}, f"/v1/completions/{call_id}/stream", "GET")
            assert rest.wait_end().is_complete
        twice = [self.ask(i, {"Idempotency-Key": "once"}, prompt="same") for i in (0, 1)]
        assert all(call.wait_end().is_complete for call in twice)

    def lose_the_subscription(self) -> None:
        calls = [self.ask(i, max_tokens=150).wait_events(3) for i in range(4)]
        self.stack.redis.client_kill_filter(_type="pubsub")
        assert all(call.wait_end().is_complete for call in calls)

    def lose_redis(self) -> None:
        """Redis is killed with requests under way, and comes back with what it had."""
        calls = [self.ask(i, max_tokens=150).wait_events(3) for i in range(4)]
        process = self.stack.redis_server.process
        assert process is not None
        process.kill()
        process.wait()
        self.wait(lambda: self.monitoring.now("max(quire_commit_failures_total)") > [0])
        self.wait(lambda: self.ask(0).wait_end().status == 503)
        self.stack.redis_server.start()
        assert all(call.wait_end(60).is_complete for call in calls)

    def overtake(self) -> None:
        """Stop a worker for longer than its lease, and continue it after another worker has its requests."""
        calls = [self.ask(i, max_tokens=150).wait_events(3) for i in range(6)]
        self.wait(lambda: owned(self.stack, "a"))
        self.workers["a"].send(signal.SIGSTOP)
        self.wait(lambda: not owned(self.stack, "a"))
        self.workers["a"].send(signal.SIGCONT)
        assert all(call.wait_end(60).is_complete for call in calls)
        self.wait(lambda: self.monitoring.now("sum(quire_fenced_commits_total + quire_leases_lost_total)") > [0])

    def kill_workers(self) -> None:
        """One is killed, and then a request kills whoever takes it, until it is quarantined."""
        calls = [self.ask(i, max_tokens=150).wait_events(3) for i in range(6)]
        self.wait(lambda: owned(self.stack, "a"))
        self.workers["a"].send(signal.SIGKILL)
        assert all(call.wait_end(60).is_complete for call in calls)
        self.workers["b"].send(signal.SIGKILL)
        deadly = self.ask(1, prompt=[DEADLY, 1])
        self.wait(lambda: self.revive(TEST_DEADLY_TOKEN=str(DEADLY)) or self.stack.redis.xlen(KEYS.dead))
        assert deadly.wait_end().error is not None
        for worker in self.workers.values():
            worker.send(signal.SIGKILL)
            worker.wait()
        self.revive()
        for worker in self.workers.values():
            worker.wait_for("ready: worker")

    def revive(self, **faults: str) -> None:
        """Start workers again that have died."""
        for name, worker in self.workers.items():
            if worker.process.poll() is not None:
                self.workers[name] = self.worker(name, **faults)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with ExitStack() as closing:
        scene = Scene(tmp_path_factory.mktemp("scene"), closing)
        scene.load()
        scene.displace()
        scene.refuse()
        scene.come_back()
        scene.lose_the_subscription()
        scene.overtake()
        scene.lose_redis()
        scene.kill_workers()
        scene.load()
        yield scene


def values(scene: Scene, expr: str) -> list[float]:
    """All finite values that a query has had."""
    return [value for points in scene.monitoring.since_the_start(expr) for _, value in points if math.isfinite(value)]


def test_every_query_of_every_panel_returns_data(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    found = [(target, values(scene, target.expr)) for target in targets()]
    with capsys.disabled():
        print()
        for target, seen in found:
            print(f"{target.name:90} {f'{min(seen):12.5g} to {max(seen):12.5g}' if seen else 'NOTHING'}")
    assert [target.name for target, seen in found if not seen] == []
    quiet = {target.name for target, seen in found if not any(seen) and not target.name.startswith("slo / First")}
    assert sorted(quiet - MAY_STAY_0) == []


def test_every_rule_that_records_has_a_value(scene: Scene) -> None:
    records = [rule["record"] for rule in rules() if "record" in rule]
    assert [name for name in records if not values(scene, name)] == []


def test_every_metric_that_an_alert_asks_for_is_there(scene: Scene) -> None:
    """An alert about a series that does not exist never fires."""
    asked = {name for rule in alerts().values() for name, _ in metrics_of(rule["expr"])}
    assert [name for name in sorted(asked) if not values(scene, name)] == []
