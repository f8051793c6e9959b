"""A line is submitted under the limits of its key, and is found again after its gateway has died."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire.gateway.batches.line import call_id_of
from quire.gateway.batches.line_run import SHARE
from quire.shared.accounts.store import AccountStore
from quire.shared.keys import LINE_RETENTION_S
from quire.shared.messages import GenerationRequest, Outcome
from tests.gateway.conftest import Start
from tests.support.gateway.batch_calls import BatchClient, chat_line, jsonl
from tests.support.gateway.batch_keys import with_key
from tests.support.gateway.fake_worker import Steps, emit
from tests.support.gateway.running import RunningGateway, until


@pytest.fixture
async def gateway(start_gateway: Start, tmp_path: Path) -> RunningGateway:
    return await start_gateway(files_dir=str(tmp_path / "files"))


async def test_lines_are_charged_to_the_key_of_the_batch(gateway: RunningGateway) -> None:
    client, key_id = await with_key(gateway)
    async with gateway.worker(emit([ord("a"), ord("b")])):
        batch = await client.ended((await client.create(jsonl([chat_line(number) for number in range(20)])))["id"])
    (row,) = (await client.json("GET", "/v1/usage"))["data"]
    assert (row["key"], row["requests"], row["completion_tokens"]) == (key_id, 20, 40)
    assert row["prompt_tokens"] == batch["usage"]["input_tokens"]


async def test_a_limit_per_minute_makes_lines_wait(gateway: RunningGateway) -> None:
    """Six calls are allowed at once; the others follow one per tenth of a second."""
    client, _ = await with_key(gateway, requests_per_minute=600, concurrent_requests=3)
    most = 0

    async def script(request: GenerationRequest) -> Steps:
        nonlocal most
        waiting = len([one for one in worker.claimed if one.id not in worker.steps])
        most = max(most, waiting)
        await asyncio.sleep(0.01)
        yield (), Outcome("stop")

    async with gateway.worker(script) as worker:
        batch = await client.ended((await client.create(jsonl([chat_line(number) for number in range(20)])))["id"])
    assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert 1 <= most <= 3


async def test_a_spent_budget_fails_lines_as_over_http(gateway: RunningGateway) -> None:
    client, _ = await with_key(gateway, tokens_per_day=200)
    lines = [chat_line(number, max_tokens=50) for number in range(10)]
    async with gateway.worker(emit([ord("a")] * 50)):
        batch = await client.ended((await client.create(jsonl(lines)))["id"])
    assert batch["status"] == "completed"
    _, errors = await client.outputs(batch)
    assert 7 <= len(errors) <= 9
    assert {(one["response"]["status_code"], one["response"]["body"]["error"]["code"]) for one in errors} == {
        (402, "insufficient_quota")
    }


async def test_a_limit_that_one_line_alone_exceeds_fails_this_line(gateway: RunningGateway) -> None:
    client, _ = await with_key(gateway, tokens_per_minute=100)
    lines = [chat_line(1, max_tokens=300), chat_line(2, max_tokens=5)]
    async with gateway.worker(emit([ord("a")])):
        batch = await client.ended((await client.create(jsonl(lines)))["id"])
    output, errors = await client.outputs(batch)
    assert [one["custom_id"] for one in output] == ["line-2"]
    assert [one["response"]["status_code"] for one in errors] == [429]


async def test_lines_of_a_key_that_was_revoked_are_refused(gateway: RunningGateway) -> None:
    client, key_id = await with_key(gateway)
    gateway.gateway.draining = True  # no line is submitted before
    batch = await client.create(jsonl([chat_line(number) for number in range(3)]))
    store = AccountStore(gateway.gateway.process.account_client, "test")
    await store.revoke(key_id)
    gateway.gateway.process.key_ring.forget()
    gateway.gateway.draining = False
    keys, redis = gateway.gateway.broker.keys, gateway.gateway.process.account_client

    async def has_failed() -> bool:
        return await redis.hget(f"quire:{{batches!}}:batch:{batch['id'][6:]}", "status") == b"failed"

    await until(has_failed)
    errors = await redis.hget(f"quire:{{batches!}}:batch:{batch['id'][6:]}", "errors")
    assert b"invalid_api_key" in errors
    assert await gateway.gateway.broker.client.exists(keys.totals) == 0


async def test_models_of_the_key_are_those_of_the_lines(gateway: RunningGateway) -> None:
    client, _ = await with_key(gateway, models=["another"])
    batch = await client.ended((await client.create(jsonl([chat_line(1)])))["id"])
    assert batch["status"] == "failed"
    assert batch["errors"]["data"][0]["code"] == "model_not_found"


async def test_the_request_of_a_line_waits_for_its_collection(gateway: RunningGateway) -> None:
    client = BatchClient(gateway)
    batch = await client.create(jsonl([chat_line(1)]))
    broker, key = gateway.gateway.broker, call_id_of(batch["id"].removeprefix("batch_"), 1)

    async def is_queued() -> bool:
        return bool(await broker.client.exists(broker.keys.request(key)))

    await until(is_queued)
    names = ("class", "background", "retention", "state")
    found = dict(zip(names, await broker.client.hmget(broker.keys.request(key), *names), strict=True))
    assert found == {
        "class": b"batch",
        "background": b"1",
        "retention": str(LINE_RETENTION_S).encode(),
        "state": b"queued",
    }
    assert await broker.client.exists(broker.keys.held) == 0
    assert gateway.settings.max_queued_requests // SHARE > 1


async def test_a_line_that_redis_has_lost_runs_again(gateway: RunningGateway) -> None:
    client, runs = BatchClient(gateway), 0

    async def script(request: GenerationRequest) -> Steps:
        nonlocal runs
        runs += 1
        if runs == 1:  # as if Redis had come back without this request
            broker = gateway.gateway.broker
            await broker.client.delete(broker.keys.request(request.id), broker.keys.output(request.id))
            return
        yield (), Outcome("stop")

    async with gateway.worker(script):
        batch = await client.ended((await client.create(jsonl([chat_line(1)])))["id"])
    output, errors = await client.outputs(batch)
    assert len(output) + len(errors) == 1
    assert [one["custom_id"] for one in output] == ["line-1"]
    assert runs == 2
