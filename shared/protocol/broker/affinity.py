"""Prefix affinity: requests that are left to one worker, which holds a prefix of their prompts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from quire.shared.protocol.broker.lane import Lane, create_group, text
from quire.shared.protocol.keys import FORGET_WORKER_S, QUEUES

_ENTRY = re.compile(rb"[0-9]{1,16}-[0-9]{1,16}")


class AffinityVerbs(Lane):
    """The verb of a gateway whose request was left to a worker."""

    def __init__(self, client: Redis, lane: str) -> None:
        super().__init__(client, lane)
        self._withdraw = self.script("withdraw")

    async def withdraw(self, request_ids: Sequence[str]) -> int:
        """Queue requests for all workers that were left to one, and that it has not claimed. Return their number."""
        return int(await self._withdraw(keys=[self.keys.load], args=[self.keys.prefix, *request_ids]))


class LeftStream:
    """The stream of the requests that are left to one worker, from `open` on."""

    def __init__(self, key: str) -> None:
        self._key = key
        # The stream, once it is open.
        self.streams: tuple[str, ...] = ()
        self._read: list[str] = []

    async def open(self, client: Redis) -> None:
        """Keep the stream, with its group, until heartbeats do."""
        self.streams = (self._key,)
        await create_group(client, self._key)
        await client.expire(self._key, FORGET_WORKER_S)

    def take(self, entries: Sequence[tuple[Any, Any]]) -> list[tuple[str, bytes, Mapping[bytes, bytes]]]:
        """Return queue, entry and fields of requests that were read."""
        self._read += [text(entry_id) for entry_id, _ in entries]
        found = [
            (text(fields.get(b"queue", b"")), fields.get(b"entry", b""), fields) for _, fields in entries if fields
        ]
        return [left for left in found if left[0] in QUEUES and _ENTRY.fullmatch(left[1])]

    def taken(self) -> list[str]:
        """Return the entries that were read since the last call. The worker must acknowledge them."""
        taken, self._read = self._read, []
        return taken
