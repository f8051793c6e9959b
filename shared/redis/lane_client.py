"""A Redis client whose callers share one connection: `LaneClient`."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import ResponseError

from quire.shared.process.tasks import end_tasks
from quire.shared.redis.connections import NotTheServer, is_elsewhere
from quire.shared.redis.link import Link
from quire.shared.redis.places import Place


class LaneClient(Redis):
    """Sends all commands over one `Link`. Pipelines take connections from the pool.

    A command that blocks delays the commands after it, so `blocking_client` has a link for one reader.
    """

    def __init__(self, place: Place, pool: BlockingConnectionPool, timeout_s: float) -> None:
        super().__init__(connection_pool=pool)
        self.auto_close_connection_pool = True
        self._place = place
        self._timeout_s = timeout_s
        self._link: Link | None = None
        # The opening of a new link; all commands that need it wait for this task.
        self._opening: asyncio.Task[Link] | None = None

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        link = await self._current_link()
        try:
            reply = await link.send(*args[0].split(), *args[1:])  # a name can be two words
        except ResponseError as error:
            if not is_elsewhere(error):
                raise
            connection: Any = link.connection
            connection.doubt(error)
            link.retire()
            raise NotTheServer(f"{type(error).__name__}: {error}") from error
        read = self.response_callbacks.get(args[0])
        options.pop("keys", None)  # as redis-py does
        return reply if read is None else read(reply, **options)

    async def open_link(self) -> Link:
        """Open a new connection to the lane's server, for one caller."""
        connection = self.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()
            return Link(connection, self._timeout_s)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise

    async def is_current(self, link: Link) -> bool:
        """Return whether a link is open and connected to the lane's server."""
        await self._place.recheck()
        connection: Any = link.connection
        return link.is_open and connection.moves == self._place.moves

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await end_tasks(self._opening)
        if self._link is not None:
            self._link.close()
        await super().aclose(close_connection_pool)

    async def _current_link(self) -> Link:
        while (link := self._link) is not None:
            if await self.is_current(link):
                return link
            if link is self._link:  # else another caller has replaced the link meanwhile
                break
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    async def _open(self) -> Link:
        old, self._link = self._link, None
        if old is not None:
            old.retire()
        self._link = await self.open_link()
        return self._link

    def _opened(self, opening: asyncio.Task[Link]) -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # mark the exception as retrieved: all its callers may have gone
