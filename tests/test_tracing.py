"""Traces of real processes as a real collector receives them, and logs without prompts or answers."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.conftest import QuireProcess
from tests.support.checkpoints import make_checkpoint
from tests.support.collector import Collector, running_collector
from tests.support.faults.stack import MODEL, FaultStack, Stream

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
pytestmark = pytest.mark.slow

SERVER = "POST /v1/completions"
FULL = {SERVER, "queue", "prefill", "decode"}
LEASE = ("--lease-s", "2", "--beat-s", "0.25")
# An answer of three seconds and more: a process dies inside of it.
LONG = 300


def asks(tokens: int = 16, **parameters: object) -> dict[str, object]:
    return {
        "model": MODEL,
        "prompt": "once upon a time",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        **parameters,
    }


def records(process: QuireProcess) -> list[dict[str, object]]:
    """The log of a process whose log is JSON: each line is one record."""
    return [json.loads(line) for line in process.stderr.splitlines()]


class Traced:
    """A gateway and a worker that trace."""

    def __init__(self, stack: FaultStack, collector: Collector) -> None:
        self.stack = stack
        self.collector = collector
        self.flags = ("--log-format", "json", "--otlp-endpoint", collector.url)
        self.worker = stack.worker("a", *self.flags, ready=False)
        self.gateway, self.url = stack.gateway(*self.flags)
        self.worker.wait_for("ready: worker")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "long", "llama", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Traced]:
    stack = FaultStack(tmp_path_factory.mktemp("traced"), model)
    with running_collector() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        try:
            yield Traced(stack, collector)
        finally:
            stack.close()


@pytest.fixture
def stack(tmp_path: Path, model: Path) -> Iterator[FaultStack]:
    stack = FaultStack(tmp_path, model)
    try:
        yield stack
    finally:
        stack.close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with running_collector() as collector:
        yield collector


def test_a_call_is_one_trace_from_the_client_to_the_last_token(traced: Traced) -> None:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    body = asks(temperature=0.5, top_p=0.9, top_k=7, seed=11, frequency_penalty=0.25, n=2)
    stream = Stream(traced.url, body, headers).wait_end()
    assert stream.is_complete
    spans = traced.collector.trace(TRACE, FULL)
    assert spans.keys() == FULL

    server = spans[SERVER]
    request_id = stream.response_headers["x-request-id"]
    assert server.parent_id == SPAN
    assert (server.service, server.kind, server.failed) == ("quire-gateway", 2, False)
    first_chunk_s = server.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < first_chunk_s <= (server.ended_ns - server.began_ns) / 1e9
    assert server.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 16,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 11,
        "gen_ai.request.frequency_penalty": 0.25,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": True,
        "gen_ai.response.id": f"cmpl-{request_id}",
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": server.attributes["gen_ai.usage.input_tokens"],
        "gen_ai.usage.output_tokens": 32,
        "quire.request.id": request_id,
        "quire.outcome": "length",
        "quire.joined": False,
    }
    assert server.events == ["first token"]

    queue, prefill, decode = spans["queue"], spans["prefill"], spans["decode"]
    for span in (queue, prefill, decode):
        assert span.parent_id == server.span_id
        assert span.service == "quire-worker"
        assert span.resource["service.instance.id"] == "a"
        assert span.attributes["quire.request.id"] == request_id
        assert (span.attributes["quire.worker.id"], span.attributes["quire.attempt"]) == ("a", 1)
    assert server.began_ns <= queue.began_ns + 2_000_000  # Redis counts in whole milliseconds
    assert queue.began_ns <= queue.ended_ns <= prefill.began_ns <= prefill.ended_ns == decode.began_ns < decode.ended_ns
    assert queue.attributes["quire.priority"] == "standard"
    assert prefill.attributes["gen_ai.usage.input_tokens"] == server.attributes["gen_ai.usage.input_tokens"] > 0
    assert decode.attributes["gen_ai.usage.output_tokens"] == 32
    assert decode.attributes["quire.outcome"] == "length"


def test_the_log_is_json_with_ids_and_figures(traced: Traced) -> None:
    stream = Stream(traced.url, asks()).wait_end()
    request_id = stream.response_headers["x-request-id"]
    traced.gateway.wait_for(request_id)
    [line] = [r for r in records(traced.gateway) if r.get("request_id") == request_id]
    assert datetime.fromisoformat(str(line["ts"])).tzinfo is not None
    assert (line["level"], line["logger"]) == ("info", "gateway.access")
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["outcome"], line["tokens"]) == ("length", 16)
    assert re.fullmatch("[0-9a-f]{32}", str(line["gateway"]))
    assert 0 < float(str(line["ttft_ms"])) <= float(str(line["duration_ms"]))
    trace_id = str(line["trace_id"])
    assert f"trace={trace_id}" in str(line["msg"])
    assert traced.collector.trace(trace_id, FULL)[SERVER].parent_id == ""
    assert {r["worker"] for r in records(traced.worker)} == {"a"}


@pytest.mark.parametrize("wrong", [f"00-{TRACE[::-1]}-{SPAN}", f"00-{'0' * 32}-{SPAN}-01"])
def test_a_wrong_traceparent_is_as_none(traced: Traced, wrong: str) -> None:
    stream = Stream(traced.url, asks(), {"traceparent": wrong}).wait_end()
    request_id = stream.response_headers["x-request-id"]
    spans = traced.collector.wait(
        lambda spans: [s for s in spans if s.name == SERVER and s.attributes.get("quire.request.id") == request_id]
    )
    [server] = [s for s in spans if s.name == SERVER and s.attributes.get("quire.request.id") == request_id]
    assert server.parent_id == ""
    assert server.trace_id not in wrong


def test_what_the_client_does_not_sample_is_not_sent(traced: Traced) -> None:
    unsampled = TRACE[::-1]
    Stream(traced.url, asks(), {"traceparent": f"00-{unsampled}-{SPAN}-00"}).wait_end()
    last = Stream(traced.url, asks(), {"traceparent": f"00-{TRACE[:-1]}0-{SPAN}-01"}).wait_end()
    assert last.is_complete
    traced.collector.trace(f"{TRACE[:-1]}0", FULL)
    assert not [span for span in traced.collector.spans if span.trace_id == unsampled]


def test_a_refusal_is_a_span_without_anything_behind_it(traced: Traced) -> None:
    trace_id = TRACE[1:] + "a"
    Stream(traced.url, asks(temperature=99), {"traceparent": f"00-{trace_id}-{SPAN}-01"}).wait_end()
    server = traced.collector.trace(trace_id, {SERVER})[SERVER]
    assert server.attributes["http.response.status_code"] == 400
    assert server.attributes["quire.refusal"] == "invalid_request"
    assert not server.failed  # the client's fault, not the server's


def test_a_released_and_a_killed_request_are_recoveries_linked_to_what_they_follow(
    stack: FaultStack, collector: Collector
) -> None:
    flags = ("--otlp-endpoint", collector.url, *LEASE)
    first = stack.worker("a", *flags, "--drain-s", "0.1", ready=False)
    _, url = stack.gateway(*flags[:2])
    first.wait_for("ready: worker")
    # 1) The worker ends in the middle, and hands the request back.
    released = TRACE[::-1]
    stream = Stream(url, asks(LONG), {"traceparent": f"00-{released}-{SPAN}-01"}).wait_events(20)
    first.send(signal.SIGTERM)
    assert first.wait() == 0
    second = stack.worker("b", *flags)
    assert stream.wait_end().is_complete
    spans = collector.wait(
        lambda spans: (
            len([span for span in spans if span.name == "decode"]) == 2 and SERVER in {span.name for span in spans}
        )
    )
    [decode] = [s for s in spans if s.name == "decode" and s.resource["service.instance.id"] == "a"]
    [prefill] = [s for s in spans if s.name == "prefill"]
    [recovery] = [s for s in spans if s.name == "recovery"]
    assert decode.attributes["quire.outcome"] == "released"
    assert decode.attributes["gen_ai.usage.output_tokens"] == recovery.attributes["quire.recovery.earlier_tokens"]
    assert recovery.links == [(released, prefill.span_id)]
    assert recovery.attributes["quire.recovery.deaths"] == 0
    # 2) The next worker is killed.
    stream = Stream(url, asks(LONG), {"traceparent": f"00-{TRACE}-{SPAN}-01"}).wait_events(20)
    earlier = collector.trace(TRACE, {"queue", "prefill"})
    second.send(signal.SIGKILL)
    third = stack.worker("c", *flags)
    assert stream.wait_end().is_complete
    found = collector.trace(TRACE, {SERVER, "queue", "prefill", "recovery", "decode"})
    server, recovery, decode = found[SERVER], found["recovery"], found["decode"]
    assert recovery.parent_id == decode.parent_id == server.span_id
    assert recovery.links == [(TRACE, earlier["prefill"].span_id)]
    assert recovery.resource["service.instance.id"] == decode.resource["service.instance.id"] == "c"
    tokens = recovery.attributes["quire.recovery.earlier_tokens"]
    assert tokens >= 20
    assert (recovery.attributes["quire.recovery.deaths"], recovery.attributes["quire.attempt"]) == (1, 2)
    assert decode.attributes["gen_ai.usage.output_tokens"] == LONG - tokens
    assert server.attributes["gen_ai.usage.output_tokens"] == LONG
    assert server.began_ns <= recovery.began_ns <= recovery.ended_ns == decode.began_ns
    assert len([span for span in collector.spans if span.name == "queue" and span.trace_id == TRACE]) == 1
    third.send(signal.SIGTERM)
    assert third.wait() == 0


@pytest.mark.alone
@pytest.mark.soak
@pytest.mark.parametrize("fault", ["refuses", "is silent"])
def test_a_collector_that_is_away_costs_nothing_that_can_be_seen(stack: FaultStack, fault: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if fault == "is silent":
            listener.listen(8)
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        worker = stack.worker("a", "--otlp-endpoint", endpoint, ready=False)
        traced, traced_url = stack.gateway("--otlp-endpoint", endpoint)
        plain, plain_url = stack.gateway()
        worker.wait_for("ready: worker")
        # The C part of protobuf, which only the exporter needs.
        assert "google/_upb" in Path(f"/proc/{traced.pid}/maps").read_text()
        assert "google/_upb" not in Path(f"/proc/{plain.pid}/maps").read_text()

        def median_s(url: str) -> float:
            times = []
            for _ in range(30):
                began = time.monotonic()
                assert Stream(url, asks(4)).wait_end().is_complete
                times.append(time.monotonic() - began)
            return sorted(times)[15]

        median_s(plain_url)
        with_s, without_s = median_s(traced_url), median_s(plain_url)
        assert with_s < 1.5 * without_s + 0.01, (with_s, without_s)
        traced.wait_for("traces cannot be sent to")
        worker.wait_for("traces cannot be sent to")
        began = time.monotonic()
        for process in (plain, traced, worker):
            process.send(signal.SIGTERM)
        for process in (plain, traced, worker):
            assert process.wait() == 0
            assert time.monotonic() - began < 6  # two seconds of it for traces; the machine may be busy
        for process in (traced, worker):
            assert process.stderr.count("traces cannot be sent") == 1
            assert "Traceback" not in process.stderr
