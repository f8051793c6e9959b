"""Metrics of real processes after calls that end in every way: exact figures, and each metric is documented."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.ops.paths import PROJECT_ROOT
from quire.shared.accounts.limits import AccountLimits
from quire.shared.accounts.store import AccountStore
from quire.shared.protocol.keys import ACCOUNTS_TAG
from quire.shared.redis.clients import command_client
from quire.worker.host.metrics import HostMetrics
from quire.worker.upstream.client import UpstreamClient
from quire.worker.upstream.metrics import families
from quire.worker.upstream.pool import Upstream
from tests.support.checkpoints import make_checkpoint
from tests.support.faults.stack import MODEL, FaultStack, Stream

# Starting a stack and its load takes seconds.
pytestmark = pytest.mark.slow

LONG = {"max_tokens": 1500, "ignore_eos": True}
SHORT = {"max_tokens": 8, "ignore_eos": True}


def asks(**parameters: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": "once upon a time", "temperature": 0, **parameters}


@dataclass
class Scrape:
    """One reading of /metrics: its text, and samples by name and labels."""

    text: str
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for family in text_string_to_metric_families(self.text):
            for sample in family.samples:
                self.samples[sample.name, frozenset(sample.labels.items())] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of all samples that have these labels (`class_` is `class`)."""
        wanted = {(key.rstrip("_"), value) for key, value in labels.items()}
        found = [value for (known, pairs), value in self.samples.items() if known == name and wanted <= pairs]
        assert found, f"no {name} with {labels}"
        return sum(found)

    def families(self) -> dict[str, tuple[str, frozenset[str]]]:
        """Return the type and label names of each metric of Quire."""
        kinds = dict(re.findall(r"^# TYPE (quire_\w+) (\w+)$", self.text, re.MULTILINE))
        labels: dict[str, set[str]] = {name: set() for name in kinds}
        for name, pairs in self.samples:
            family = name if name in kinds else re.sub("_(bucket|count|sum)$", "", name)
            if family in labels:
                labels[family] |= {key for key, _ in pairs} - {"le"}
        return {name: (kind, frozenset(labels[name])) for name, kind in kinds.items()}


def scrape(url: str) -> Scrape:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        return Scrape(response.read().decode())


@dataclass
class Run:
    """The clients' results, and the scrapes with a full queue and after all requests have ended."""

    calls: list[Stream]
    full: Scrape
    gateway: Scrape
    worker: Scrape
    canary: Scrape

    def tokens_received(self) -> int:
        """Return the number of completion tokens that clients received."""
        count = 0
        for call in self.calls:
            if call.status == 200 and call.body.get("stream"):
                count += int(call.events[-1].id.split(".")[0])
            elif call.status == 200:
                count += call.answer["usage"]["completion_tokens"]
        return count


def wait_scrape(stack: FaultStack, url: str, is_wanted: Callable[[Scrape], bool]) -> Scrape:
    """Scrape until the condition holds; return that scrape."""
    found: list[Scrape] = []

    def is_there() -> bool:
        found.append(scrape(url))
        return is_wanted(found[-1])

    stack.wait(is_there)
    return found[-1]


