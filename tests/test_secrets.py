"""Prompts, answers and secrets of API keys appear in no log, span, error or value where they should not."""

from __future__ import annotations

import http.client
import json
import os
import signal
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from quire.gateway.features.keys.api_keys import run
from quire.gateway.features.keys.key_settings import CreateKey
from tests.conftest import QuireProcess
from tests.support.checkpoints import make_checkpoint
from tests.support.collector import running_collector
from tests.support.faults.stack import MODEL, FaultStack, Stream

# --- secrets ----------------------------------------------------------------------------------------------------------
# Prompts and answers appear in no log and no span, whatever goes wrong, unless a setting allows it.


MARK = "kolibri77"
# No other text of this test has these tokens in this order.
DEADLY, FAILING = "ΩΩΩΩ", "ΨΨΨΨ"
TEMPLATE = (
    "{% set said = messages[0].content %}"
    "{% if 'RAISE' in said %}{{ raise_exception('not this: ' + said) }}{% endif %}"
    "{% if 'TYPE' in said %}{{ said + 1 }}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("models") / "long", "llama", max_position_embeddings=2048)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def stack(tmp_path: Path, model: Path) -> Iterator[FaultStack]:
    stack = FaultStack(tmp_path, model)
    try:
        yield stack
    finally:
        stack.close()


def leaky(stack: FaultStack, *arguments: str, **environ: str) -> QuireProcess:
    return stack._start("tests.support.leaky", (arguments[0], str(stack.model), *arguments[1:]), environ)


def chat(text: str, **parameters: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **parameters}


def complete(text: str, **parameters: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": text, "max_tokens": 4, "ignore_eos": True, **parameters}


# Path, body, and the expected status.
CALLS: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("chat/completions", chat(MARK), 200),
    ("chat/completions", chat(MARK, stop=[f"{MARK} stop"], stream=True), 200),
    ("completions", complete(MARK, n=2, stream=True), 200),
    ("chat/completions", chat(MARK, temperature=99), 400),
    ("chat/completions", chat(MARK, response_format={MARK: MARK}), 400),
    ("chat/completions", {"model": MODEL, "messages": MARK}, 400),
    ("chat/completions", {"model": MODEL, "messages": [{"role": MARK, "content": MARK}]}, 400),
    ("chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": {MARK: 1}}]}, 400),
    ("chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": MARK, MARK: 1}]}, 400),
    ("chat/completions", chat(f"{MARK} RAISE"), 400),
    ("chat/completions", chat(f"{MARK} TYPE"), 400),
    ("chat/completions", chat(MARK * 400), 400),
    ("completions", complete(MARK * 4000), 400),
    ("completions", complete(f"{MARK}\ud800"), 400),
    ("completions", {"model": MODEL, "prompt": {MARK: MARK}}, 400),
    ("completions", complete(MARK, **{MARK: MARK}), 400),
    ("completions", complete(f"{MARK} BREAKTOKENIZER"), 500),
    ("chat/completions", chat(f"{MARK} BREAKTOKENIZER"), 500),
    ("completions", complete(f"{MARK} {FAILING}", stop=[MARK]), 500),
)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("form", ["json", pytest.param("text", marks=pytest.mark.soak)])
def test_no_prompt_is_in_any_log_or_span(stack: FaultStack, form: str) -> None:
    # The first token may depend on the text before the word.
    deadly, failing = (",".join(map(str, stack.tokenizer.encode(word).ids[-3:])) for word in (DEADLY, FAILING))
    assert deadly != failing
    with running_collector() as collector:
        flags = ("--log-format", form, "--log-level", "debug", "--otlp-endpoint", collector.url)

        def worker() -> QuireProcess:
            return leaky(
                stack,
                *("worker", *flags, "--worker-id", "a", "--dtype", "float32", "--threads", "1"),
                *("--lease-s", "1", "--beat-s", "0.25"),
                TEST_DEADLY=deadly,
                TEST_FAILING=failing,
            )

        workers = [worker()]
        gateway = leaky(stack, "gateway", *flags, "--port", "0")
        url = gateway.wait_for(r"listening on (http://[\d.]+:\d+)")[1]
        workers[0].wait_for("ready: worker")
        for path, body, status in CALLS:
            stream = Stream(url, body, path=f"/v1/{path}").wait_end()
            assert stream.status == status, (path, body, stream.status, stream.text_body)
        poison = Stream(url, complete(f"{MARK} {DEADLY}"))
        while poison._thread.is_alive():
            stack.wait(lambda: not poison._thread.is_alive() or workers[-1].process.poll() is not None, 60)
            if workers[-1].process.poll() is not None:
                workers.append(worker())
        assert poison.wait_end().status == 500
        assert "quarantined" in poison.text_body
        collector.wait(lambda spans: any(s.attributes.get("quire.outcome") == "quarantined" for s in spans))
        stack.close()
        for process in (gateway, *workers):
            assert MARK not in process.stdout + process.stderr
            if form == "json":
                assert all(isinstance(json.loads(line), dict) for line in process.stderr.splitlines())
        assert "failed unexpectedly" in gateway.stderr  # the errors did occur
        assert "builtins.ValueError: (text withheld" in gateway.stderr
        assert any("step failed" in process.stderr for process in workers)
        assert len(collector.spans) > len(CALLS)
        assert not [body for body in collector.bodies if MARK.encode() in body]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_prompts_are_logged_where_that_is_asked_for(stack: FaultStack) -> None:
    gateway = leaky(stack, "gateway", "--log-format", "json", "--log-prompts", "--port", "0")
    url = gateway.wait_for(r"listening on (http://[\d.]+:\d+)")[1]
    refused = Stream(url, chat(f"{MARK} {'x' * 100_000}", temperature=99), path="/v1/chat/completions").wait_end()
    Stream(url, complete(f"{MARK} BREAKTOKENIZER")).wait_end()
    gateway.wait_for("failed unexpectedly")
    stack.close()
    lines = [json.loads(line) for line in gateway.stderr.splitlines()]
    asked = [line for line in lines if "prompt" in line]
    assert [MARK in line["prompt"] for line in asked] == [True, True]
    assert asked[0]["request_id"] == refused.response_headers["x-request-id"]
    assert len(asked[0]["prompt"]) == 4096
    [failure] = [line for line in lines if "failed unexpectedly" in line["msg"]]
    assert f"ValueError: cannot tokenize '{MARK}" in failure["exception"]


