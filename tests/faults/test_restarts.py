"""Every process is restarted while clients wait: every client gets its answer, with the expected text."""

from __future__ import annotations

import ast
import asyncio
import json
import random
import signal
import threading
import time
import urllib.error
import urllib.request

import aiohttp
import pytest

from quire.ops.benchmarks.soak.client import SoakRecord, ask
from quire.ops.local.ports import free_port
from tests.support.faults.calls import FAST, REQUESTS, assert_same, body, start_streams, undisturbed
from tests.support.faults.stack import FaultStack, Stream


class Load:
    """Clients that repeat one request each, and resume when their stream breaks."""

    def __init__(self, urls: list[str], clients: int) -> None:
        self._urls = urls
        self._clients = clients
        self._is_over = threading.Event()
        self.records: list[tuple[str, SoakRecord]] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=30)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._client(session, index) for index in range(self._clients)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        draw = random.Random(number)
        while not self._is_over.is_set():
            name = draw.choice(list(REQUESTS))
            asks = body(name) | {"stream": True, "stream_options": {"include_usage": True}}
            record = await ask(session, self._urls, f"{number}-{draw.randrange(2**60)}", asks, 60)
            self.records.append((name, record))

    def stop(self) -> list[tuple[str, SoakRecord]]:
        """Wait for the end of all requests; return the requests and their results."""
        self._is_over.set()
        self._thread.join(90)
        assert not self._thread.is_alive()
        return self.records


@pytest.mark.faults
@pytest.mark.timeout(240)
def test_rolling_restarts_of_all_workers_and_gateways_fail_no_request(stack: FaultStack) -> None:
    ports = [free_port(), free_port()]
    gateways = [stack.gateway("--drain-s", "0.2", port=port) for port in ports]
    urls = [url for _, url in gateways]
    workers = {name: stack.worker(name, *FAST, "--drain-s", "0.5", ready=False) for name in ("a", "b")}
    for worker in workers.values():
        worker.wait_for("ready: worker")
    expected = undisturbed(urls[0])
    load = Load(urls, 6)
    stack.wait(lambda: load.records)
    for name, worker in workers.items():
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
        stack.worker(name, *FAST, "--drain-s", "0.5")
    for (process, _), port in zip(gateways, ports, strict=True):
        process.send(signal.SIGTERM)
        assert process.wait() == 0
        stack.gateway("--drain-s", "0.2", port=port)
        time.sleep(0.5)
    records = load.stop()
    assert [record.error for _, record in records if record.outcome != "complete"] == []
    for name, record in records:
        for index, whole in enumerate(expected[name]):
            text, logprobs = record.text[index], record.logprobs.get(index, [])
            assert whole.startswith(text)
            # In the format of `said`.
            rows = ast.literal_eval(whole.removeprefix(text).strip() or "[]")
            assert [logprob for _, logprob, _ in rows] == logprobs
    assert max(record.worst_pause_s for _, record in records) < 15
    stack.assert_invariants()
    totals = stack.totals()
    assert totals["accepted"] == len(records) + len(REQUESTS)


@pytest.mark.faults
@pytest.mark.timeout(240)
def test_requests_wait_for_a_worker_until_their_deadline(stack: FaultStack) -> None:
    _, url = stack.gateway()
    worker = stack.worker("a", *FAST)
    expected = undisturbed(url)
    streams = start_streams(url)
    dying = Stream(url, body("greedy") | {"stream": True, "timeout": 2, "max_tokens": 1500}).wait_events(5)
    worker.send(signal.SIGKILL)
    worker.wait()
    began = time.monotonic()
    waiting = {name: Stream(url, body(name) | {"stream": True, "timeout": 300}) for name in REQUESTS}
    late = Stream(url, body("greedy") | {"timeout": 2})
    late_stream = Stream(url, body("greedy") | {"timeout": 2, "stream": True})
    assert late.wait_end().status == 504
    assert late.answer["error"]["code"] == "deadline_exceeded"
    for stream in (late_stream, dying):
        stream.wait_end()
        assert stream.error is not None
        assert stream.error["code"] == "deadline_exceeded"
    assert expected["greedy"][0].startswith(dying.text())
    assert 1.9 < time.monotonic() - began < 6
    # No client within its deadline was refused, and the gateway reports that no worker is available.
    stack.wait(lambda: "no worker makes progress" in readiness(url))
    assert not [stream for stream in (*streams.values(), *waiting.values()) if stream.failure or stream.error]
    stack.worker("a", *FAST)
    assert_same(streams, expected)
    assert_same(waiting, expected)
    stack.assert_invariants()
    # Cancelled requests: their deadline passed, or their client already had its answer.
    totals = stack.totals()
    assert totals["length"] == 3 * len(REQUESTS)
    assert totals.get("deadline", 0) + totals.get("cancelled", 0) == 3
    assert set(totals) <= {"accepted", "length", "deadline", "cancelled"}


def readiness(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=60) as response:
            return str(json.load(response)["problems"])
    except urllib.error.HTTPError as error:
        with error:
            return str(json.load(error)["problems"])
