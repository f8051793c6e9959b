"""Every panel shows something: a real Prometheus watches a real stack under load, while much of it breaks."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.ops.local.ports import free_port
from quire.shared.process.processes import dying_with_parent
from tests.conftest import QuireProcess
from tests.support.boards import RULES, alerts, metrics_of, rules, targets
from tests.support.checkpoints import make_checkpoint
from tests.support.faults.calls import owned
from tests.support.faults.stack import KEYS, MODEL, FaultStack, Stream

# --- monitoring -------------------------------------------------------------------------------------------------------
# A real Prometheus and a real redis_exporter for a running stack, and the queries that Grafana would send.

EXPORTER = "prometheus-redis-exporter"
MISSING = [name for name in ("prometheus", EXPORTER) if shutil.which(name) is None]
# The values that Grafana would fill in for its variables. Scrapes are a second apart.
VARIABLES = {"$__rate_interval": "10s", "$instance": ".*", "$model": ".*"}

# The points of a series: (time, value).
Points = list[tuple[float, float]]


class Monitoring:
    """Prometheus scrapes `targets` (ports by job) every second and evaluates our rules; `close` ends it."""

    def __init__(self, folder: Path, targets: Mapping[str, list[int]], redis_url: str) -> None:
        folder.mkdir()
        port, exporter_port = free_port(), free_port()
        self._url = f"http://127.0.0.1:{port}"
        jobs = {**targets, "redis": [exporter_port]}
        self.num_targets = sum(map(len, jobs.values()))
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(path) for path in RULES],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
                for job, ports in jobs.items()
            ],
        }
        path = folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        commands = {
            "exporter": [EXPORTER, "-redis.addr", redis_url, "-web.listen-address", f"127.0.0.1:{exporter_port}"],
            "prometheus": [
                "prometheus",
                f"--config.file={path}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
        }
        self.started_at = time.time()
        self._processes = []
        for name, command in commands.items():
            command[0] = shutil.which(command[0]) or command[0]
            with (folder / f"{name}.log").open("wb") as log:
                self._processes.append(subprocess.Popen(dying_with_parent(command), stdout=log, stderr=log))

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(60)

    def _get(self, path: str, **parameters: Any) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=30) as response:
            return json.load(response)["data"]

    def now(self, expr: str) -> list[float]:
        """The value of each series now; none while Prometheus does not answer."""
        try:
            return [float(one["value"][1]) for one in self._get("query", query=expr)["result"]]
        except OSError:
            return []

    def is_complete(self) -> bool:
        """Return True if all targets answer."""
        return self.now("sum(up)") == [self.num_targets]

    def since_the_start(self, expr: str) -> list[Points]:
        """The series of a panel's query from the start until now, a point for each second."""
        for name, value in VARIABLES.items():
            expr = expr.replace(name, value)
        found = self._get("query_range", query=expr, start=self.started_at, end=time.time(), step=1)["result"]
        return [[(at, float(value)) for at, value in one["values"]] for one in found]

    def firing(self) -> set[str]:
        """The names of alerts that fire or are about to."""
        return {one["labels"]["alertname"] for one in self._get("alerts")["alerts"]}


pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (Debian's packages of these names)"),
]

CLASSES = ("interactive", "standard", "batch")
DEADLY = 44
PREFIX = "Tell me again, from the beginning, the story of the fox that was asked to guard the hens of the village. " * 2
# Few blocks, so that requests give way to each other: some come back by swapping, others by computing again. The host's
# memory keeps blocks that fall out of the prefix cache.
WORKER = ("--num-blocks", "64", "--max-model-len", "1024", "--max-num-seqs", "8", "--lease-s", "1", "--beat-s", "0.25")
WORKER += ("--kv-host-gb", "0.001")

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
    "workers / Agreement of canaries / requests, {{instance}}",  # the canary's weights are rounded
    "workers / Drafted tokens / accepted, {{source}}",
    "workers / Drafted tokens / drafted, {{source}}",
    "workers / Evicted blocks that are kept / dropped, {{reason}}",
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
        self.ports = {name: free_port() for name in ("g1", "g2", "a", "b", "c")}
        jobs = {"gateway": [self.ports["g1"], self.ports["g2"]], "worker": [self.ports["a"], self.ports["b"]]}
        jobs["canary"] = [self.ports["c"]]
        self.monitoring = Monitoring(folder / "prometheus", jobs, self.stack.redis_server.url)
        closing.callback(self.monitoring.close)
        self.urls = [
            self.stack.gateway("--max-queued-requests", "24", "--internal-port", str(self.ports[name]))[1]
            for name in ("g1", "g2")
        ]
        self.workers = {name: self.worker(name) for name in ("a", "b")}
        # Rounds its weights, so that some of its tokens differ.
        flags = ("--canary", "1", "--quantization", "int4", "--internal-port", str(self.ports["c"]))
        self.stack.worker("c", *flags, ready=False, TEST_STEP_S="0").wait_for("ready: a canary")
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
        calls += [self.chat(i, stream=bool(i % 2), logprobs=True) for i in range(4)]
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