# --- key secrets ------------------------------------------------------------------------------------------------------
# Secrets of API keys, and the admin key, appear in no log, span, error and Redis value after a load of every kind.


ADMIN = "0123456789abcdef-admin-secret"
# The part of a key that is no secret: its prefix and its id.
PUBLIC_LENGTH = 26


class Caller:
    """Sends requests with a key, and keeps every answer."""

    def __init__(self, url: str) -> None:
        self._parts = urllib.parse.urlsplit(url)
        self.answers: list[bytes] = []

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        connection = http.client.HTTPConnection(self._parts.hostname or "", self._parts.port, timeout=60)
        try:
            data = None if body is None else json.dumps(body)
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, data, {"Content-Type": "application/json", **names})
            response = connection.getresponse()
            answer = response.read()
            self.answers.append(b"".join(f"{n}: {v}\n".encode() for n, v in response.getheaders()) + answer)
            return json.loads(answer)
        finally:
            connection.close()


def values_of(redis: Redis) -> Iterator[bytes]:
    """Yield every key of Redis, and everything that it holds."""
    for key in redis.scan_iter(count=1000):
        yield key
        kind = redis.type(key)
        found: Any
        if kind == b"string":
            found = redis.get(key)
        elif kind == b"hash":
            found = redis.hgetall(key)
        elif kind == b"zset":
            found = redis.zrange(key, 0, -1)
        elif kind == b"stream":
            found = redis.xrange(key)
        else:
            assert kind in (b"none", b"list", b"set"), f"{key!r} has the type {kind!r}"
            continue
        yield from flat(found)


