"""The gateway's subscriptions to the views that workers publish of their engines.

A gateway needs no route to a worker. While it has viewers, it asks each live worker for views by renewing a key that
expires; all viewers share one subscription for each worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from redis.exceptions import RedisError

from quire.gateway.features.pages.engine_viewer import EngineViewer, render
from quire.shared.process.tasks import end_tasks
from quire.shared.protocol.broker import Broker
from quire.shared.protocol.keys import BEAT_S, VIEW_TTL_S
from quire.shared.protocol.messages import MessageError
from quire.shared.redis.cancellation import check_cancelled
from quire.shared.redis.clients import pubsub_client

log = logging.getLogger("gateway")

# Time between two renewals of the key that asks a worker for views.
ASK_S = VIEW_TTL_S / 3
# Pause before a lost subscription is made again.
RETRY_S = 0.5
# Workers to which a gateway subscribes, the first ones by their ids.
MAX_WORKERS = 8


class ViewSubscription:
    """The subscription to the views of one worker; runs from its creation to `close`."""

    def __init__(self, redis_url: str, broker: Broker, worker_id: str, viewers: set[EngineViewer]) -> None:
        self._redis_url = redis_url
        self._broker = broker
        self._worker_id = worker_id
        self._queues: dict[str, int] = {}
        self._latest: bytes | None = None
        self._viewers = viewers
        self.corrupt = 0
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        await end_tasks(self._task)

    def greet(self, viewer: EngineViewer) -> None:
        """Show a new viewer the newest view that has arrived."""
        if self._latest is not None and (event := self._render(self._latest)):
            viewer.show(self._worker_id, event)

    async def _run(self) -> None:
        client = pubsub_client(self._redis_url)
        try:
            while True:
                pubsub = client.pubsub()
                try:
                    await pubsub.subscribe(self._broker.keys.view(self._worker_id))
                    await self._receive(pubsub)
                except (RedisError, OSError) as error:
                    log.warning("views of worker %s are interrupted: %s", self._worker_id, error)
                finally:
                    with contextlib.suppress(RedisError, OSError):
                        await pubsub.aclose()  # type: ignore[no-untyped-call]
                check_cancelled()
                await asyncio.sleep(RETRY_S)
        finally:
            await client.aclose()

    async def _receive(self, pubsub: Any) -> None:
        """Show the views that arrive, and ask for more."""
        loop = asyncio.get_running_loop()
        asks_at = loop.time()
        while True:
            if loop.time() >= asks_at:
                asks_at = loop.time() + ASK_S
                self._queues = await self._broker.look(self._worker_id)
            message = await pubsub.get_message(timeout=max(0.001, asks_at - loop.time()))
            check_cancelled()
            if message is not None and message["type"] == "message":
                self._show(message["data"])

    def _show(self, data: bytes) -> None:
        self._latest = data
        if event := self._render(data):
            for viewer in self._viewers:
                viewer.show(self._worker_id, event)

    def _render(self, data: bytes) -> bytes | None:
        """Render a view as an event. Returns None if it is corrupt."""
        try:
            return render(data, self._queues)
        except MessageError as error:
            self.corrupt += 1
            if self.corrupt == 1:
                log.error("a view of worker %s is corrupt (later ones are only counted): %s", self._worker_id, error)
            return None


class ViewSubscriptions:
    """The viewers of one gateway, and its subscriptions by worker; none while it has no viewer."""

    def __init__(self, redis_url: str, broker: Broker, live_workers: Callable[[], list[str]]) -> None:
        """`live_workers` returns the ids of the workers that are registered now."""
        self._redis_url = redis_url
        self._broker = broker
        self._live_workers = live_workers
        self._keeper: asyncio.Task[None] | None = None
        self._by_worker: dict[str, ViewSubscription] = {}
        self._viewers: set[EngineViewer] = set()

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @contextlib.asynccontextmanager
    async def showing(self, viewer: EngineViewer) -> AsyncIterator[None]:
        """Show a viewer the views of the live workers."""
        self._viewers.add(viewer)
        for subscription in self._by_worker.values():
            subscription.greet(viewer)
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                await self._unsubscribe_all()

    def end_all(self) -> None:
        """End the streams of all viewers."""
        for viewer in self._viewers:
            viewer.end()

    async def _keep(self) -> None:
        """Subscribe to workers that start, and unsubscribe from those that are gone, while there are viewers."""
        while True:
            live, by_worker = sorted(self._live_workers())[:MAX_WORKERS], self._by_worker
            for worker_id in {*live} - by_worker.keys():
                by_worker[worker_id] = ViewSubscription(self._redis_url, self._broker, worker_id, self._viewers)
            for worker_id in by_worker.keys() - live:
                await by_worker[worker_id].close()
                del by_worker[worker_id]  # only now: `_unsubscribe_all` may cancel this task, and closes those left
            await asyncio.sleep(BEAT_S)

    async def _unsubscribe_all(self) -> None:
        subscriptions, self._by_worker = self._by_worker, {}
        keeper, self._keeper = self._keeper, None
        await end_tasks(keeper)
        await asyncio.gather(*(subscription.close() for subscription in subscriptions.values()))