async def make_key(url: str) -> str:
    """Return the secret of a new API key without limits."""
    client = command_client(url, ACCOUNTS_TAG)
    try:
        _, secret = await AccountStore(client, "test").create("acme", "web", "metrics", AccountLimits())
    finally:
        await client.aclose()
    return secret


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    model = make_checkpoint(tmp_path_factory.mktemp("models") / "long", "llama", max_position_embeddings=2048)
    stack = FaultStack(tmp_path_factory.mktemp("redis"), model)
    try:
        process, url = stack.gateway("--max-queued-requests", "1")
        worker_process = stack.worker("w1", "--max-num-seqs", "2")
        canary_process = stack.worker("c1", "--canary", "1", ready=False)
        canary_process.wait_for("ready: a canary")
        inside, worker, canary = (
            one.wait_for(r"for operators: (http://[\d.:]+)/metrics")[1]
            for one in (process, worker_process, canary_process)
        )
        keyed = {"Authorization": f"Bearer {asyncio.run(make_key(stack.redis_server.url))}"}
        text = Stream(url, asks(**SHORT), headers=keyed).wait_end()
        calls = [
            text,
            Stream(url, asks(**SHORT, stream=True)).wait_end(),
            Stream(url, asks(**SHORT, stream=True, stop=text.answer["choices"][0]["text"][2])).wait_end(),
            Stream(url, asks(**LONG, stream=True, timeout=0.3)).wait_end(),
            Stream(url, asks(**LONG, timeout=0.2)).wait_end(),
            Stream(url, asks(max_tokens=0)).wait_end(),
            Stream(url, asks(), path="/v1/nothing").wait_end(),
        ]
        # The engine is full, one request is queued, and the queue is full.
        talk = {"messages": [{"role": "user", "content": "Hello"}], "model": MODEL, "stream": True, **LONG}
        leaving = [Stream(url, talk, path="/v1/chat/completions").wait_events(3) for _ in range(2)]
        waiting = Stream(url, asks(**SHORT, stream=True, priority="batch"))
        full = wait_scrape(stack, inside, lambda seen: seen("quire_queue_oldest_age_seconds") > 0)
        calls.append(Stream(url, asks(**SHORT, priority="batch")).wait_end())
        for one in leaving:
            one.leave()
        calls.append(waiting.wait_end())
        stack.wait(stack.is_drained)
        ended = wait_scrape(stack, inside, lambda seen: seen("quire_lane_running") + seen("quire_open_calls") == 0)
        scored = wait_scrape(stack, canary, lambda seen: seen("quire_canary_requests_total") == 8)
        yield Run(calls, full, ended, scrape(worker), scored)
    finally:
        stack.close()


def test_the_clients_got_what_the_figures_are_about(run: Run) -> None:
    assert [call.status for call in run.calls] == [200, 200, 200, 200, 504, 400, 404, 429, 200]


def test_accepted_is_the_sum_of_outcomes_and_of_what_waits_and_runs(run: Run) -> None:
    for seen in (run.full, run.gateway):
        parts = seen("quire_lane_ended_total") + seen("quire_queue_requests") + seen("quire_lane_running")
        assert seen("quire_lane_accepted_total", model=MODEL) == parts
    outcomes = {"stop": 1, "length": 3, "deadline": 2, "cancelled": 2, "error": 0, "quarantined": 0}
    for outcome, count in outcomes.items():
        assert run.gateway("quire_lane_ended_total", outcome=outcome) == count
        assert run.worker("quire_worker_requests_total", outcome=outcome) == count
    assert run.worker("quire_attempts_total") == run.gateway("quire_lane_accepted_total") == 8
    assert run.worker("quire_migrations_total") == run.worker("quire_fenced_commits_total") == 0


def test_the_queue_is_seen_by_class_with_its_age(run: Run) -> None:
    assert run.full("quire_queue_requests", class_="batch") == 1
    assert run.full("quire_queue_tokens", class_="batch") > SHORT["max_tokens"]
    assert run.full("quire_lane_running") == 2
    assert 0 < run.full("quire_queue_oldest_age_seconds", class_="batch") < 60
    assert run.full("quire_queue_oldest_age_seconds", class_="interactive") == 0
    assert run.full("quire_open_streams") == 3
    for name in ("quire_queue_requests", "quire_queue_tokens", "quire_queue_oldest_age_seconds"):
        assert run.gateway(name) == 0
    assert run.worker("quire_queue_wait_seconds_count", class_="batch") == 1
    assert run.worker("quire_queue_wait_seconds_count") == 8


def test_calls_are_counted_once_under_their_outcome(run: Run) -> None:
    found = {
        (dict(labels)["dialect"], dict(labels)["outcome"]): value
        for (name, labels), value in run.gateway.samples.items()
        if name == "quire_calls_total" and value
    }
    assert found == {
        ("completion", "stop"): 1,
        ("completion", "length"): 3,
        ("completion", "deadline"): 2,
        ("completion", "refused"): 2,
        ("chat", "gone"): 2,
    }
    assert run.gateway("quire_refusals_total", reason="invalid_request") == 1
    assert run.gateway("quire_refusals_total", reason="queue_full") == 1
    assert run.gateway("quire_refusals_total", reason="not_found") == 1
    assert run.gateway("quire_http_requests_total", route="/v1/completions", status="429") == 1
    assert run.gateway("quire_http_requests_total", route="other", status="404") == 1
    assert run.gateway("quire_cancellations_total") == 2


