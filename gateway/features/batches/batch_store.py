"""The batches in Redis: one method per step in the life of a batch, each a script or one command.

A window is a number of lines of the input. A gateway begins it with a fencing token and renews its lease; once another
gateway has taken the window over, it can neither count the window nor close it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from quire.gateway.features.batches.batch import Batch
from quire.gateway.features.batches.files.file_store import Page, read_page
from quire.shared.protocol.broker.lane import new_id, text
from quire.shared.protocol.broker.scripts import load_script
from quire.shared.protocol.keys import WINDOW_LEASE_S, BatchKeys

# The number of the window that stands for the validation of the input.
VALIDATION = -1
LOST = "lost"
LEASE_MS = int(1000 * WINDOW_LEASE_S)


@dataclass(frozen=True, slots=True)
class LinePlace:
    """A place in the input: the offset of a line in bytes, and its number among the lines that are not blank."""

    offset: int
    number: int

    def __str__(self) -> str:
        return f"{self.offset} {self.number}"

    @classmethod
    def read(cls, value: str) -> LinePlace:
        offset, _, number = value.partition(" ")
        return cls(int(offset or 0), int(number or 1))


@dataclass(frozen=True, slots=True)
class Window:
    """A window that this gateway has begun. token: its fence.

    was_begun: another gateway began it before. is_written: its output is stored and counted. left_s: seconds until the
    batch expires, by the clock of Redis.
    """

    batch_id: str
    index: int
    token: str
    begin: LinePlace
    end: LinePlace
    was_begun: bool = False
    is_written: bool = False
    left_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """Lines of a window, and the tokens that they used."""

    completed: int = 0
    failed: int = 0
    expired: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StoredPart:
    """The part of an output file that a window has. bytes: 0 if the window has no line for this file."""

    name: str
    bytes: int


class BatchStore:
    """All batches. Raises redis-py's RedisError or OSError when Redis fails."""

    def __init__(self, client: Redis) -> None:
        """client: made for the lane BATCHES_TAG."""
        self.client = client
        self.keys = BatchKeys()
        self._add_batch = load_script(client, "add_batch")
        self._begin_batch = load_script(client, "begin_batch")
        self._cancel_batch = load_script(client, "cancel_batch")
        self._claim_window = load_script(client, "claim_window")
        self._renew_window = load_script(client, "renew_window")
        self._end_window = load_script(client, "end_window")
        self._close_window = load_script(client, "close_window")

    async def add(self, batch_id: str, owner: str, input_id: str, most: int, window_s: int, **fields: object) -> str:
        """Add a batch. Returns `added`, `unknown` (the input is no file of the owner) or `full`.

        most: batches of the owner that have not ended. fields: of the record, as `Batch` names them.
        """
        args: list[Any] = [self.keys.prefix, batch_id, owner, most, window_s, "input", input_id]
        args += (part for name, value in fields.items() for part in (name, str(value)))
        return text(await self._add_batch(keys=[self.keys.batch(batch_id), self.keys.file(input_id)], args=args))

    async def get(self, batch_id: str, owner: str | None = None) -> Batch | None:
        """Return a batch of an owner, or of any; None for an unknown one."""
        pipe = self.client.pipeline(transaction=False)
        pipe.hgetall(self.keys.batch(batch_id))
        pipe.hgetall(self.keys.open(batch_id))
        fields, open_windows = (_texts(reply) for reply in await pipe.execute())
        if not fields or (owner is not None and fields.get("owner") != owner):
            return None
        progress = [value.split(" ") for name, value in open_windows.items() if name.endswith(":progress")]
        running = sum(int(counts[0]) for counts in progress), sum(int(counts[1]) for counts in progress)
        return Batch.read(batch_id, fields, running)

    async def page(self, owner: str, limit: int, after: str) -> Page | None:
        """Return a page of the batches of an owner, the newest first; None if `after` is not one of them."""
        return await read_page(self.client, self.keys.batches(owner), limit, after, oldest_first=False)

    async def forget(self, owner: str, batch_id: str) -> None:
        """Drop a batch whose record has expired from the list of its owner."""
        await self.client.zrem(self.keys.batches(owner), batch_id)

    async def active(self) -> list[str]:
        """Return the batches that have not ended, the oldest first."""
        return [text(batch_id) for batch_id in await self.client.zrange(self.keys.active, 0, -1)]

    async def cancel(self, batch_id: str, owner: str) -> tuple[str, list[tuple[LinePlace, LinePlace]]]:
        """Cancel a batch. Returns its status, empty if there is no such batch; and the open windows."""
        reply = await self._cancel_batch(keys=[self.keys.batch(batch_id)], args=[self.keys.prefix, batch_id, owner])
        if not reply:
            return "", []
        status, *places = map(text, reply)
        read = [LinePlace.read(place) for place in places]
        return status, list(zip(read[::2], read[1::2], strict=True))

    async def claim(self, batch_id: str) -> Window | None:
        """Begin a window, or the validation of the input, or take it over; None while all windows have leases."""
        token = new_id()
        reply = await self._claim_window(
            keys=[self.keys.batch(batch_id)], args=[self.keys.prefix, batch_id, token, LEASE_MS]
        )
        if not reply:
            return None
        index, begin, end, begun, written = map(text, reply[:5])
        return Window(
            batch_id,
            int(index),
            token,
            LinePlace.read(begin),
            LinePlace.read(end),
            begun == "1",
            written == "1",
            int(reply[5]) / 1000,
        )

    async def renew(self, window: Window, completed: int, failed: int) -> tuple[str, float]:
        """Renew a lease, and note the progress. Returns the status of the batch, or LOST, and its seconds to live."""
        return await self._renew(window, LEASE_MS, completed, failed)

    async def release(self, window: Window) -> None:
        """Hand a window to the next gateway that looks."""
        await self._renew(window, 0, 0, 0)

    async def _renew(self, window: Window, lease_ms: int, completed: int, failed: int) -> tuple[str, float]:
        args: list[Any] = [self.keys.prefix, window.batch_id, window.token, lease_ms, window.index, completed, failed]
        reply = await self._renew_window(keys=[self.keys.batch(window.batch_id)], args=args)
        return text(reply[0]), int(reply[1]) / 1000 if len(reply) > 1 else 0.0

    async def begin(self, window: Window, places: Sequence[LinePlace], total: int) -> str:
        """End a validation without errors. places: where each window begins, and the end. Returns `begun` or LOST."""
        return await self._begin(window, "", total, places)

    async def fail(self, window: Window, errors: Sequence[Mapping[str, Any]], total: int) -> str:
        """End a validation with errors. Returns `failed` or LOST."""
        return await self._begin(window, json.dumps(list(errors)), total, ())

    async def _begin(self, window: Window, errors: str, total: int, places: Sequence[LinePlace]) -> str:
        args: list[Any] = [self.keys.prefix, window.batch_id, window.token, errors, total, *map(str, places)]
        return text(await self._begin_batch(keys=[self.keys.batch(window.batch_id)], args=args))

    async def end(self, window: Window, counts: WindowCounts, output: StoredPart, errors: StoredPart) -> str:
        """Count a window whose output is stored. Returns `ended` or LOST."""
        args: list[Any] = [self.keys.prefix, window.batch_id, window.token, window.index]
        args += [counts.completed, counts.failed, counts.expired, counts.prompt_tokens, counts.completion_tokens]
        args += [output.name, output.bytes, errors.name, errors.bytes]
        return text(await self._end_window(keys=[self.keys.batch(window.batch_id)], args=args))

    async def close(self, window: Window) -> str:
        """Close a window whose lines are deleted. Returns `closed` or LOST."""
        args: list[Any] = [self.keys.prefix, window.batch_id, window.token, window.index]
        return text(await self._close_window(keys=[self.keys.batch(window.batch_id)], args=args))


def _texts(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {text(name): text(value) for name, value in fields.items()}
