"""The internal server over a real engine thread: health, metrics, the block map, and their failures."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from quire.shared.protocol.broker import Broker
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.shared.telemetry.internal_server import PortError, bind
from quire.shared.telemetry.loop_lag import LoopLag
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.inspect import admin_server
from quire.worker.inspect.admin_server import WorkerAdminServer
from quire.worker.inspect.metrics import WorkerMetrics
from quire.worker.queue.committer import Committer
from quire.worker.queue.counts import ClaimCounts
from quire.worker.queue.engine_thread import EngineGone, EngineThread
from quire.worker.queue.metrics import QueueMetrics
from tests.support.mock_model import EOS, MockModel

LIMITS = EngineLimits(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=128)
REQUEST = GenerationRequest(
    "r1", "mock", tuple(range(1, 12)), SamplingParams(40, n=4, temperature=1.0, ignore_eos=True)
)


class Gated(MockModel):
    """Computes a step only when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)

    def forward(self, batch, cache):  # type: ignore[no-untyped-def]
        self.entered.release()
        assert self.go_on.acquire(timeout=30)
        return super().forward(batch, cache)


class Deadly(MockModel):
    def forward(self, batch, cache):  # type: ignore[no-untyped-def]
        raise SystemExit("the library aborted")


class Operator:
    """Reads the server as an operator does."""

    def __init__(self, loop: EngineThread, url: str, session: aiohttp.ClientSession) -> None:
        self.loop = loop
        self._url = url
        self._session = session

    async def get(self, path: str, method: str = "GET") -> tuple[int, dict]:  # type: ignore[type-arg]
        async with self._session.request(method, self._url + path) as response:
            assert response.content_type == "application/json"
            return response.status, await response.json()

    async def metrics(self) -> dict[str, float]:
        """Samples by name and the value of their label."""
        async with self._session.get(self._url + "/metrics") as response:
            assert response.status == 200
            assert response.content_type == "text/plain"
            families = text_string_to_metric_families(await response.text())
        return {" ".join([one.name, *one.labels.values()]): one.value for family in families for one in family.samples}


@asynccontextmanager
async def serving(model: MockModel | None = None) -> AsyncIterator[Operator]:
    loop = EngineThread(
        Engine(model or MockModel(), LIMITS, (EOS,), None), lambda commits, computed: None, lambda: None
    )
    broker = Broker(Redis(), "mock")
    committer = Committer(broker, "w1", on_lost=lambda: None)
    info = {"model": "mock", "dtype": "float32"}
    metrics = WorkerMetrics(loop, QueueMetrics(broker, ClaimCounts(), committer, LoopLag()), info)
    server = WorkerAdminServer(loop, bind("127.0.0.1", 0), metrics).server
    loop.start()
    await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Operator(loop, server.url, session)
    finally:
        loop.stop()
        await server.close()
        await asyncio.to_thread(loop.join)


async def test_an_idle_engine_is_healthy_and_holds_nothing() -> None:
    async with serving() as operator:
        assert await operator.get("/health") == (200, {"status": "ok", "steps": 0})
        status, found = await operator.get("/debug/blocks")
        assert (status, found["blocks"], found["sequences"]) == (200, [], [])
        metrics = await operator.metrics()
    assert metrics["quire_kv_blocks free"] == metrics["quire_kv_capacity_blocks"] == 64
    assert metrics["quire_engine_steps_total"] == 0
    assert metrics["quire_worker_info float32 mock"] == 1


async def test_between_two_steps_everything_of_a_running_request_is_shown() -> None:
    model = Gated()
    async with serving(model) as operator:
        operator.loop.add(REQUEST, "attempt", ())
        await asyncio.to_thread(model.entered.acquire)
        asked = asyncio.gather(operator.metrics(), operator.get("/debug/blocks"))
        async with asyncio.timeout(60):
            while len(operator.loop._calls) < 2:  # noqa: ASYNC110 - nothing tells when a call is queued
                await asyncio.sleep(0.001)
        for _ in range(41):
            model.go_on.release()
        metrics, (status, found) = await asked
    assert status == 200
    assert metrics["quire_engine_steps_total"] == 1, "after the step that was under way"
    assert metrics["quire_sequences running"] == 4
    assert metrics["quire_kv_sharing_saved_blocks"] == 9
    assert metrics["quire_kv_blocks shared"] == 3
    assert metrics["quire_engine_tokens_total prefill"] == 11
    assert metrics["quire_forks_total"] == 3
    first = found["blocks"][0]
    assert first["sequences"] == ["r1/0", "r1/1", "r1/2", "r1/3"]
    assert (first["refs"], first["filled"], first["shared"]) == (4, 4, True)
    assert [sequence["choice"] for sequence in found["sequences"]] == [0, 1, 2, 3]
    assert {sequence["state"] for sequence in found["sequences"]} == {"running"}


async def test_an_engine_that_hangs_is_a_503_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_server, "ANSWER_S", 0.05)
    model = Gated()
    async with serving(model) as operator:
        operator.loop.add(REQUEST, "attempt", ())
        await asyncio.to_thread(model.entered.acquire)
        status, answer = await operator.get("/metrics")
        assert (status, answer) == (503, {"error": "the engine is busy: no answer within 0.05 s"})
        assert (await operator.get("/health"))[0] == 200, "a long step is no failure"
        monkeypatch.setattr(admin_server, "WORKER_TTL_S", 0)
        status, answer = await operator.get("/health")
        assert status == 503
        assert re.fullmatch(r"the engine has not moved for \d+ s", answer["reason"])
        for _ in range(41):
            model.go_on.release()


async def test_a_dead_engine_says_what_it_died_of() -> None:
    async with serving(Deadly()) as operator:
        operator.loop.add(REQUEST, "attempt", ())
        await asyncio.to_thread(operator.loop.join)
        status, answer = await operator.get("/health")
        assert status == 503
        assert "the library aborted" in answer["reason"]
        assert (await operator.get("/metrics"))[0] == 503
        with pytest.raises(EngineGone):
            operator.loop.call(lambda engine: engine.num_steps).result(timeout=60)


async def test_unknown_paths_and_methods_are_json_too() -> None:
    async with serving() as operator:
        status, answer = await operator.get("/blocks")
        assert (status, answer) == (
            404,
            {"error": "there is no /blocks; there are /metrics, /health and /debug/blocks"},
        )
        assert (await operator.get("/health", "POST"))[0] == 405


def test_a_port_in_use_and_an_address_of_another_machine_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=f"--internal-port {port} on 127.0.0.1: .* give another one, or 0"):
            bind("127.0.0.1", port)
    with pytest.raises(PortError, match=r"--internal-host 192\.0\.2\.1: .* such as 127\.0\.0\.1"):
        bind("192.0.2.1", 0)
