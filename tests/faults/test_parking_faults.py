"""Requests are parked in the middle of their answers (case 34), and continue elsewhere token for token."""

from __future__ import annotations

import http.client
import json
import os
import signal
import urllib.parse
from typing import Any

import pytest

from quire.gateway.features.parking.commands import ParkingSettings
from quire.gateway.features.parking.parked_requests import run
from tests.support.faults.calls import FAST, REQUESTS, body
from tests.support.faults.stack import KEYS, FaultStack, Stream, said

pytestmark = pytest.mark.timeout(120)

PATH = "/v1/completions"
# A JSON answer that is drawn, and long enough to be parked in its middle.
JSON_CALL: dict[str, Any] = {
    "model": "tiny",
    "prompt": "w10 w20 w30 json",
    "temperature": 1,
    "seed": 5,
    "max_tokens": 300,
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "place",
            "schema": {
                "type": "object",
                "properties": {"place": {"type": "string", "minLength": 80, "maxLength": 90}},
                "required": ["place"],
                "additionalProperties": False,
            },
        },
    },
}


def bodies() -> dict[str, dict[str, Any]]:
    return {**{name: body(name) for name in REQUESTS}, "json": JSON_CALL}


def answers(url: str) -> dict[str, list[str]]:
    """Return the choices of all requests without faults."""
    calls = {name: Stream(url, call) for name, call in bodies().items()}
    for call in calls.values():
        assert call.wait_end().status == 200, call.text_body
    return {name: [said([choice]) for choice in call.answer["choices"]] for name, call in calls.items()}


def post(url: str, path: str) -> dict[str, Any]:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    try:
        connection.request("POST", path)
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        assert response.status == 200, answer
        return answer
    finally:
        connection.close()


def id_of(stream: Stream) -> str:
    return stream.response_headers["x-quire-request-id"]


def open_streams(url: str) -> dict[str, Stream]:
    streams = {name: Stream(url, call | {"stream": True}) for name, call in bodies().items()}
    for stream in streams.values():
        stream.wait_events(10)
    return streams


def park(url: str, streams: dict[str, Stream]) -> None:
    for stream in streams.values():
        assert post(url, f"{PATH}/cmpl-{id_of(stream)}/park")["parked"] is True


def assert_parked(streams: dict[str, Stream]) -> None:
    """Check that each stream has ended with the error `parked`."""
    for stream in streams.values():
        stream.wait_end()
        assert stream.error is not None
        assert stream.error["code"] == "parked"


def resume(url: str, stream: Stream) -> Stream:
    last = next((event.id for event in reversed(stream.events) if event.id), "0")
    path = f"{PATH}/cmpl-{id_of(stream)}/stream"
    return Stream(url, {}, {"Last-Event-ID": last}, path=path, method="GET")


def assert_whole(streams: dict[str, Stream], rests: dict[str, Stream], expected: dict[str, list[str]]) -> None:
    """Check that what the clients got before and after is the answer of a run without parking."""
    for name, rest in rests.items():
        assert rest.wait_end().is_complete, rest.error
        found = [said(streams[name].choices(n) + rest.choices(n)) for n in range(len(expected[name]))]
        assert found == expected[name]


@pytest.mark.slow
def test_parked_answers_go_on_at_another_worker_and_gateway_token_for_token(stack: FaultStack) -> None:
    """Everything but the data of Redis is replaced while the answers are parked."""
    gateway, url = stack.gateway()
    worker = stack.worker("a", *FAST)
    expected = answers(url)
    streams = open_streams(url)
    park(url, streams)
    assert_parked(streams)
    assert worker.process.poll() is None
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    gateway.kill()
    assert stack.redis_server.process is not None
    stack.redis_server.process.kill()
    stack.redis_server.process.wait()
    stack.redis_server.start()
    _, url = stack.gateway()
    stack.worker("b", *FAST)
    assert stack.redis.zcard(KEYS.parked) == len(streams)
    for stream in streams.values():
        assert post(url, f"{PATH}/cmpl-{id_of(stream)}/unpark")["parked"] is False
    rests = {name: resume(url, stream) for name, stream in streams.items()}
    assert_whole(streams, rests, expected)
    stack.assert_invariants()


