"""The engine page: its views, and who follows them."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from quire.gateway.features.pages import engine_page, view_subscriptions
from quire.gateway.features.pages.engine_viewer import EngineViewer
from quire.gateway.features.pages.view_subscriptions import ViewSubscription, ViewSubscriptions
from quire.gateway.settings import GatewaySettings
from quire.shared.protocol.keys import VIEW_TTL_S
from tests.gateway.conftest import Start
from tests.shared.test_views import VIEW
from tests.support.gateway.fake_worker import FakeWorker
from tests.support.gateway.running import RunningGateway, until

# --- The engine page: who may see it, and how its streams begin and end -----------------------------------------------


async def silent(request: Any) -> Any:
    raise AssertionError("nothing is asked of this worker")
    yield


def worker(gateway: RunningGateway, name: str = "w1") -> Any:
    return gateway.worker(silent, worker_id=name)


async def sees_workers(gateway: RunningGateway, count: int = 1) -> None:
    async def there() -> bool:
        return len(gateway.gateway.worker_registry.workers) == count

    await until(there)


class Looker:
    """One who reads the stream of views."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def next(self) -> Any:
        """The next view; None at the end."""
        async with asyncio.timeout(60):
            while line := await self._response.content.readline():
                if line.startswith(b"data: "):
                    return json.loads(line[6:])
        return None

    async def number(self, wanted: int) -> str:
        """The worker of the first view with this number; views before it are skipped."""
        while (view := await self.next())["number"] != wanted:
            pass
        worker: str = view["worker"]
        return worker