def test_tokens_and_latencies_are_those_of_the_clients(run: Run) -> None:
    streams = [call for call in run.calls if call.status == 200 and call.body.get("stream")]
    assert run.gateway("quire_completion_tokens_total", dialect="completion") == run.tokens_received()
    assert run.gateway("quire_time_to_first_token_seconds_count", dialect="completion") == len(streams) == 4
    assert run.gateway("quire_time_to_first_token_seconds_count", dialect="chat") == 2
    assert run.gateway("quire_call_duration_seconds_count", dialect="completion") == 4
    groups = run.gateway("quire_inter_token_latency_seconds_count", dialect="completion")
    assert 0 < groups <= run.tokens_received() - len(streams)
    assert run.gateway("quire_gateway_overhead_seconds_count", part="accept") == 8
    assert run.gateway("quire_gateway_overhead_seconds_sum", part="deliver") > 0
    prompt = run.calls[0].answer["usage"]["prompt_tokens"]
    assert run.gateway("quire_prompt_tokens_total", dialect="completion") == 6 * prompt


def test_steps_are_measured_completely(run: Run) -> None:
    worker = run.worker
    steps = worker("quire_engine_steps_total")
    assert worker("quire_step_seconds_count") == worker("quire_step_sequences_count") == steps > 0
    for phase in ("schedule", "execute", "sample", "commit"):
        assert worker("quire_step_phase_seconds_count", phase=phase) == steps
    parts, all_s = worker("quire_step_phase_seconds_sum"), worker("quire_step_seconds_sum")
    assert 0.9 * all_s < parts <= all_s
    for phase in ("prefill", "decode"):
        assert worker("quire_step_tokens_sum", phase=phase) == worker("quire_engine_tokens_total", phase=phase)
    assert worker("quire_commit_seconds_count") > 0
    assert worker("quire_event_loop_lag_seconds_count") > 0


def test_the_tokens_of_a_key_are_those_of_its_calls(run: Run) -> None:
    usage = run.calls[0].answer["usage"]
    for kind in ("prompt", "completion"):
        assert run.gateway("quire_usage_tokens", kind=kind) == usage[f"{kind}_tokens"]


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """The metrics in the lists of docs/metrics.md: type and labels."""
    text = (PROJECT_ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^- `(quire_\w+)` \((\w+)(?:;\s([^)]*))?\): ", text.replace("\n  ", " "), re.MULTILINE)
    found = {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert len(found) == len(rows), "a metric is documented twice"
    return found


def of_upstreams() -> dict[str, tuple[str, frozenset[str]]]:
    """The metrics that only a worker with `--upstream` has: type and labels."""
    found = families([Upstream(UpstreamClient("http://127.0.0.1:1", "", 1, 1))], "tiny")
    return {
        one.name + ("_total" if one.type == "counter" else ""): (one.type, frozenset(one.samples[0].labels))
        for one in found
        if one.name.startswith("quire_upstream_")
    }


def of_hosts() -> dict[str, tuple[str, frozenset[str]]]:
    """The metrics of a worker with `--models-dir`: type and labels."""
    metrics = HostMetrics()
    metrics.loads["tiny"] = metrics.failures["tiny"] = 1
    return Scrape(metrics.render({"loaded": 1}).decode()).families()


def test_every_metric_is_documented_and_every_documented_one_is_there(run: Run) -> None:
    of_processes = [one.families() for one in (run.gateway, run.worker, run.canary)]
    assert {**of_processes[0], **of_processes[1], **of_processes[2], **of_upstreams(), **of_hosts()} == documented()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus)")
def test_prometheus_finds_nothing_to_complain_about(run: Run) -> None:
    for seen in (run.gateway, run.worker):
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=seen.text, capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
