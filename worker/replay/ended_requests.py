"""Learns which requests have ended, as a subscriber: nothing waits for a canary, and no key in Redis is its own."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from typing import Any

from redis.exceptions import RedisError

from quire.shared.process.backoff import Backoff
from quire.shared.protocol.broker.lane import text
from quire.shared.redis.cancellation import check_cancelled
from quire.shared.redis.lane_client import LaneClient

log = logging.getLogger(__name__)

# Requests that wait to be scored, at most. Their tokens stay in Redis until they are scored.
MAX_WAITING = 256
# The connection is pinged this often, and is broken if it stays silent for PATIENCE_S.
PING_S, PATIENCE_S = 1.0, 3.0
# First and longest pause before a new connection.
RECONNECT_S = (0.05, 1.0)


def is_sampled(request_id: str, share: float) -> bool:
    """Return whether a request is among a share of all. Equal for equal ids; a larger share has those of a smaller."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


class EndedRequests:
    """The sampled requests that have ended while `run` runs, the newest MAX_WAITING of them.

    num_passed_over: those that were dropped, because more came than were taken.
    """

    def __init__(self, client: LaneClient, channel: str, share: float) -> None:
        self._client, self._channel, self._share = client, channel, share
        self._waiting: deque[str] = deque(maxlen=MAX_WAITING)
        self._has_some = asyncio.Event()
        self._heard_at = 0.0
        self.is_subscribed = False
        self.num_passed_over = 0

    def __len__(self) -> int:
        return len(self._waiting)

    async def next(self) -> str:
        """Return the request that has waited longest."""
        while not self._waiting:
            self._has_some.clear()
            await self._has_some.wait()
        return self._waiting.popleft()

    async def run(self) -> None:
        """Stay subscribed until cancelled. Requests that end while Redis is away are not sampled."""
        backoff = Backoff(*RECONNECT_S, jitter=True)
        while True:
            try:
                await self._listen()
            except (RedisError, OSError) as error:
                if self.is_subscribed:
                    log.warning("the subscription is broken, connecting again: %s", error)
                    backoff.reset()
            finally:
                self.is_subscribed = False
            check_cancelled()
            await asyncio.sleep(backoff.next())

    async def _listen(self) -> None:
        """Receive over one connection. Raises ConnectionError once it is closed, or seems dead."""
        loop = asyncio.get_running_loop()
        link = await self._client.open_link()
        try:
            self._heard_at = loop.time()
            link.listen(self._on_push)
            link.write("SUBSCRIBE", self._channel)
            while await self._client.is_current(link):
                if loop.time() - self._heard_at > PATIENCE_S:
                    raise ConnectionError(f"no answer to a ping within {PATIENCE_S:g} s")
                link.write("PING")
                await link.wait_closed(PING_S)
            raise ConnectionError("the connection was closed")
        finally:
            link.close()

    def _on_push(self, push: Any) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        match push:
            case [b"message", _, bytes(name)]:
                self._note(text(name))
            case [b"subscribe", *_]:
                self.is_subscribed = True

    def _note(self, request_id: str) -> None:
        if is_sampled(request_id, self._share):
            self.num_passed_over += len(self._waiting) == MAX_WAITING
            self._waiting.append(request_id)
            self._has_some.set()
