"""`quire dead`: requests that were given up because every worker that ran them died."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from redis.exceptions import RedisError

from ops.errors import CommandError
from ops.settings import DeadSettings
from shared.broker import Broker, DeadRequest, QueueBounds, new_id
from shared.keys import LaneKeys
from shared.messages import GenerationRequest, MessageError
from shared.redis_clients import BrokerUnavailable, command_client, node_clients, redact

# Nothing is refused for want of room: an operator asks for it.
NO_BOUNDS = QueueBounds(10**12, 10**15)
_LANE = re.compile(r"^quire:\{(.+)\}:dead$")


def dead(settings: DeadSettings) -> int:
    """Carry out one action; prints what it found. Raises CommandError."""
    return asyncio.run(_run(settings))


async def _run(settings: DeadSettings) -> int:
    brokers: dict[str, Broker] = {}
    try:
        name = settings.served_model_name
        for lane in [name] if name else await _lanes(settings.redis_url):
            brokers[lane] = Broker(command_client(settings.redis_url, lane, connections=2), lane)
        if settings.action == "list":
            return await _list(brokers.values(), settings)
        broker, found = await _find(brokers.values(), settings.entry)
        return await ACTIONS[settings.action](broker, found)
    except BrokerUnavailable as error:
        raise CommandError(str(error)) from error
    except (RedisError, OSError) as error:
        raise CommandError(
            f"no Redis at {redact(settings.redis_url)}: {str(error).rstrip('.')}; pass --redis-url "
            "(QUIRE_REDIS_URL); that of `quire serve` is unix:// and the path of redis/redis.sock in its state folder, "
            "while it runs"
        ) from error
    finally:
        for broker in brokers.values():
            await broker.client.aclose()


async def _list(brokers: Iterable[Broker], settings: DeadSettings) -> int:
    found = [(broker.keys.lane, one) for broker in brokers for one in await broker.read_dead(settings.count)]
    for lane, one in found:
        print(f"{one.entry_id}  {lane}  request {one.request_id}  worker {one.worker}  {one.emitted} tokens")
    if not found:
        model = f" of model {settings.served_model_name!r}" if settings.served_model_name else ""
        print(f"no request{model} was given up", file=sys.stderr)
    return 0


async def _lanes(url: str) -> list[str]:
    """The lanes that have a dead stream."""
    found = []
    clients = await node_clients(url)
    try:
        for client in clients:
            async for key in client.scan_iter(LaneKeys("*").dead, count=1000):
                if match := _LANE.match(key.decode()):
                    found.append(match[1])
    finally:
        for client in clients:
            await client.aclose()
    return sorted(found)


async def _find(brokers: Iterable[Broker], entry: str) -> tuple[Broker, DeadRequest]:
    if not entry:
        raise CommandError("--entry is missing: give one that `quire dead list` shows")
    found = [
        (broker, one) for broker in brokers for one in await broker.read_dead(count=10_000) if one.entry_id == entry
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
