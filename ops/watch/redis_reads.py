"""What the commands read of Redis: the lanes, and errors that name the remedy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from redis.exceptions import RedisError, ResponseError

from quire.ops.local.preconditions import RedisOf, redis_of
from quire.ops.paths import resolve_state_dir
from quire.ops.watch.commands import OfRedis
from quire.shared.config.command_line import CommandError
from quire.shared.process.interrupts import raise_at_ctrl_c
from quire.shared.protocol.broker import Broker
from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.keys import REGISTRY_LANE, RegistryKeys
from quire.shared.redis.clients import command_client
from quire.shared.redis.url import BrokerUnavailable, redact

Result = TypeVar("Result")


def place_of(settings: OfRedis, environ: Mapping[str, str]) -> RedisOf:
    """Return the Redis of --redis-url, else that of the running `quire serve`, else the one at the default URL."""
    if settings.redis_url:
        where = f"no Redis at {redact(settings.redis_url)}"
        return RedisOf(settings.redis_url, where, "pass another --redis-url (QUIRE_REDIS_URL)")
    return redis_of(resolve_state_dir(settings.state_dir, environ))


def run_on(place: RedisOf, act: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Return the result of reading Redis. Raise CommandError if it does not answer."""
    raise_at_ctrl_c()
    try:
        return asyncio.run(act())
    except BrokerUnavailable as error:
        raise CommandError(str(error)) from error
    except ResponseError as error:
        remedy = "check the rights of the user in its URL, and that no other program writes Quire's keys"
        raise CommandError(f"Redis refused a command: {str(error).rstrip('.')}; {remedy}") from error
    except (RedisError, OSError) as error:
        raise CommandError(f"{place.where}: {str(error).rstrip('.')}; {place.remedy}") from error


@asynccontextmanager
async def brokers(url: str, model: str, most: int = 0) -> AsyncIterator[list[Broker]]:
    """Yield a broker for the lane of this model; without one, for each lane that was registered in the last hour.

    most: largest number of lanes, those that were registered last; 0 is any number.
    """
    opened: list[Broker] = []
    try:
        for lane in [model] if model else await _registered(url, most):
            opened.append(Broker(command_client(url, lane, connections=2), lane))
        yield opened
    finally:
        for broker in opened:
            await broker.client.aclose()


async def _registered(url: str, most: int) -> list[str]:
    client = command_client(url, REGISTRY_LANE, connections=1)
    try:
        names: Any = await client.zrevrange(RegistryKeys().models, 0, most - 1)
        return sorted(map(text, names))
    finally:
        await client.aclose()