def flat(value: Any) -> Iterator[bytes]:
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from flat(name)
            yield from flat(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from flat(one)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_value_of_redis_is_searched(stack: FaultStack) -> None:
    """The search itself finds a secret in a value of each type."""
    mark = b"a-secret-to-find"
    redis = stack.redis
    redis.set("s", mark)
    redis.hset("h", mapping={mark.decode() + "1": 1, "x": mark})
    redis.zadd("z", {mark: 1})
    redis.xadd("x", {"item": mark})
    assert sum(mark in value for value in values_of(redis)) == 5


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("form", ["json", pytest.param("text", marks=pytest.mark.soak)])
def test_no_secret_of_a_key_is_in_any_log_span_error_or_redis_value(
    stack: FaultStack, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_collector() as collector:
        flags = ("--log-format", form, "--log-level", "debug", "--otlp-endpoint", collector.url)
        workers = [stack.worker("a", *flags, "--lease-s", "1", "--beat-s", "0.25")]
        _, url = stack.gateway(*flags, "--require-keys", "--park-on-budget", "--log-prompts", QUIRE_ADMIN_KEY=ADMIN)
        call = Caller(url)
        operator = {"Authorization": f"Bearer {ADMIN}"}
        # 1) Keys of both ways to make one.
        made = [call("POST", "/admin/keys", {"name": name}, **operator)["key"] for name in ("first", "second", "spent")]
        assert run(CreateKey(name="third", redis_url=stack.redis_server.url), {}) == 0
        [printed] = [line for line in capsys.readouterr().out.split() if line.startswith("sk-quire-")][:1]
        secrets = [*made, printed]
        first, second, spent, third = secrets
        call.answers.clear()  # the answers to `create` have the secret, and only these
        # 2) Calls that succeed, fail and are refused, with the key in either header.
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        for key in (first, second, third):
            call("POST", "/v1/chat/completions", chat, Authorization=f"Bearer {key}", Idempotency_Key="k")
            call("POST", "/v1/responses", {"model": MODEL, "input": "Hello", "max_output_tokens": 8}, x_api_key=key)
            call("POST", "/v1/messages", chat, x_api_key=key)
            call("POST", "/v1/chat/completions", {**chat, "temperature": 99}, Authorization=f"Bearer {key}")
            call("POST", "/v1/chat/completions", {**chat, "model": "none"}, Authorization=f"Bearer {key}")
            call("GET", "/v1/usage", Authorization=f"Bearer {key}")
            call("GET", "/v1/chat/completions/chatcmpl-x/stream", Authorization=f"Bearer {key}")
            call("POST", "/v1/chat/completions", chat, Authorization=f"Bearer {key[:-1]}")
            call("POST", "/v1/chat/completions", chat, Authorization=f"Bearer {key}", x_api_key=second[:-1] + "!")
            call("POST", "/admin/keys", {}, Authorization=f"Bearer {key}")
        # 3) A limit that is reached, a budget that parks an answer, and a worker that dies.
        key_id = spent[9:25]
        call("PUT", f"/admin/keys/{key_id}/limits", {"tokens_per_day": 60, "requests_per_minute": 2}, **operator)
        for _ in range(3):
            call("POST", "/v1/chat/completions", {**chat, "max_tokens": 200}, Authorization=f"Bearer {spent}")
        long = {**chat, "max_tokens": 150, "stream": True}
        Stream(url, long, {"Authorization": f"Bearer {first}"}, path="/v1/chat/completions").wait_end()
        background = {"model": MODEL, "input": "x", "background": True, "max_output_tokens": 100}
        running = call("POST", "/v1/responses", background, Authorization=f"Bearer {second}")["id"]
        os.kill(workers[0].pid, signal.SIGKILL)
        call("POST", f"/v1/responses/{running}/park", Authorization=f"Bearer {second}")
        workers.append(stack.worker("a", *flags, "--lease-s", "1", "--beat-s", "0.25"))
        call("POST", f"/v1/responses/{running}/unpark", Authorization=f"Bearer {second}")
        # 4) A rotation, whose answer has the new secret, and a revocation.
        secrets.append(call("POST", f"/admin/keys/{second[9:25]}/rotate", {"grace_s": 60}, **operator)["key"])
        call.answers.pop()
        call("DELETE", f"/admin/keys/{first[9:25]}", **operator)
        for path in ("/admin/keys", f"/admin/keys/{second[9:25]}", "/admin/accounts", "/admin/audit", "/admin/usage"):
            call("GET", path, **operator)
        for key in secrets:
            call("POST", "/v1/chat/completions", chat, Authorization=f"Bearer {key}")
        stack.wait(stack.is_drained, 30)
        collector.wait(lambda spans: len(spans) > 10)
        stored = list(values_of(stack.redis))
        stack.close()
    hidden = [key[PUBLIC_LENGTH:] for key in secrets] + [ADMIN]
    assert all(len(one) > 20 for one in hidden)
    places = {
        "a log": [(process.stdout + process.stderr).encode() for process in stack.processes],
        "a span": list(collector.bodies),
        "an answer": call.answers,
        "Redis": stored,
    }
    for where, texts in places.items():
        assert texts, where
        for secret in hidden:
            assert not [text for text in texts if secret.encode() in text], f"a secret is in {where}"
    # The load was mixed, and the search had something to find: the ids of the keys are no secrets.
    for code in ("invalid_api_key", "invalid_admin_key", "invalid_value", "model_not_found", "parked", "not_found"):
        assert any(f'"{code}"'.encode() in answer for answer in call.answers), code
    assert any(b'"rate_limit_exceeded"' in one or b'"insufficient_quota"' in one for one in call.answers)
    ids = [key[9:25].encode() for key in secrets]
    assert all(any(one in value for value in stored) for one in ids)
    assert any(ids[1] in text for text in places["a log"])
