"""A Quire server behind another Quire: gateway -> Redis -> worker with `--upstream` -> `quire serve`."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from quire.ops.local.embedded_redis import EmbeddedRedis
from quire.shared.protocol.keys import LaneKeys
from tests.conftest import QuireProcess, StartQuire, children_of, quire_processes
from tests.support.checkpoints import make_checkpoint
from tests.support.faults import batches
from tests.support.faults.calls import bearers, make_keys
from tests.support.faults.stack import Stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "tiny"
# So many that a stream can be broken in its middle.
LONG = 2000
FAST = ("--lease-s", "0.5", "--beat-s", "0.1")


class Stack:
    """An upstream on a port of its own, and the processes in front of it."""

    def __init__(self, start: StartQuire, model: Path, state: Path, redis: EmbeddedRedis) -> None:
        self._start = start
        self._state = state
        self.model = model
        self.redis_url = redis.url
        self.upstream_port = 0
        self.upstream = self.start_upstream()
        self.worker = self.start_worker("w1")
        self.url = self.start_gateway()

    @property
    def upstream_url(self) -> str:
        return f"http://127.0.0.1:{self.upstream_port}"

    def start_upstream(self) -> QuireProcess:
        flags = ("--port", str(self.upstream_port), "--state-dir", str(self._state), "--dtype", "float32")
        process = self._start("serve", str(self.model), *flags, "--max-num-seqs", "8", "--speculation", "off")
        self.upstream_port = int(process.wait_ready().rpartition(":")[2])
        return process

    def start_worker(self, name: str, *flags: str) -> QuireProcess:
        flags = ("--redis-url", self.redis_url, "--worker-id", name, "--upstream", self.upstream_url, *FAST, *flags)
        process = self._start("worker", str(self.model), *flags)
        process.wait_for("ready: worker")
        return process

    def start_gateway(self, *flags: str) -> str:
        process = self._start("gateway", str(self.model), "--redis-url", self.redis_url, "--port", "0", *flags)
        return process.wait_for(r"listening on (http://\S+)")[1]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = tmp_path_factory.mktemp("models") / MODEL
    make_checkpoint(model, "llama", max_position_embeddings=4096)
    redis = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    redis.start()
    try:
        with quire_processes() as start:
            yield Stack(start, model, tmp_path_factory.mktemp("state"), redis)
    finally:
        redis.stop()


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=200) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def said(answer: Any) -> Any:
    """Return an answer without what differs between two servers: ids, times, and counts of cached tokens."""
    if isinstance(answer, list):
        return [said(one) for one in answer]
    if not isinstance(answer, dict):
        return answer
    dropped = {"id", "created", "created_at", "completed_at", "system_fingerprint", "prompt_tokens_details"}
    dropped |= {"cache_read_input_tokens", "input_tokens", "input_tokens_details"}
    return {name: said(value) for name, value in answer.items() if name not in dropped}


CHAT = [{"role": "user", "content": "the in"}]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", {"prompt": "the in", "max_tokens": 60, "temperature": 0}),
    "drawn": ("/v1/completions", {"prompt": "the in", "max_tokens": 60, "seed": 5, "top_k": 30, "min_p": 0.01}),
    "scored": ("/v1/completions", {"prompt": "the", "max_tokens": 9, "temperature": 0, "logprobs": 3}),
    "unlisted": ("/v1/completions", {"prompt": "the", "max_tokens": 9, "temperature": 0, "logprobs": 0}),
    "ids": ("/v1/completions", {"prompt": "the", "max_tokens": 9, "temperature": 0, "return_token_ids": True}),
    "echo": ("/v1/completions", {"prompt": "the in", "max_tokens": 9, "temperature": 0, "echo": True}),
    "stopped": ("/v1/completions", {"prompt": "the", "max_tokens": 90, "temperature": 0, "stop": ["e", "in", "a"]}),
    "several": ("/v1/completions", {"prompt": ["the", "an"], "max_tokens": 20, "temperature": 0, "n": 2}),
    "penalties": (
        "/v1/completions",
        {"prompt": "the", "max_tokens": 40, "temperature": 0, "presence_penalty": 1, "repetition_penalty": 1.2},
    ),
    "schema": (
        "/v1/completions",
        {"prompt": "the", "max_tokens": 60, "temperature": 0, "structured_outputs": {"json": {"enum": [12, "in"]}}},
    ),
    "chosen": (
        "/v1/chat/completions",
        {"messages": CHAT, "max_tokens": 60, "temperature": 0, "structured_outputs": {"choice": ["the in", "an"]}},
    ),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 40, "temperature": 0, "logprobs": True}),
    "message": ("/v1/messages", {"messages": CHAT, "max_tokens": 40, "temperature": 0}),
    "response": ("/v1/responses", {"input": "the in", "max_output_tokens": 40, "temperature": 0}),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_is_that_of_the_upstream(stack: Stack, name: str) -> None:
    path, body = CALLS[name]
    body = {"model": MODEL, **body}
    answer = post(stack.url, path, body)
    assert said(answer) == said(post(stack.upstream_url, path, body))
    assert "quire" not in answer


def test_no_tensor_library_is_loaded(stack: Stack) -> None:
    maps = Path(f"/proc/{stack.worker.pid}/maps").read_text()
    assert "torch" not in maps


def test_a_client_that_leaves_closes_the_stream_at_the_upstream(stack: Stack) -> None:
    def cancelled() -> int:
        redis = redis_of(stack)
        return int(redis.hget(f"quire:{{{MODEL}}}:totals", "cancelled") or 0)

    before = cancelled()
    stream = Stream(stack.url, long_body())
    stream.wait_events(5)
    stream.leave()
    until(lambda: cancelled() == before + 1)


def redis_of(stack: Stack) -> Any:
    """Return a client of the upstream's own Redis."""
    return Redis(unix_socket_path=str(stack._state / "redis" / "redis.sock"))


