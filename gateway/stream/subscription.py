"""The pub/sub subscription of a gateway: decodes the step frames that workers publish.

Frames that are published while the connection is down are lost without an error. So the owner is told about every
subscription after the first, and has the open calls compared with their output logs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import RedisError

from quire.shared.process.backoff import Backoff
from quire.shared.process.tasks import end_tasks
from quire.shared.protocol.messages import MessageError, StepItem, decode_items
from quire.shared.redis.cancellation import check_cancelled
from quire.shared.redis.lane_client import LaneClient

log = logging.getLogger("gateway")

# A connection that has been silent for this long is pinged, and is closed if it stays silent for as long again: it may
# be half-open.
PING_AFTER_S = 2.0
# Time between two checks of the connection: whether it is silent, and whether it still leads to the lane's server.
LOOK_S = 0.25
# First and longest pause before a new connection.
RECONNECT_S = (0.05, 1.0)


class Subscription:
    """Is subscribed from `start` to `close`; `ready` is set while frames arrive."""

    def __init__(
        self,
        client: LaneClient,
        channel: str,
        on_items: Callable[[Sequence[StepItem], float], None],
        on_resubscribed: Callable[[], int],
    ) -> None:
        """`on_items` gets the items of each frame, and its arrival time on the loop's clock.

        `on_resubscribed` is called when frames may have been lost; returns the number of calls that this concerns.
        """
        self._client = client
        self._channel = channel
        self._on_items = on_items
        self._on_resubscribed = on_resubscribed
        self._task: asyncio.Task[None] | None = None
        self._heard_at = 0.0
        self.ready = asyncio.Event()
        # Time at which the subscription was lost, on the loop's clock; valid while it is not ready.
        self.lost_at = 0.0
        self.subscribes = 0
        self.frames = 0
        self.corrupt = 0

    def start(self) -> None:
        self.lost_at = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._read_forever())

    async def close(self) -> None:
        await end_tasks(self._task)

    async def _read_forever(self) -> None:
        backoff = Backoff(*RECONNECT_S, jitter=True)
        while True:
            try:
                await self._listen()
            except (RedisError, OSError) as error:
                if self.ready.is_set():
                    log.warning("the subscription is broken, connecting again: %s", error)
                    backoff.reset()
            finally:
                if self.ready.is_set():
                    self.lost_at = asyncio.get_running_loop().time()
                self.ready.clear()
            check_cancelled()
            await asyncio.sleep(backoff.next())

    async def _listen(self) -> None:
        """Receive frames over one connection. Raises ConnectionError once it is closed, or seems dead."""
        loop = asyncio.get_running_loop()
        link = await self._client.open_link()
        try:
            self._heard_at, pinged_at = loop.time(), 0.0
            link.listen(self._on_push)
            link.write("SUBSCRIBE", self._channel)
            while await self._client.is_current(link):
                now = loop.time()
                # Equal times count as an answer: uvloop's clock has milliseconds, and an answer takes less.
                if pinged_at <= self._heard_at:
                    if now - self._heard_at > PING_AFTER_S:
                        pinged_at = now
                        link.write("PING")
                elif now - pinged_at > PING_AFTER_S:
                    raise ConnectionError(f"no answer to a ping within {PING_AFTER_S:g} s")
                await link.wait_closed(LOOK_S)
            raise ConnectionError("the connection was closed")
        finally:
            link.close()

    def _on_push(self, push: Any) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        match push:
            case [b"message", _, frame]:
                self._decode(frame)
            case [b"subscribe", *_]:
                self._subscribed()

    def _subscribed(self) -> None:
        self.subscribes += 1
        self.ready.set()
        if self.subscribes > 1:
            calls = self._on_resubscribed()
            log.warning("subscribed again: frames may have been lost, %d calls compare with the log", calls)

    def _decode(self, frame: bytes) -> None:
        self.frames += 1
        try:
            items = list(decode_items(frame))
        except MessageError as error:
            self.corrupt += 1
            if self.corrupt == 1:
                log.error("a published frame is corrupt and was dropped (later ones are only counted): %s", error)
            return
        self._on_items(items, asyncio.get_running_loop().time())
