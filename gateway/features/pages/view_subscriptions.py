"""The gateway's subscriptions to the views that workers publish of their engines.

A gateway needs no route to a worker. While it has viewers, it asks for views by renewing a key that expires; all
viewers of a worker share one subscription.

A viewer may follow a call, named by its idempotency key, to the worker that claims most of its requests. Such a call
may end within half a second. So the gateway subscribes to several workers while it has a viewer: the views of the
worker that claims the requests are there already.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from redis.exceptions import RedisError

from quire.gateway.features.pages.engine_viewer import EngineViewer, render
from quire.gateway.stream.call_metadata import CallMetadata, request_id
from quire.shared.process.tasks import end_tasks
from quire.shared.protocol.broker import Broker
from quire.shared.protocol.keys import BEAT_S, VIEW_TTL_S
from quire.shared.protocol.messages import MessageError
from quire.shared.protocol.states import RequestState
from quire.shared.protocol.views import View
from quire.shared.redis.cancellation import check_cancelled
from quire.shared.redis.clients import pubsub_client

log = logging.getLogger("gateway")

# Time between two renewals of the key that asks a worker for views.
ASK_S = VIEW_TTL_S / 3
# Pause before a lost subscription is made again.
RETRY_S = 0.5
# Workers without a viewer to which a gateway subscribes.
MAX_SPARE = 8
# Time between two look-ups of a followed call before workers have claimed all its requests, and after: others may take
# them over.
CLAIM_S = 0.03
TAKEOVER_S = 0.5
# Requests of a followed call that are looked up.
MAX_FOLLOWED = 64
# A call that is still unknown after this time was refused, or never sent.
UNKNOWN_S = 60.0


class ViewSubscription:
    """The subscription to the views of one worker; runs from its creation to `close`."""

    def __init__(self, redis_url: str, broker: Broker, worker_id: str) -> None:
        self._redis_url = redis_url
        self._broker = broker
        self._worker_id = worker_id
        self._queues: dict[str, int] = {}
        self._latest: bytes | None = None
        self.viewers: set[EngineViewer] = set()
        self.corrupt = 0
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        await end_tasks(self._task)

    def add(self, viewer: EngineViewer) -> None:
        """Show the views to a viewer, beginning with the newest one that has arrived."""
        self.viewers.add(viewer)
        if self._latest is not None and (event := self._render(self._latest)):
            viewer.show(event)

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
        if self.viewers and (event := self._render(data)):
            for viewer in self.viewers:
                viewer.show(event)

    def _render(self, data: bytes) -> bytes | None:
        """Render a view as an event. Returns None if it is corrupt."""
        try:
            return render(View.decode(data), self._queues)
        except MessageError as error:
            self.corrupt += 1
            if self.corrupt == 1:
                log.error("a view of worker %s is corrupt (later ones are only counted): %s", self._worker_id, error)
            return None


class ViewSubscriptions:
    """The subscriptions of one gateway by worker; none while it has no viewer."""

    def __init__(self, redis_url: str, broker: Broker, live_workers: Callable[[], list[str]]) -> None:
        """`live_workers` returns the ids of the workers that are registered now."""
        self._redis_url = redis_url
        self._broker = broker
        self._live_workers = live_workers
        self._keeper: asyncio.Task[None] | None = None
        self._by_worker: dict[str, ViewSubscription] = {}

    @property
    def num_viewers(self) -> int:
        return sum(len(subscription.viewers) for subscription in self._by_worker.values())

    @contextlib.asynccontextmanager
    async def showing(self, viewer: EngineViewer, worker_id: str, key: str) -> AsyncIterator[None]:
        """Show a viewer the views of a worker, and then those of each worker that claims the request of `key`, if any.

        `key`: an idempotency key; empty for none.
        """
        self._subscription(worker_id).add(viewer)
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())
        follower = asyncio.create_task(self._follow(viewer, key)) if key else None
        try:
            yield
        finally:
            if follower is not None:
                await end_tasks(follower)
            self._discard(viewer)
            if not self.num_viewers:
                await self._unsubscribe_all()

    def end_all(self) -> None:
        """End the streams of all viewers."""
        for subscription in self._by_worker.values():
            for viewer in subscription.viewers:
                viewer.end()

    def _subscription(self, worker_id: str) -> ViewSubscription:
        if worker_id not in self._by_worker:
            self._by_worker[worker_id] = ViewSubscription(self._redis_url, self._broker, worker_id)
        return self._by_worker[worker_id]

    def _discard(self, viewer: EngineViewer) -> None:
        for subscription in self._by_worker.values():
            subscription.viewers.discard(viewer)

    async def _keep(self) -> None:
        """Subscribe to workers that start, and unsubscribe from those that are gone, while there are viewers."""
        while True:
            live, by_worker = self._live_workers(), self._by_worker
            gone = [(id_, unused) for id_, unused in by_worker.items() if not unused.viewers and id_ not in live]
            for worker_id, _ in gone:
                del by_worker[worker_id]
            num_spare = sum(not subscription.viewers for subscription in by_worker.values())
            new = [worker_id for worker_id in live if worker_id not in by_worker]
            for worker_id in new[: max(0, MAX_SPARE - num_spare)]:
                self._subscription(worker_id)
            for _, subscription in gone:
                await subscription.close()
            await asyncio.sleep(BEAT_S)

    async def _unsubscribe_all(self) -> None:
        subscriptions, self._by_worker = self._by_worker, {}
        keeper, self._keeper = self._keeper, None
        await end_tasks(keeper)
        await asyncio.gather(*(subscription.close() for subscription in subscriptions.values()))

    async def _follow(self, viewer: EngineViewer, key: str) -> None:
        """Move a viewer to the worker that has most requests of a call, and to any that takes them over."""
        loop = asyncio.get_running_loop()
        gives_up_at = loop.time() + UNKNOWN_S
        current = ""
        ids: list[str] = []
        while True:
            try:
                ids = ids or await self._requests_of(key)
                owners = await self._broker.owners(ids) if ids else []
            except (RedisError, OSError, MessageError) as error:
                log.debug("the worker of a followed call cannot be looked up now: %s", error)
                owners = []
            check_cancelled()
            owner = _most(owners, current)
            if owner and owner != current:
                current = owner
                self._discard(viewer)
                viewer.show_claim(key, owner)
                self._subscription(owner).add(viewer)
            # A request without a state was not submitted, or is forgotten.
            is_over = bool(owners) and all(state in ("", RequestState.DONE) for state, _ in owners)
            if is_over or (not owners and loop.time() > gives_up_at):
                return
            is_claimed = bool(owners) and all(worker for _, worker in owners)
            await asyncio.sleep(TAKEOVER_S if is_claimed else CLAIM_S)

    async def _requests_of(self, key: str) -> list[str]:
        """Return the ids of the requests of a call, at most MAX_FOLLOWED; none while the call is unknown."""
        call_id, metadata = await self._broker.call_of(key)
        if not metadata:
            return []
        count = CallMetadata.decode(metadata).requests
        return [request_id(call_id, index) for index in range(min(count, MAX_FOLLOWED))]


def _most(owners: Sequence[tuple[str, str]], current: str) -> str:
    """Return the worker that has most of the requests, `current` if no other has more; empty if none has any.

    owners: state and worker of each request.
    """
    counts = Counter(worker for _, worker in owners if worker)
    return max(counts, key=lambda worker: (counts[worker], worker == current), default="")
