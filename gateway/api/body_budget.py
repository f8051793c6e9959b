"""The common bound of the bodies that a gateway reads and parses at the same time, in bytes.

A body counts from before it is read until its call is submitted or refused. A body for which there is no room waits
unread in the sockets. The next room goes to the caller that has least, and no caller has more than half, so a caller
that sends many bodies, or sends them slowly, keeps no other one waiting.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Handler

from quire.gateway.api.caller import caller_of
from quire.gateway.errors.api_errors import ServerBusy, refused

# Bodies that wait, of all callers and of one: each has up to 128 KiB in the buffers of its connection.
MAX_WAITING, MAX_OWN_WAITING = 1024, 256
RETRY_S = 1


@dataclass(slots=True)
class _Caller:
    """What a caller has: bytes that count now, and bodies that wait."""

    held: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)


class BodyBudget:
    """Counts the bodies of a gateway process."""

    def __init__(self, size: int, freed: Callable[[int], None] = lambda size: None) -> None:
        """freed: called with the size of a body that counts no more."""
        self._size = size
        self._freed = freed
        self._taken = 0
        self._waiting = 0
        self._callers: dict[str, _Caller] = {}

    @property
    def share(self) -> int:
        """The most that a caller may have, except for one large body."""
        return self._size // 2

    async def take(self, name: str, size: int, timeout_s: float | None) -> None:
        """Wait until a body of a caller has room; without a timeout for as long as it takes. Raises ServerBusy."""
        caller = self._callers.setdefault(name, _Caller())
        if not self._waiting and self._fits(caller, size):
            self._give(caller, size)
            return
        if timeout_s and (self._waiting >= MAX_WAITING or len(caller.waiting) >= MAX_OWN_WAITING):
            self._forget(name, caller)
            raise _busy()
        room = asyncio.get_running_loop().create_future()
        caller.waiting.append((size, room))
        self._waiting += 1
        self._grant()
        try:
            async with asyncio.timeout(timeout_s):
                await room
        except BaseException as error:
            if (size, room) in caller.waiting:
                caller.waiting.remove((size, room))
                self._waiting -= 1
                self._forget(name, caller)
                self._grant()
            else:
                self.give_back(name, size)
            if isinstance(error, TimeoutError):
                raise _busy() from None
            raise

    def give_back(self, name: str, size: int) -> None:
        """Count a body no more."""
        caller = self._callers[name]
        caller.held -= size
        self._taken -= size
        self._forget(name, caller)
        self._grant()
        self._freed(size)

    def _fits(self, caller: _Caller, size: int) -> bool:
        return not self._taken or (self._taken + size <= self._size and self._is_fair(caller, size))

    def _is_fair(self, caller: _Caller, size: int) -> bool:
        return not caller.held or caller.held + size <= self.share

    def _give(self, caller: _Caller, size: int) -> None:
        caller.held += size
        self._taken += size

    def _grant(self) -> None:
        """Give room to the callers that have least. A large body is not overtaken by smaller ones of other callers."""
        while True:
            waiting = [caller for caller in self._callers.values() if caller.waiting]
            able = [caller for caller in waiting if self._is_fair(caller, caller.waiting[0][0])]
            caller = min(able, key=lambda caller: caller.held, default=None)
            if caller is None or not self._fits(caller, caller.waiting[0][0]):
                return
            size, room = caller.waiting.popleft()
            self._waiting -= 1
            self._give(caller, size)
            if not room.done():
                room.set_result(None)

    def _forget(self, name: str, caller: _Caller) -> None:
        if not caller.held and not caller.waiting:
            del self._callers[name]


def _busy() -> ServerBusy:
    return ServerBusy(
        "The bodies of other calls take the memory that this server's setting --max-bodies-bytes allows. Try again "
        "later.",
        headers={"Retry-After": str(RETRY_S)},
    )


BODIES = web.AppKey("bodies", BodyBudget)
_HELD = web.RequestKey("held_body", tuple[BodyBudget, str, int])


def caller_name(request: web.Request) -> str:
    """Return the name under which the bodies of a caller are counted."""
    return caller_of(request).owner or f"address {request.remote}"


async def hold_body(request: web.Request, size: int, timeout_s: float) -> None:
    """Count the body of a request, once there is room for it. Raises ServerBusy."""
    budget = request.app.get(BODIES)
    if budget is None or not size or _HELD in request:
        return
    name = caller_name(request)
    await budget.take(name, size, timeout_s)
    request[_HELD] = budget, name, size


async def hold_more(request: web.Request, timeout_s: float, size: int, where: str) -> None:
    """Count further bytes of a call whose body counts, or fewer if the number is negative.

    where: their name for errors. Raises ServerBusy, and InvalidRequest if there is never room for them.
    """
    if _HELD not in request or not size:
        return
    budget, name, held = request[_HELD]
    if held + size > budget.share and size > 0:
        raise refused(
            where,
            f"{where}: the images that are not in the body can have {size:,} bytes, and {held + size:,} with the body; "
            f"at most {budget.share:,} are allowed, half of this server's --max-bodies-bytes. Send fewer images.",
        )
    if size > 0:
        await budget.take(name, size, timeout_s)
    else:
        budget.give_back(name, -size)
    request[_HELD] = budget, name, held + size


def release_body(request: web.BaseRequest) -> None:
    """Count the body of a request no more: the call is submitted, or was refused."""
    if _HELD in request:
        budget, name, size = request[_HELD]
        del request[_HELD]
        budget.give_back(name, size)


def add_to(app: web.Application, budget: BodyBudget) -> None:
    """Bound the bodies of an application; they are released at the ends of their requests at the latest."""
    app[BODIES] = budget
    app.middlewares.append(_release)


@web.middleware
async def _release(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    finally:
        release_body(request)
