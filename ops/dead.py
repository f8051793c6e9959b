"""`quire dead`: requests that were given up because every worker that ran them died."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace

from redis.asyncio import Redis
from redis.exceptions import RedisError

from ops.errors import CommandError
from ops.settings import DeadSettings
from shared.broker import Broker, DeadRequest, QueueBounds, new_id
from shared.keys import LaneKeys
from shared.messages import GenerationRequest, MessageError
from shared.redis_clients import command_client, redact

# Nothing is refused for want of room: an operator asks for it.
NO_BOUNDS = QueueBounds(10**12, 10**15)
_LANE = re.compile(r"^quire:\{(.+)\}:dead$")


def dead(settings: DeadSettings) -> int:
    """Carry out one action; prints what it found. Raises CommandError."""
    return asyncio.run(_run(settings))


async def _run(settings: DeadSettings) -> int:
    client = command_client(settings.redis_url, connections=2)
    try:
        lanes = [settings.served_model_name] if settings.served_model_name else await _lanes(client)
        if settings.action == "list":
            return await _list(client, lanes, settings)
        broker, found = await _find(client, lanes, settings.entry)
        return await ACTIONS[settings.action](broker, found)
    except (RedisError, OSError) as error:
        raise CommandError(
            f"no Redis at {redact(settings.redis_url)}: {error}; pass --redis-url (QUIRE_REDIS_URL)"
        ) from error
    finally:
        await client.aclose()


async def _list(client: Redis, lanes: list[str], settings: DeadSettings) -> int:
    found = [(lane, one) for lane in lanes for one in await Broker(client, lane).read_dead(settings.count)]
    for lane, one in found:
        print(f"{one.entry_id}  {lane}  request {one.request_id}  worker {one.worker}  {one.emitted} tokens")
    if not found:
        model = f" of model {settings.served_model_name!r}" if settings.served_model_name else ""
        print(f"no request{model} was given up", file=sys.stderr)
    return 0


async def _lanes(client: Redis) -> list[str]:
    """The lanes that have a dead stream."""
    found = []
    async for key in client.scan_iter(LaneKeys("*").dead, count=1000):
        if match := _LANE.match(key.decode()):
            found.append(match[1])
    return sorted(found)


async def _find(client: Redis, lanes: list[str], entry: str) -> tuple[Broker, DeadRequest]:
    if not entry:
        raise CommandError("--entry is missing: give one that `quire dead list` shows")
    found = [
        (broker, one)
        for broker in (Broker(client, lane) for lane in lanes)
        for one in await broker.read_dead(count=10_000)
        if one.entry_id == entry
    ]
    if not found:
        raise CommandError(f"there is no entry {entry!r}: `quire dead list` shows those that there are")
    if len(found) > 1:
        names = ", ".join(broker.keys.lane for broker, _ in found)
        raise CommandError(f"there is an entry {entry!r} of the models {names}: choose with --served-model-name")
    return found[0]


async def _show(broker: Broker, one: DeadRequest) -> int:
    fields: dict[str, object] = {
        "entry": one.entry_id,
        "model": broker.keys.lane,
        "request": one.request_id,
        "class": one.priority_class,
        "worker": one.worker,
        "emitted_tokens": one.emitted,
    }
    try:
        request = GenerationRequest.decode(one.body)
        fields |= {"prompt_tokens": list(request.prompt), "sampling": repr(request.sampling)}
    except MessageError as error:
        fields["unreadable"] = str(error)
    print(json.dumps(fields, indent=1))
    return 0


async def _retry(broker: Broker, one: DeadRequest) -> int:
    """Queue it again as a new request, in the background: its client has had its answer."""
    try:
        request = replace(GenerationRequest.decode(one.body), id=new_id())
    except MessageError as error:
        raise CommandError(f"entry {one.entry_id} cannot be read: {error}") from error
    await broker.submit(
        request.id,
        request.encode(),
        gateway="none",
        cost=request.cost,
        bounds=NO_BOUNDS,
        priority_class=one.priority_class,
        about=one.about,
        is_background=True,
    )
    await broker.drop_dead(one.entry_id)
    print(f"queued again as request {request.id}")
    return 0


async def _drop(broker: Broker, one: DeadRequest) -> int:
    await broker.drop_dead(one.entry_id)
    print(f"dropped {one.entry_id}")
    return 0


ACTIONS: dict[str, Callable[[Broker, DeadRequest], Awaitable[int]]] = {"show": _show, "retry": _retry, "drop": _drop}