def to_upstream(stack: Stack, number: signal.Signals, *services: str) -> None:
    """Send a signal to services that the upstream's launcher has started."""
    for pid, command in children_of(stack.upstream.pid).items():
        if command.partition("-m quire ")[2].split(" ")[0] in services:
            os.kill(pid, number)


def streaming(stack: Stack) -> int:
    """Return the number of requests whose log has a token and not yet the end."""
    redis = Redis.from_url(stack.redis_url)
    requests = [redis.hgetall(key) for key in redis.scan_iter(LaneKeys(MODEL).prefix + "req:*")]
    return sum(int(request.get(b"emitted", 0)) > 0 and b"outcome" not in request for request in requests)


def until(condition: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def ended(streams: list[Stream]) -> int:
    return sum(stream.is_complete for stream in streams)


def test_two_tenants_share_the_upstream(stack: Stack) -> None:
    flood, late = bearers(make_keys(stack.redis_url, "acme/flood", "acme/late"))
    url = stack.start_gateway("--require-keys")
    narrow = stack.start_worker("narrow", "--max-num-seqs", "1")
    stack.worker.stop()
    try:
        body = long_body(prompt="the", max_tokens=200)
        floods = [Stream(url, body, flood) for _ in range(8)]
        floods[0].wait_events(1)
        # The upstream stands until the other tenant's call waits too.
        to_upstream(stack, signal.SIGSTOP, "gateway")
        one = Stream(url, body, late)
        until(lambda: one.status == 200)
        before = ended(floods)
        to_upstream(stack, signal.SIGCONT, "gateway")
        assert one.wait_end().is_complete
        assert ended(floods) <= before + 3, "it waited for the others"
        for stream in floods:
            assert stream.wait_end().text() == one.text()
    finally:
        narrow.stop()
        stack.worker = stack.start_worker("w1")


def test_a_batch(stack: Stack, tmp_path: Path) -> None:
    url = stack.start_gateway("--files-dir", str(tmp_path))
    lines = [batches.line(number, prompt=f"the {number}", max_tokens=12) for number in range(20)]
    batch = batches.ended(url, batches.create(url, lines))
    assert batch.status == "completed"
    found = batches.answers(url, batch)
    for line in lines:
        body = {**line["body"], "model": MODEL}
        right = post(stack.upstream_url, line["url"], body)["choices"][0]["text"]
        assert found[line["custom_id"]] == (right, 12)


def long_body(**more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": "the in", "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
    return {**body, "stream": True, **more}


def test_the_worker_dies_in_the_middle_and_another_one_goes_on(stack: Stack) -> None:
    right = post(stack.url, "/v1/completions", long_body(stream=False))
    assert "quire" not in right
    stream = Stream(stack.url, long_body())
    stream.wait_events(1)
    stack.worker.kill()
    assert not stream.is_complete
    stack.worker = stack.start_worker("w1")
    stream.wait_end(200)
    assert stream.is_complete
    assert stream.text() == right["choices"][0]["text"]
    last = stream.parsed[-1]
    assert (last["choices"][0]["finish_reason"], last["quire"]) == ("length", {"exact": False})
    assert all("quire" not in event for event in stream.parsed[:-1])


def test_the_upstream_dies_in_the_middle_and_comes_back(stack: Stack) -> None:
    right = post(stack.url, "/v1/completions", long_body(stream=False))["choices"][0]["text"]
    chat = {"model": MODEL, "messages": CHAT, "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
    whole = Stream(stack.url, chat, path="/v1/chat/completions")
    stream = Stream(stack.url, long_body())

    def are_in_the_middle() -> bool:
        """Let the upstream run for a moment: if it ran freely, answers might end before the kill."""
        to_upstream(stack, signal.SIGCONT, "gateway", "worker")
        time.sleep(0.02)
        to_upstream(stack, signal.SIGSTOP, "gateway", "worker")
        return streaming(stack) == 2

    until(are_in_the_middle)
    stack.upstream.kill()
    stack.worker.wait_for("cannot be used")
    assert not stream.is_complete
    stack.upstream = stack.start_upstream()
    stream.wait_end(200)
    assert stream.is_complete
    assert stream.text() == right
    assert stream.parsed[-1]["quire"] == {"exact": False}
    whole.wait_end(200)
    assert whole.answer["quire"] == {"exact": False}
    until(lambda: "answers:" in stack.worker.stderr.rpartition("cannot be used")[2])
