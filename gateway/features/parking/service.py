"""Parks the requests of a call and queues them again, and ends those that were parked for too long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from aiohttp import web
from redis.exceptions import RedisError

from quire.gateway.admission.retry import RetryPolicy
from quire.gateway.admission.service_rate import ServiceRate
from quire.gateway.admission.submission import queue_is_full
from quire.gateway.api.caller import Caller
from quire.gateway.errors.api_errors import ApiError, ParkingIsFull
from quire.shared.protocol.broker import Admission, Broker, QueueBounds, QueueFull
from quire.shared.protocol.charge import LimitReached, packed_limits
from quire.shared.protocol.states import ParkReply, UnparkReply
from quire.shared.redis.cancellation import check_cancelled

log = logging.getLogger("gateway")

# Time between two looks for requests that were parked for too long.
LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class ParkingState:
    """The state of a call: parked, ended, or neither. until: unix time in seconds at which it ends as parked."""

    is_parked: bool
    has_ended: bool
    until: float | None = None

    def answer(self, public_id: str) -> web.Response:
        """Return the answer to the client that parked or unparked a call."""
        return web.json_response(
            {
                "id": public_id,
                "parked": self.is_parked,
                "ended": self.has_ended,
                "expires_at": None if self.until is None else int(self.until),
            }
        )


class Parking:
    """The parked requests of one model. Between `start` and `close` it ends those whose time is over."""

    def __init__(
        self,
        broker: Broker,
        retry: RetryPolicy,
        bounds: QueueBounds,
        rate: ServiceRate,
        retention_s: int,
        max_parked: int,
        max_parked_of_key: int,
        refusal: Callable[[LimitReached, Admission | None], ApiError],
    ) -> None:
        """bounds: of the queue, which unparked requests enter, and of the memory of parked ones.

        retention_s, max_parked, max_parked_of_key: see `Broker.park`. refusal: see `Submission`.
        """
        self._broker = broker
        self._retry = retry
        self._bounds = bounds
        self._rate = rate
        self._retention_s = retention_s
        self._max_parked = max_parked
        self._max_parked_of_key = max_parked_of_key
        self._refusal = refusal
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._sweep_forever())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def park(self, ids: Sequence[str]) -> ParkingState:
        """Park the requests of a call. Raises ParkingIsFull or BrokerDown."""
        park = partial(
            self._broker.park,
            retention_s=self._retention_s,
            max_parked=self._max_parked,
            max_parked_of_key=self._max_parked_of_key,
            bounds=self._bounds,
        )
        found = [await self._retry(partial(park, id_)) for id_ in ids]
        full = {
            ParkReply.FULL: f"{self._max_parked} requests are parked already, the most that may be "
            "(--max-parked-requests)",
            ParkReply.KEY_FULL: f"{self._max_parked_of_key} requests of the API key are parked already, the most that "
            "may be (--max-parked-requests and --max-key-share)",
            ParkReply.NO_ROOM: "stored, background and parked calls take as much memory as they may "
            "(--max-stored-bytes and --max-key-share)",
        }
        if reached := next((full[reply] for reply in found if reply in full), ""):
            raise ParkingIsFull(
                f"{reached[0].upper()}{reached[1:]}; the call runs on. Unpark, cancel or delete another one first.",
                headers={"X-Should-Retry": "false"},
            )
        if ParkReply.PARKED not in found:
            return ParkingState(is_parked=False, has_ended=True)
        untils = [await self._retry(partial(self._broker.parked_until, id_)) for id_ in ids]
        return ParkingState(True, False, min((until for until in untils if until is not None), default=None))

    async def unpark(self, ids: Sequence[str], caller: Caller) -> ParkingState:
        """Queue the parked requests of a call again. The limits of the caller must allow the rest.

        Raises QueueIsFull, RateLimited, BudgetSpent or BrokerDown.
        """
        try:
            limits = packed_limits(caller.accounts)
            unpark = partial(self._broker.unpark, bounds=self._bounds, limits=limits)
            found = [await self._retry(partial(unpark, id_)) for id_ in ids]
        except QueueFull as error:
            raise queue_is_full(error, self._rate) from error
        except LimitReached as error:
            raise self._refusal(error, None) from error
        return ParkingState(is_parked=False, has_ended=not {UnparkReply.QUEUED, UnparkReply.ACTIVE} & set(found))

    async def sweep(self) -> int:
        """End requests that were parked for too long. Returns their number. Raises RedisError or OSError."""
        lapsed = await self._broker.lapsed()
        for request_id in lapsed:
            await self._broker.expire(request_id)
            log.info("request %s was parked for too long and has ended", request_id, extra={"request_id": request_id})
        return len(lapsed)

    async def _sweep_forever(self) -> None:
        while True:
            try:
                while await self.sweep():
                    pass
            except (RedisError, OSError) as error:
                log.debug("parked requests cannot be looked up now: %s", error)
            check_cancelled()
            await asyncio.sleep(LOOK_S)