@pytest.mark.faults
def test_a_worker_that_is_killed_before_it_learns_of_the_parking_changes_nothing(stack: FaultStack) -> None:
    _, url = stack.gateway()
    worker = stack.worker("a", *FAST)
    expected = answers(url)
    streams = open_streams(url)
    worker.send(signal.SIGSTOP)
    park(url, streams)
    os.kill(worker.pid, signal.SIGKILL)
    assert_parked(streams)
    stack.worker("b", *FAST)
    for stream in streams.values():
        post(url, f"{PATH}/cmpl-{id_of(stream)}/unpark")
    assert_whole(streams, {name: resume(url, stream) for name, stream in streams.items()}, expected)
    assert {int(stack.redis.hget(key, "deaths") or 0) for key in stack.redis.scan_iter(KEYS.prefix + "req:*")} == {0}
    stack.assert_invariants()


@pytest.mark.faults
def test_a_worker_that_sleeps_through_the_parking_is_fenced(stack: FaultStack) -> None:
    _, url = stack.gateway()
    worker = stack.worker("a", *FAST)
    expected = answers(url)
    streams = open_streams(url)
    worker.send(signal.SIGSTOP)
    park(url, streams)
    assert_parked(streams)
    stack.worker("b", *FAST)
    for stream in streams.values():
        post(url, f"{PATH}/cmpl-{id_of(stream)}/unpark")
    rests = {name: resume(url, stream) for name, stream in streams.items()}
    rests["greedy"].wait_events(5)
    worker.send(signal.SIGCONT)
    assert_whole(streams, rests, expected)
    worker.wait_for("is lost: it ended or is parked, or another worker has claimed it")
    stack.assert_invariants()


@pytest.mark.faults
def test_a_worker_of_a_machine_that_is_taken_away_parks_what_runs(stack: FaultStack) -> None:
    _, url = stack.gateway()
    worker = stack.worker("a", *FAST, "--drain-s", "0.2", "--park-on-drain-s", "3600")
    expected = answers(url)
    streams = open_streams(url)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    worker.wait_for("requests are parked for 3600 s at most")
    assert_parked(streams)
    stack.worker("b", *FAST)
    assert run(ParkingSettings(action="unpark", redis_url=stack.redis_server.url), {}) == 0
    assert_whole(streams, {name: resume(url, stream) for name, stream in streams.items()}, expected)
    stack.assert_invariants()


@pytest.mark.faults
def test_an_operator_parks_everything_and_queues_it_again(stack: FaultStack) -> None:
    _, url = stack.gateway()
    stack.worker("a", *FAST)
    expected = answers(url)
    streams = open_streams(url)
    url_of_redis = stack.redis_server.url
    assert run(ParkingSettings(action="park", worker="a", redis_url=url_of_redis), {}) == 0
    assert_parked(streams)
    assert stack.redis.zcard(KEYS.parked) == len(streams)
    assert run(ParkingSettings(action="unpark", redis_url=url_of_redis), {}) == 0
    assert_whole(streams, {name: resume(url, stream) for name, stream in streams.items()}, expected)
    stack.assert_invariants()


@pytest.mark.faults
def test_a_parked_answer_that_nobody_wants_ends_after_its_retention(stack: FaultStack) -> None:
    _, url = stack.gateway("--parking-retention-s", "1")
    stack.worker("a", *FAST)
    stream = Stream(url, body("greedy") | {"stream": True}).wait_events(10)
    park(url, {"greedy": stream})
    assert_parked({"greedy": stream})
    stack.wait(lambda: stack.totals().get("deadline") == 1)
    assert stack.totals() == {"accepted": 1, "deadline": 1}
    rest = resume(url, stream).wait_end()
    assert rest.error is not None
    assert rest.error["code"] == "deadline_exceeded"
    stack.assert_invariants()
