"""Too much work, no Redis, no worker: the client is told so, with when to come again."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from quire.gateway.admission.retry import RETRY_S
from quire.ops.paths import PROJECT_ROOT
from tests.gateway.conftest import Start
from tests.gateway.fake_worker import emit
from tests.gateway.running import MODEL, RunningGateway, tokens, until
from tests.support.redis_server import RedisServer, running_redis


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A server that the test may stop."""
    with running_redis("--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


async def queued(gateway: RunningGateway, count: int) -> None:
    async def reached() -> bool:
        return await gateway.queued() == count

    await until(reached)


async def test_a_full_queue_is_a_429_that_says_when_to_come_again(start_gateway: Start) -> None:
    gateway = await start_gateway(max_queued_requests=2)
    waiting = [asyncio.create_task(gateway.chat()) for _ in range(2)]
    await queued(gateway, 2)
    reply = await gateway.chat()
    assert (reply.status, reply.error["type"], reply.error["code"]) == (429, "rate_limit_error", "queue_full")
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    async with gateway.worker(emit(tokens("a"))):
        assert [(await task).status for task in waiting] == [200, 200]
        assert (await gateway.chat()).status == 200


async def test_a_call_that_does_not_fit_as_a_whole_is_not_accepted_in_part(start_gateway: Start) -> None:
    gateway = await start_gateway(max_queued_requests=3)
    reply = await gateway.complete(prompt=["a", "b", "c", "d"])
    assert reply.status == 429
    await queued(gateway, 0)


async def test_the_bound_on_tokens_counts_what_requests_may_use(start_gateway: Start) -> None:
    gateway = await start_gateway(max_queued_tokens=300)
    waiting = asyncio.create_task(gateway.complete(max_tokens=200))
    await queued(gateway, 1)
    assert (await gateway.complete(max_tokens=200)).status == 429
    waiting.cancel()


async def test_without_redis_new_calls_get_503_and_later_ones_are_served_again(
    own_redis: RedisServer, start_gateway: Start
) -> None:
    gateway = await start_gateway(redis_url=own_redis.url)
    own_redis.kill()

    async def unready() -> bool:
        reply = await gateway.get("/readyz")
        return reply.status == 503 and "Redis does not answer" in reply.json["problems"]

    reply = await gateway.chat()
    assert (reply.status, reply.error["code"]) == (503, "broker_unavailable")
    assert int(reply.headers["retry-after"]) >= 1
    await until(unready)
    assert (await gateway.get("/healthz")).status == 200
    # Who comes later does not wait for what has been waited for.
    async with asyncio.timeout(RETRY_S / 2):
        assert (await gateway.chat()).status == 503
        assert (await gateway.post(f"/v1/completions/cmpl-{'0' * 32}/cancel", b"")).status == 503
    own_redis.start()
    await asyncio.wait_for(gateway.gateway.subscription.ready.wait(), 10)
    async with gateway.worker(emit(tokens("a"))):
        assert (await gateway.chat()).status == 200


async def test_a_redis_that_is_soon_back_costs_new_calls_a_wait_and_no_error(
    own_redis: RedisServer, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.gateway.admission.retry.RETRY_S", 20.0)  # however long a start takes here
    gateway = await start_gateway(redis_url=own_redis.url)
    own_redis.kill()
    first = asyncio.create_task(gateway.chat())

    async def lost() -> bool:
        return not gateway.gateway.subscription.ready.is_set()

    await until(lost)
    calls = [first, *(asyncio.create_task(gateway.chat()) for _ in range(3))]
    assert not (await asyncio.wait(calls, timeout=0.5))[0]
    own_redis.start()
    async with gateway.worker(emit(tokens("a"))):
        assert [reply.status for reply in await asyncio.gather(*calls)] == [200] * 4


async def test_a_stream_lives_through_a_restart_of_redis(own_redis: RedisServer, start_gateway: Start) -> None:
    gateway = await start_gateway(redis_url=own_redis.url, keepalive_s=0.2)
    body = {"model": MODEL, "prompt": "x", "stream": True}
    call = asyncio.create_task(gateway.events("/v1/completions", body))
    await queued(gateway, 1)
    own_redis.kill()
    await asyncio.sleep(0)
    own_redis.start()
    async with gateway.worker(emit(tokens("after the restart"))):
        events = await asyncio.wait_for(call, 20)
    assert events[-1].data == "[DONE]"


async def test_a_submission_whose_reply_was_lost_is_made_again_and_accepted_once(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    from redis.exceptions import ConnectionError as RedisConnectionError

    broker = gateway.gateway.broker
    real, calls = broker.submit, []

    async def unlucky(*arguments: Any, **options: Any) -> str:
        first: str = await real(*arguments, **options)
        calls.append(arguments[0])
        if len(calls) < 3:
            raise RedisConnectionError("the reply was lost")
        return first

    monkeypatch.setattr(broker, "submit", unlucky)
    async with gateway.worker(emit(tokens("a"))) as worker:
        assert (await gateway.chat()).status == 200
    assert len(calls) == 3
    assert len(worker.claimed) == 1
    assert await gateway.accepted() == 1


async def test_a_submission_that_stays_unknown_is_cancelled(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    from redis.exceptions import ConnectionError as RedisConnectionError

    broker = gateway.gateway.broker
    real = broker.submit

    async def unlucky(*arguments: Any, **options: Any) -> None:
        await real(*arguments, **options)
        raise RedisConnectionError("the reply was lost")

    monkeypatch.setattr(broker, "submit", unlucky)
    assert (await gateway.chat()).status == 503
    await queued(gateway, 0)


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


async def test_the_log_has_one_line_per_request_and_no_prompt(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with gateway.worker(emit(tokens("an answer"), "stop")):
        reply = await gateway.chat(messages=[{"role": "user", "content": "a secret question"}])
    lines = [record.getMessage() for record in caplog.records if record.name == "gateway.access"]
    [line] = [line for line in lines if "/v1/chat/completions" in line]
    assert line.startswith(f"POST /v1/chat/completions 200 request={reply.headers['x-request-id']} ms=")
    assert "ttft_ms" not in line  # the answer left in one piece
    assert line.endswith(
        f"outcome=stop prompt_tokens={reply.json['usage']['prompt_tokens']} tokens={len(tokens('an answer'))}"
    )
    assert "secret" not in caplog.text
    assert "an answer" not in caplog.text


async def test_models_are_listed(gateway: RunningGateway) -> None:
    [card] = (await gateway.get("/v1/models")).json["data"]
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == (MODEL, "model", "quire", 512)
    assert (await gateway.get(f"/v1/models/{MODEL}")).json == card


def test_every_static_file_is_packaged() -> None:
    with (PROJECT_ROOT / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["*"]
    endings = {pattern.rsplit(".", 1)[1] for pattern in patterns}
    assert {path.suffix[1:] for path in (PROJECT_ROOT / "gateway" / "pages" / "static").iterdir()} <= endings
