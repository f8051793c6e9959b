"""Connections of redis-py that follow their lane to the server that serves it now.

A server that says that it cannot serve the lane counts as a broken connection. The next connection asks again where the
lane is (`shared/redis/places.py`).
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from quire.shared.redis.places import Place
from quire.shared.redis.url import Address

# Errors by which a server says that it cannot serve the lane now, and that another may. Nothing was carried out.
_ELSEWHERE = (ReadOnlyError, AskError, TryAgainError, ClusterDownError, MasterDownError)  # MOVED is an AskError
# Such errors without a class in redis-py, and as Redis 6.2 wraps an error inside a script.
_ELSEWHERE_TEXTS = ("NOREPLICAS ", "UNBLOCKED ", "READONLY ", "non local key in a cluster")


def is_elsewhere(error: ResponseError) -> bool:
    """Return whether the error says that this server cannot serve the lane now, and that another may."""
    return isinstance(error, _ELSEWHERE) or any(text in str(error) for text in _ELSEWHERE_TEXTS)


class NotTheServer(RedisConnectionError):
    """The server answered that it does not serve the lane, or not now."""


class PlacedConnection(AbstractConnection):
    """A connection to the server of a lane. `connect` reconnects if the lane has moved."""

    def __init__(self, *, place: Place, **options: Any) -> None:
        super().__init__(**options)
        self._place = place
        self.moves = 0

    async def connect(self) -> None:
        if self.is_connected:
            await self._place.recheck()
        # The server closed the connection, or the lane has moved.
        if self.is_connected and (self._is_closed or self.moves != self._place.moves):
            await self.disconnect(nowait=True)
        await super().connect()  # type: ignore[no-untyped-call]

    @property
    def _is_closed(self) -> bool:
        assert self._reader is not None
        assert self._writer is not None
        return self._reader.at_eof() or self._writer.is_closing()

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        await super().on_connect_check_health(check_health)
        try:
            await self._place.verify(self._ask)
        except RedisError:
            self._place.doubt()
            raise

    async def _ask(self, *command: str) -> Any:
        await self.send_command(*command, check_health=False)
        return await self.read_response()

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except ResponseError as error:
            if not is_elsewhere(error):
                raise
            self.doubt(error)
            await self.disconnect(nowait=True)
            raise NotTheServer(f"{type(error).__name__}: {error}") from error

    def doubt(self, error: ResponseError) -> None:
        """Note an error by which the server says that it does not serve the lane."""
        self._place.doubt(error, getattr(self, "address", None))


class TcpConnection(PlacedConnection, Connection):
    """A TCP connection to the address that its place gives."""

    address: Address

    async def _connect(self) -> None:
        self.address = await self._place.locate()
        self.moves = self._place.moves
        self.host, self.port = self.address
        try:
            await super()._connect()  # type: ignore[no-untyped-call]
        except BaseException:
            self._place.doubt()
            raise


class TlsConnection(TcpConnection, SSLConnection):
    pass


class UnixConnection(PlacedConnection, UnixDomainSocketConnection):
    pass
