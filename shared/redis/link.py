"""One connection to Redis for many concurrent callers: commands are sent at once, replies arrive in the same order.

redis-py opens the connection (address, TLS, password) and interprets commands and errors; this module only moves the
bytes. The path of a command through redis-py, with a pool, a lock and tasks, takes several times the processor time of
the command itself. A command is never repeated: without a reply it may or may not have been carried out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import hiredis
from redis._parsers import BaseParser
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

Push = Callable[[list[Any]], None]


class Link(asyncio.Protocol):
    """Takes over a connected `connection`. A reply that takes longer than `timeout_s` closes it for all callers."""

    def __init__(self, connection: AbstractConnection, timeout_s: float) -> None:
        self.connection = connection
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        # Commands without a reply, the oldest first, and the time at which each was sent.
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self._push: Push | None = None
        self._reader = hiredis.Reader(replyError=BaseParser.parse_error)
        # False once the link takes no further commands.
        self.is_open = True
        self._closed = asyncio.Event()
        writer = connection._writer
        assert writer is not None
        self._transport = writer.transport
        self._transport.set_protocol(self)
        if self._transport.is_closing():  # closed during the handover, before `connection_lost` came here
            self._end(RedisConnectionError("the connection was closed"))

    # --- the side of the callers --------------------------------------------------------------------------------------

    def send(self, *command: Any) -> asyncio.Future[Any]:
        """Send a command and return its future reply. The future raises Redis' error, or that the connection broke.

        A caller may cancel the future: the reply is then dropped.
        """
        self.write(*command)
        answer = self._loop.create_future()
        self._waiting.append((answer, self._loop.time()))
        if self._watch is None:
            self._watch = self._loop.call_later(self._timeout_s, self._check)
        return answer

    def write(self, *command: Any) -> None:
        """Send a command that has no reply, or whose replies are pushes."""
        data = hiredis.pack_command(command)
        if not self.is_open:
            raise RedisConnectionError("the connection is closed")
        self._transport.write(data)

    def listen(self, push: Push) -> None:
        """Pass all further replies to `push`. An error reply closes the connection."""
        self._push = push

    async def wait_closed(self, timeout_s: float) -> None:
        """Return when the link is closed, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._closed.wait()

    def retire(self) -> None:
        """Take no further commands, and close after the replies to the commands that were sent."""
        self.is_open = False
        if not self._waiting:
            self.close()

    def close(self, error: RedisError | None = None) -> None:
        """Close immediately. Callers that wait for a reply get `error`."""
        self._transport.abort()
        self._end(error or RedisConnectionError("the connection was closed"))

    # --- the side of the server ---------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        reader, waiting, push = self._reader, self._waiting, self._push
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                if push is not None:
                    if isinstance(reply, RedisError):  # the command was refused: there will be no pushes
                        self.close(reply)
                        return
                    push(reply)
                    continue
                answer, _ = waiting.popleft()
                if answer.done():  # its caller has gone
                    continue
                if isinstance(reply, BaseException):
                    answer.set_exception(reply)
                else:
                    answer.set_result(reply)
        except (hiredis.HiredisError, IndexError) as error:
            self.close(RedisConnectionError(f"what came is no answer of Redis: {error}"))
        else:
            if not waiting and not self.is_open:
                self.close()

    def connection_lost(self, error: Exception | None) -> None:
        why = f": {error}" if error else ""
        self._end(RedisConnectionError(f"Redis closed the connection{why}"))

    def _check(self) -> None:
        self._watch = None
        if not self._waiting:
            return
        due = self._waiting[0][1] + self._timeout_s
        if self._loop.time() >= due:
            self.close(RedisTimeoutError(f"Redis did not answer within {self._timeout_s:g} s"))
        else:
            self._watch = self._loop.call_at(due, self._check)

    def _end(self, error: RedisError) -> None:
        self.is_open = False
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        waiting, self._waiting = self._waiting, deque()
        for answer, _ in waiting:
            if not answer.done():
                answer.set_exception(type(error)(*error.args))
        # Clear redis-py's references, so that it does not close the connection again.
        self.connection._reader = self.connection._writer = None
        self._closed.set()