class Lookers:
    """Opens streams of views; all end with the block."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Lookers:
        self._session = await self._stack.enter_async_context(aiohttp.ClientSession())
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def look(self, gateway: RunningGateway) -> Looker:
        stream = self._session.get(f"{gateway.url}/engine/stream")
        response = await self._stack.enter_async_context(stream)
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        self._stack.callback(response.close)
        return Looker(response)


async def subscribers(fake: FakeWorker, name: str = "w1") -> int:
    channel = fake.broker.keys.view(name)
    [(_, count)] = await fake.broker.client.pubsub_numsub(channel)
    return int(count)


async def subscribed(fake: FakeWorker, count: int = 1, name: str = "w1") -> None:
    async def there() -> bool:
        return await subscribers(fake, name) == count

    await until(there)


async def test_who_reads_slowly_gets_the_newest_and_holds_nobody_up(gateway: RunningGateway) -> None:
    large = replace(VIEW, sequences=VIEW.sequences + VIEW.sequences[1:] * 250)
    async with worker(gateway) as fake, Lookers() as lookers:
        await sees_workers(gateway)
        quick = await lookers.look(gateway)
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", gateway.port))
        reader, writer = await asyncio.open_connection(sock=stalled, limit=2**20)
        writer.write(b"GET /engine/stream HTTP/1.1\r\nHost: test\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await subscribed(fake)
        sent = 160  # of 40 kB: more than sockets hold
        for number in range(sent):
            await fake.broker.publish_view("w1", replace(large, number=number).encode())
            found = await quick.next()
            assert found["number"] <= number
        while found["number"] < sent - 1:
            found = await quick.next()
        slow = []
        async with asyncio.timeout(60):
            while not slow or slow[-1] < sent - 1:
                line = await reader.readline()
                slow += [int(part.split(b",")[0]) for part in line.split(b'"number":')[1:]]
        writer.close()
    assert slow == sorted(slow)
    assert len(slow) < sent, "some were skipped"


@pytest.mark.slow
async def test_who_does_not_read_loses_the_connection(start_gateway: Start) -> None:
    gateway = await start_gateway(write_timeout_s=0.2)
    large = replace(VIEW, sequences=VIEW.sequences + VIEW.sequences[1:] * 250)
    async with worker(gateway) as fake:
        await sees_workers(gateway)
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        writer.write(b"GET /engine/stream HTTP/1.1\r\nHost: test\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await subscribed(fake)

        async def closed() -> bool:
            await fake.broker.publish_view("w1", large.encode())
            return not gateway.connections

        await until(closed)
        writer.close()


async def test_the_workers_that_can_be_looked_at(gateway: RunningGateway) -> None:
    assert (await gateway.get("/engine/workers")).json == {
        "model": "test-model",
        "models": ["test-model"],
        "workers": [],
    }
    async with worker(gateway, "w2"), worker(gateway, "w1"):
        await sees_workers(gateway, 2)
        found = (await gateway.get("/engine/workers")).json["workers"]
        assert [one["id"] for one in found] == ["w1", "w2"]
        assert found[0]["total_blocks"] == 100
        wrong = await gateway.get("/engine/stream?worker=w1")
        assert (wrong.status, wrong.error["message"]) == (
            400,
            "'worker' is no parameter of /engine/stream; it has model.",
        )


async def test_there_are_only_so_many_viewers(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_page, "MAX_VIEWERS", 2)
    async with worker(gateway), Lookers() as lookers:
        await sees_workers(gateway)
        for _ in range(2):
            await lookers.look(gateway)
        refused = await gateway.get("/engine/stream")
        assert (refused.status, refused.error["code"]) == (429, "too_many_viewers")


async def test_streams_end_with_the_gateway(start_gateway: Start, redis_url: str) -> None:
    gateway = await start_gateway()
    async with worker(gateway) as fake, Lookers() as lookers:
        await sees_workers(gateway)
        looker = await lookers.look(gateway)
        await subscribed(fake)
        stopping = asyncio.create_task(gateway.shut_down())
        assert await looker.next() is None
        await stopping


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
        ({"host": "127.3.2.1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "10.0.0.5"}, False),
        ({"host": "gateway.example"}, False),
        ({"host": "0.0.0.0", "engine_view": "on"}, True),
        ({"engine_view": "off"}, False),
        ({"require_keys": True}, False),
        ({"require_keys": True, "engine_view": "on"}, True),
        ({"host": "0.0.0.0", "allow_anonymous": True}, False),
    ],
)
def test_it_is_on_by_itself_only_where_no_other_machine_comes(settings: dict[str, Any], expected: bool) -> None:
    given = GatewaySettings(**settings)
    assert engine_page.is_on(given.engine_view, given.host, given.is_open) is expected


async def test_where_it_is_off_everything_of_it_is_a_404_that_names_the_setting(start_gateway: Start) -> None:
    gateway = await start_gateway(engine_view="off")
    for path in ("/engine", "/engine/workers", "/engine/stream", "/engine/"):
        reply = await gateway.get(path)
        assert reply.status == 404
        assert "--engine-view on (QUIRE_ENGINE_VIEW=on)" in reply.error["message"]
    assert (await gateway.get("/")).status == 200


# --- A reader of engine views holds the newest one, and a view is one event -------------------------------------------


async def test_a_viewer_holds_one_view_of_each_worker_at_the_most() -> None:
    viewer = EngineViewer()
    for number in range(1000):
        viewer.show("w1", b"%d" % number)
    viewer.show("w2", b" and another")
    assert await viewer.next() == b"999 and another"
    assert viewer.skipped == 999
    viewer.end()
    assert await viewer.next() is None


# --- A gateway subscribes to the views of workers only while it has viewers, and once per worker ----------------------


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
        assert seen[0]["members"] == [["0a1b2c3d", 0, 20], ["0a1b2c3d", 1, 20], ["0a1b2c3e", 0, 4]]
        assert seen[0]["steps"] == [
            [
                [[0, 0, 22, 22, 1, 0, 0, [2, 3]], [1, 1, 20, 12, 12, 0, 0, [9]], [2, 0, 16, 16, 6, 3, 0, [4]]],
                [["copy", 2, 3]],
            ],
            [[[0, 0, 23, 23, 1, 0, 1, [5, 6]], [1, 4, 20, 12, 0, 0]], []],
        ]
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


async def test_a_viewer_sees_all_workers_up_to_a_limit(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_subscriptions, "MAX_WORKERS", 2)
    async with worker(gateway) as fake, worker(gateway, "w2"), worker(gateway, "w3"), Lookers() as lookers:
        await sees_workers(gateway, 3)
        looker = await lookers.look(gateway)
        for name in ("w1", "w2"):
            await subscribed(fake, name=name)
            await fake.broker.publish_view(name, view_of(name, 5))
        assert {(await looker.next())["worker"] for _ in range(2)} == {"w1", "w2"}
        assert await subscribers(fake, "w3") == 0


async def test_a_worker_that_starts_is_seen_and_one_that_ends_is_left(gateway: RunningGateway) -> None:
    async with worker(gateway) as fake, Lookers() as lookers:
        await sees_workers(gateway)
        looker = await lookers.look(gateway)
        async with worker(gateway, "w2"):
            await subscribed(fake, name="w2")
            await fake.broker.publish_view("w2", view_of("w2", 3))
            assert await looker.number(3) == "w2"
        await subscribed(fake, 0, name="w2")


async def test_when_the_last_one_leaves_while_workers_end_all_are_left(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, is_closing = ViewSubscription.close, asyncio.Event()

    async def stall(subscription: ViewSubscription) -> None:
        if not is_closing.is_set():
            is_closing.set()
            await asyncio.Event().wait()
        await close(subscription)

    monkeypatch.setattr(ViewSubscription, "close", stall)
    live = ["w1", "w2", "w3"]
    async with worker(gateway) as fake:
        views = ViewSubscriptions(gateway.settings.redis_url, gateway.gateway.broker, lambda: live)
        async with views.showing(EngineViewer()):
            for name in ("w1", "w2", "w3"):
                await subscribed(fake, name=name)
            live.clear()
            await is_closing.wait()
        for name in ("w1", "w2", "w3"):
            await subscribed(fake, 0, name)


async def test_a_corrupt_view_is_dropped_and_the_next_one_is_shown(gateway: RunningGateway) -> None:
    async with worker(gateway) as fake, Lookers() as lookers:
        await sees_workers(gateway)
        looker = await lookers.look(gateway)
        await subscribed(fake)
        for data in (b"", b"\xc1", VIEW.encode()[:-1], VIEW.encode()):
            await fake.broker.publish_view("w1", data)
        assert (await looker.next())["number"] == VIEW.number
