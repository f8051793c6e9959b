"""The registry of workers: readiness, limits and the lease of the gateway."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.gateway.admission.worker_registry import usable_adapters
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import RunningGateway, tokens


async def test_ready_means_that_a_worker_makes_progress(gateway: RunningGateway) -> None:
    reply = await gateway.get("/readyz")
    assert (reply.status, reply.json) == (
        503,
        {"ready": False, "workers": 0, "problems": ["no worker makes progress"]},
    )
    async with gateway.worker(emit(tokens("a"))) as worker:
        await gateway.gateway.worker_registry.refresh()
        reply = await gateway.get("/readyz")
        assert (reply.status, reply.json) == (200, {"ready": True, "workers": 1, "problems": []})
        await worker.broker.retire(worker.worker_id, "1")
    await gateway.gateway.worker_registry.refresh()
    assert (await gateway.get("/readyz")).status == 503


async def test_the_smallest_context_among_model_and_workers_counts(gateway: RunningGateway) -> None:
    async with (
        gateway.worker(emit(tokens("a")), max_model_len=100),
        gateway.worker(emit(tokens("a")), max_model_len=50, vocab_size=300),
    ):
        await gateway.gateway.worker_registry.refresh()
        reply = await gateway.complete(prompt=[65] * 5, max_tokens=60)
        assert "maximum context length is 50 tokens" in reply.error["message"]
        assert (await gateway.complete(prompt=[300])).error["param"] == "prompt[0]"
        assert (await gateway.get("/v1/models")).json["data"][0]["max_model_len"] == 50


async def test_a_context_may_be_set_smaller_but_not_larger(start_gateway: Start) -> None:
    small, large = await start_gateway(max_model_len=10), await start_gateway(max_model_len=10_000)
    assert (small.gateway.limits.max_model_len, large.gateway.limits.max_model_len) == (10, 512)


async def test_the_lease_of_the_gateway_is_there_while_it_runs(start_gateway: Start) -> None:
    gateway = await start_gateway(gateway_id="g7")
    broker = gateway.gateway.broker
    assert await broker.client.ttl(broker.keys.gateway_lease("g7")) > 0


@pytest.mark.parametrize(
    ("held", "announced", "usable"),
    [
        ([["a@1", "b@2"], ["a@1", "b@2"]], [], {"a": "1", "b": "2"}),
        ([["a@1"], []], [], {}),
        ([["a@1"], []], ["a"], {"a": "1"}),
        ([["a@1"], ["a@2"]], ["a"], {}),
        ([[], []], ["a"], {}),
        ([], ["a"], {}),
    ],
)
def test_calls_may_name_adapters_that_every_worker_can_run(
    held: list[list[str]], announced: list[str], usable: dict[str, str]
) -> None:
    cards: list[Any] = [SimpleNamespace(adapters=tuple(one)) for one in held]
    assert usable_adapters(cards, announced) == usable
