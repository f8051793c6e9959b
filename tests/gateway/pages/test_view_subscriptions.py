"""A gateway subscribes to the views of workers only while it has viewers, and once per worker."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from quire.gateway.pages import view_subscriptions
from quire.shared.keys import VIEW_TTL_S
from quire.shared.messages import Delta, Outcome
from tests.gateway.pages.test_engine_page import Lookers, sees_workers, silent, subscribed, subscribers, worker
from tests.shared.test_views import VIEW
from tests.support.gateway.fake_worker import FakeWorker
from tests.support.gateway.running import MODEL, RunningGateway, chat_body, until


def view_of(name: str, number: int) -> bytes:
    return replace(VIEW, worker=name, number=number).encode()


async def test_all_who_look_share_one_subscription_and_see_the_same(gateway: RunningGateway) -> None:
    async with worker(gateway) as fake, Lookers() as lookers:
        await sees_workers(gateway)
        assert await fake.broker.is_looked_at("w1") is False
        open_ = [await lookers.look(gateway) for _ in range(3)]
        await subscribed(fake)
        await until(lambda: fake.broker.is_looked_at("w1"))  # the gateway subscribes first
        await fake.broker.publish_view("w1", VIEW.encode())
        seen = await asyncio.gather(*(looker.next() for looker in open_))
        assert seen[0] == seen[1] == seen[2]
        assert seen[0]["figures"] == VIEW.figures
        assert seen[0]["limits"] == VIEW.limits._asdict()
        assert [one["request"] for one in seen[0]["sequences"]] == ["0a1b2c3d", "0a1b2c3d"]
        assert seen[0]["moves"] == [{"kind": "copy", "source": 2, "target": 3}]
        assert seen[0]["queues"] == {"handed": 0, "interactive": 0, "standard": 0, "batch": 0}


async def test_when_the_last_one_leaves_nothing_is_asked_for_any_more(gateway: RunningGateway) -> None:
    async with worker(gateway) as fake:
        await sees_workers(gateway)
        async with Lookers() as lookers:
            await lookers.look(gateway)
            await subscribed(fake)
            await until(lambda: fake.broker.is_looked_at("w1"))
        await subscribed(fake, 0)
        left = await fake.broker.client.pttl(fake.broker.keys.view("w1"))
        assert 0 < left <= 1000 * VIEW_TTL_S


async def test_a_viewer_follows_a_request_to_the_worker_that_claims_it_and_to_one_that_takes_it_over(
    gateway: RunningGateway,
) -> None:
    """Whichever worker it looked at: with that worker's newest view at once, though it came before the claim."""
    wait = asyncio.Event()

    async def script(request: Any) -> Any:
        await wait.wait()
        yield (Delta(0, (5,), "length"),), Outcome("length")

    async with gateway.worker(script, worker_id="w2") as claimer, Lookers() as lookers:
        await sees_workers(gateway)
        other = FakeWorker(gateway.settings.redis_url, gateway.gateway.model.name, silent, worker_id="w1")
        other.broker = claimer.broker
        await other.beat()  # it lives, and reads no requests
        await sees_workers(gateway, 2)
        looker = await lookers.look(gateway, "w1", follow="a-key")
        await subscribed(claimer)
        await subscribed(claimer, name="w2")

        async def publishes() -> bool:
            return await claimer.broker.is_looked_at("w2")

        await until(publishes)  # before the request comes
        await claimer.broker.publish_view("w2", view_of("w2", 7))
        await claimer.broker.publish_view("w1", view_of("w1", 1))
        assert await looker.number(1) == "w1"
        headers = {"Idempotency-Key": "a-key"}
        call = asyncio.create_task(gateway.post("/v1/chat/completions", chat_body(max_tokens=1), **headers))
        assert await looker.next() == {"follow": "a-key", "worker": "w2"}
        assert await looker.number(7) == "w2"
        await claimer.broker.publish_view("w1", view_of("w1", 2))
        await claimer.broker.publish_view("w2", view_of("w2", 8))
        assert await looker.number(8) == "w2"
        [request] = claimer.claimed
        await claimer.broker.client.hset(claimer.broker.keys.request(request.id), "owner", "w1")
        assert await looker.next() == {"follow": "a-key", "worker": "w1"}
        assert await looker.number(2) == "w1"
        wait.set()
        assert (await call).status == 200


async def test_a_viewer_follows_a_call_of_several_prompts_to_the_worker_that_has_most_of_them(
    gateway: RunningGateway,
) -> None:
    wait = asyncio.Event()

    async def script(request: Any) -> Any:
        await wait.wait()
        yield (Delta(0, (5,), "length"),), Outcome("length")

    async with gateway.worker(script, worker_id="w2") as claimer, Lookers() as lookers:
        other = FakeWorker(gateway.settings.redis_url, gateway.gateway.model.name, silent, worker_id="w1")
        other.broker = claimer.broker
        await other.beat()
        await sees_workers(gateway, 2)
        looker = await lookers.look(gateway, "w1", follow="a-key")
        call = asyncio.create_task(
            gateway.post(
                "/v1/completions",
                {"model": MODEL, "prompt": ["one", "two", "three"], "max_tokens": 1},
                **{"Idempotency-Key": "a-key"},
            )
        )
        assert await looker.next() == {"follow": "a-key", "worker": "w2"}
        await until(lambda: has_claimed(claimer, 3))
        requests = [claimer.broker.keys.request(request.id) for request in claimer.claimed]
        await claimer.broker.client.hset(requests[0], "owner", "w1")
        await claimer.broker.client.hset(requests[1], "owner", "w1")
        assert await looker.next() == {"follow": "a-key", "worker": "w1"}
        wait.set()
        assert (await call).status == 200


async def has_claimed(worker: FakeWorker, count: int) -> bool:
    return len(worker.claimed) == count


async def test_a_gateway_without_viewers_asks_no_worker_for_views(gateway: RunningGateway) -> None:
    async with worker(gateway) as fake, worker(gateway, "w2"):
        await sees_workers(gateway, 2)
        async with Lookers() as lookers:
            await lookers.look(gateway)
            await subscribed(fake, name="w2")
        await subscribed(fake, 0)
        await subscribed(fake, 0, name="w2")


async def test_other_workers_than_the_one_that_is_looked_at_are_few(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_subscriptions, "MAX_SPARE", 1)
    async with worker(gateway) as fake, worker(gateway, "w2"), worker(gateway, "w3"), Lookers() as lookers:
        await sees_workers(gateway, 3)
        await lookers.look(gateway, "w3")
        await subscribed(fake, name="w3")
        await subscribed(fake, name="w1")
        assert await subscribers(fake, "w2") == 0


async def test_a_corrupt_view_is_dropped_and_the_next_one_is_shown(gateway: RunningGateway) -> None:
    async with worker(gateway) as fake, Lookers() as lookers:
        await sees_workers(gateway)
        looker = await lookers.look(gateway)
        await subscribed(fake)
        for data in (b"", b"\xc1", VIEW.encode()[:-1], VIEW.encode()):
            await fake.broker.publish_view("w1", data)
        assert (await looker.next())["number"] == VIEW.number
