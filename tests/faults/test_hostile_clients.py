"""Hostile input to a real gateway with a real worker gets an error that names the fault, and affects no other client.

tests/gateway covers every field and value; this file checks that the processes survive.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults.calls import FAST, assert_same, body
from tests.support.faults.stack import FaultStack, Stream

pytestmark = [pytest.mark.slow, pytest.mark.alone]

BODY_TIMEOUT_S = 1.0
HTTP_KEEPALIVE_S = 1.0
MAX_BODY_BYTES = 200_000
# Limit of a gateway's memory growth while it refuses requests.
MORE_MEMORY_BYTES = 32 * 2**20
LONG = 60.0
# The call of a well-behaved client.
SHORT = body("greedy") | {"max_tokens": 50}


class Target:
    """The stack, and the checks that it is unharmed afterwards."""

    def __init__(self, stack: FaultStack) -> None:
        self.stack = stack
        limits = {"max-body-bytes": MAX_BODY_BYTES, "body-timeout-s": BODY_TIMEOUT_S}
        limits["http-keepalive-s"] = HTTP_KEEPALIVE_S
        flags = [part for name, value in limits.items() for part in (f"--{name}", str(value))]
        self.gateway, self.url = stack.gateway(*flags)
        stack.worker("a", *FAST)
        parts = urllib.parse.urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.address = (parts.hostname, parts.port)
        whole = Stream(self.url, SHORT).wait_end()
        self.expected = {"greedy": [whole.answer["choices"][0]["text"]]}
        self.accepted = 1
        self._lock = threading.Lock()

    def good(self, **others: Any) -> Stream:
        """Make a valid call, which must be accepted."""
        self.accept_one()
        return Stream(self.url, SHORT | {"stream": True, **others})

    def accept_one(self) -> None:
        with self._lock:
            self.accepted += 1

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Run a client that makes one call after the other. Check what it got."""
        calls: list[Stream] = []
        is_over = threading.Event()

        def call() -> None:
            while not is_over.is_set():
                calls.append(self.good().wait_end())

        thread = threading.Thread(target=call)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
        for one in calls:
            assert_same({"greedy": one}, self.expected)
            assert one.longest_pause_s < 1.0

    def memory(self) -> int:
        pages = Path(f"/proc/{self.gateway.pid}/statm").read_text().split()[1]
        return int(pages) * 4096

    def raw(self, data: bytes, timeout_s: float = LONG) -> tuple[int, bytes]:
        """Send raw bytes; return the status and the data received until the gateway closes or has answered."""
        with socket.create_connection(self.address, timeout=timeout_s) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):  # the gateway answered before everything was sent
                connection.sendall(data)
            return read_answer(connection)

    def post(self, data: bytes | dict[str, Any], *headers: str, path: str = "/v1/completions") -> tuple[int, bytes]:
        text = data if isinstance(data, bytes) else json.dumps(data).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(text)}"]
        return self.raw("\r\n".join([*lines, *headers, "Connection: close", "", ""]).encode() + text)

    def refused(self, answer: tuple[int, bytes], status: int, param: str | None = None) -> None:
        found, text = answer
        assert found == status, text
        error = json.loads(text.partition(b"\r\n\r\n")[2])["error"]
        assert set(error) == {"message", "type", "param", "code"}
        if param is not None:
            assert error["param"] == param, error


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
            head, end, rest = data.partition(b"\r\n\r\n")
            length = [line[16:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length: ")]
            if end and length and len(rest) >= int(length[0]):
                break
    except ConnectionResetError:
        assert data, "cut without an answer"
    return (int(data.split()[1]) if data else 0), data


@pytest.fixture(scope="module")
def module_target(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> Iterator[Target]:
    stack = FaultStack(tmp_path_factory.mktemp("hostile"), long_model)
    try:
        yield Target(stack)
    finally:
        stack.close()


@pytest.fixture
def target(module_target: Target) -> Iterator[Target]:
    """A stack with a well-behaved client that runs during the test; no hostile request may reach the queue."""
    memory = module_target.memory()
    with module_target.steady():
        yield module_target
    assert module_target.gateway.process.poll() is None
    assert module_target.memory() < memory + MORE_MEMORY_BYTES
    module_target.stack.assert_invariants()
    assert module_target.stack.totals()["accepted"] == module_target.accepted


def head(*lines: str) -> bytes:
    return "\r\n".join(["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *lines]).encode()


@pytest.mark.faults
@pytest.mark.promise
def test_heads_that_dribble_and_bodies_that_stall_are_ended_and_cost_nobody_a_place(target: Target) -> None:
    """Case 22: 300 silent connections, 50 with unfinished request heads, 50 without their bodies."""
    starts = [b""] * 300 + [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"] * 50
    starts += [head("Content-Length: 100") + b'\r\n\r\n{"model"'] * 50
    connections = [socket.create_connection(target.address, timeout=LONG) for _ in starts]
    began = time.monotonic()
    try:
        for connection, data in zip(connections, starts, strict=True):
            connection.sendall(data)
        assert_same({"greedy": target.good()}, target.expected)
        answers = [read_answer(connection) for connection in connections[350:]]
        assert {status for status, _ in answers} == {408}
        for answer in answers:
            target.refused(answer, 408)
        # The gateway closes silent connections and unfinished heads without an answer, seconds after the last byte.
        for connection in connections[300:350]:
            while connection.recv(1024):
                pass
        assert time.monotonic() - began < 4 * (BODY_TIMEOUT_S + HTTP_KEEPALIVE_S) + 5
    finally:
        for connection in connections:
            connection.close()


def test_bodies_and_heads_that_are_too_large_are_refused_before_they_are_read(target: Target) -> None:
    """Case 23, also with chunked bodies. A compressed body is refused without being unpacked."""
    target.refused(target.raw(head(f"Content-Length: {2**40}") + b"\r\n\r\n"), 413)
    chunks = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    target.refused(target.raw(head("Transfer-Encoding: chunked") + b"\r\n\r\n" + chunks * 2000), 413)
    target.refused(target.post(b" " * (MAX_BODY_BYTES + 1)), 413)
    target.refused(target.post(b"\x1f\x8b" + b"\0" * 1000, "Content-Encoding: gzip"), 415)
    target.refused(target.raw(head("X-Large: " + "x" * 100_000) + b"\r\n\r\n"), 431)
    target.refused(target.raw(head(*[f"X-{number}: y" for number in range(10_000)]) + b"\r\n\r\n"), 431)


MALFORMED = {
    "cut": b'{"model": "tiny"',
    "NaN": b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
    "Infinity": b'{"model": "tiny", "prompt": "x", "temperature": -Infinity}',
    "a key twice": b'{"model": "tiny", "prompt": "x", "prompt": "y"}',
    "nested": b'{"prompt": ' + b"[" * 100_000,
    "a number of 100000 digits": b'{"seed": ' + b"1" * 100_000 + b"}",
    "UTF-16": '{"model": "tiny", "prompt": "x"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"model": "tiny", "prompt": "x"}',
    "NUL": b'{"model": "tiny", "prompt": "\x00"}',
    "not UTF-8": b'{"model": "tiny", "prompt": "\xff\xfe"}',
    "nothing": b"",
}


def test_bodies_that_are_not_json_are_400(target: Target) -> None:
    """Case 24."""
    for data in MALFORMED.values():
        target.refused(target.post(data), 400)
        target.refused(target.post(data, path="/v1/chat/completions"), 400)


def test_half_a_surrogate_pair_is_a_400_and_never_reaches_a_worker(target: Target) -> None:
    """Case 25."""
    for name in ("prompt", "stop", "user", "metadata", "model"):
        call = {"model": "tiny", "prompt": "x", name: "\ud83d"}
        target.refused(target.post(call), 400, name)
    messages = [{"role": "user", "content": "\ud83d"}]
    target.refused(target.post({"model": "tiny", "messages": messages}, path="/v1/chat/completions"), 400, "messages")


def test_line_ends_in_names_and_headers_cannot_add_headers_or_events(target: Target) -> None:
    """Case 27."""
    for end in ("\r\n", "\n", "\r", "\u2028"):
        evil = f"x{end}Set-Cookie: a=b{end}{end}data: evil"
        status, text = target.post({"model": evil, "prompt": "x"})
        assert status == 404
        assert b"Set-Cookie" not in text.partition(b"\r\n\r\n")[0]
        target.refused(target.post({"model": "tiny", "prompt": "x", "service_tier": evil}), 400, "service_tier")
        status, text = target.post({"model": "tiny", "prompt": "x", "user": evil, "metadata": {evil: evil}, "n": 0})
        assert status == 400
        assert b"Set-Cookie" not in text.partition(b"\r\n\r\n")[0]
        quoted = urllib.parse.quote(evil)
        for path in (f"/v1/completions/{quoted}/stream", f"/v1/models/{quoted}", f"/{quoted}"):
            status, text = target.raw(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            assert status == 404
            assert b"Set-Cookie" not in text.partition(b"\r\n\r\n")[0]
    identity = "cmpl-" + "0" * 32
    for value in ("1\x0bdata: evil", "a", "-1", "1.0", "99999999999", "1\u00852"):
        request = f"GET /v1/completions/{identity}/stream HTTP/1.1\r\nHost: x\r\nLast-Event-ID: {value}\r\n\r\n"
        status, text = target.raw(request.encode())
        assert status == 400
        assert b"\ndata:" not in text
    # The id of a client comes back; the gateway has its own, and adopts none that cannot be logged.
    status, text = target.post({"model": "none", "prompt": "x"}, "X-Request-Id: mine")
    assert status == 404
    assert b"X-Request-Id: mine\r\n" in text
    assert b"X-Quire-Request-Id: mine" not in text
    for value in ("a\tb", 'a"b', "x" * 500):
        status, text = target.post({"model": "none", "prompt": "x"}, f"X-Request-Id: {value}")
        assert status == 400
        assert value.encode() not in text


HUGE: dict[str, list[Any]] = {
    "n": [10**9, -1, 0, 1.5, "1", True],
    "best_of": [10**9, -1, "2", True],
    "max_tokens": [10**18, -1, 0, 1.5, "5", True],
    "stop": [["x"] * 1000, ["x" * 100_000], [""], 5, [None]],
    "temperature": [1e308, -1, "hot", True],
    "seed": [2**70, 1.5, "1"],
    "top_k": [2**40, -2, 1.5],
    "prompt": ["", [], [[]], [-1], [2**70], [True], {}, None, [1] * 5000],
    "logit_bias": [{"1": 101}, {"1": "x"}, {"x": 1}, {str(10**9): 1}, {str(number): 1 for number in range(1025)}, [1]],
    "response_format": [
        "json",
        {"type": "regex"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"multipleOf": 1000003, "type": "integer"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["x" * 100_000]}}},
    ],
    "logprobs": [10**6, -1, True],
    "timeout": [1e308, -1, 0, "1"],
}


def test_values_that_are_huge_negative_or_of_another_type_are_400_by_name(target: Target) -> None:
    """Case 28."""
    for name, values in HUGE.items():
        for value in values:
            status, text = target.post({"model": "tiny", "prompt": "x", "max_tokens": 5, name: value})
            error = json.loads(text.partition(b"\r\n\r\n")[2])["error"]
            assert status == 400, (name, value, error)
            assert str(error["param"]).startswith(name), (name, value, error)


def test_streams_that_cannot_be_had_are_one_404_whatever_the_reason(target: Target) -> None:
    """Case 29, without API keys: unknown, malformed, foreign and expired ids get the same 404."""
    stack = target.stack
    known = target.good(max_tokens=3).wait_end().parsed[0]["id"]

    def get(identity: str, api: str = "completions") -> Stream:
        return Stream(target.url, {}, method="GET", path=f"/v1/{api}/{identity}/stream").wait_end()

    assert get(known).is_complete
    foreign = known.replace("cmpl-", "chatcmpl-")
    answers = [get("cmpl-" + "0" * 32), get("cmpl-" + "g" * 32), get("cmpl-1"), get("x"), get(known[:-1])]
    answers += [get(known.upper()), get(known, "chat/completions"), get(foreign, "chat/completions")]
    hash_, log = stack.keys.request(known[5:]), stack.keys.output(known[5:])
    stack.redis.delete(hash_, log)
    answers.append(get(known))
    assert {(answer.status, answer.text_body) for answer in answers} == {(404, answers[0].text_body)}
    assert not any(event.data for answer in answers for event in answer.events)


def test_the_same_key_at_the_same_time_is_one_request(target: Target) -> None:
    """Case 14, seen by its clients: 20 calls with one Idempotency-Key are one generation, streamed or not."""
    call = SHORT | {"stream": True}
    target.accept_one()
    with ThreadPoolExecutor(20) as pool:
        streams = list(pool.map(lambda _: Stream(target.url, call, {"Idempotency-Key": "once"}), range(20)))
    for stream in streams:
        assert_same({"greedy": stream}, target.expected)
    other = Stream(target.url, call | {"max_tokens": 7}, {"Idempotency-Key": "once"}).wait_end()
    assert other.status == 409
