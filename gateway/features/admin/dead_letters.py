"""The dead-letter queue: requests that were given up because every worker that ran them died.

Lists them, shows one, puts one into the queue again, or drops one.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace

from redis.exceptions import RedisError

from quire.gateway.features.admin.commands import DeadLetterSettings
from quire.shared.config.command_line import CommandError
from quire.shared.process.interrupts import raise_at_ctrl_c
from quire.shared.protocol.broker import Admission, Broker, DeadRequest, QueueBounds, new_id
from quire.shared.protocol.keys import LaneKeys
from quire.shared.protocol.messages import GenerationRequest, MessageError
from quire.shared.redis.clients import command_client, node_clients
from quire.shared.redis.url import BrokerUnavailable, redact

# An operator's retry is never refused for want of room in the queue, and its client has already had its answer.
RETRY = Admission(gateway="none", bounds=QueueBounds(10**12, 10**15), is_background=True)
_LANE = re.compile(r"^quire:\{(.+)\}:dead$")


def run(settings: DeadLetterSettings, environ: Mapping[str, str]) -> int:
    """Carry out the action at `settings.redis_url`, and print what it found. Raises CommandError."""
    raise_at_ctrl_c()
    where = f"no Redis at {redact(settings.redis_url)}"
    return carry_out(settings, where, "pass another --redis-url (QUIRE_REDIS_URL)")


def carry_out(settings: DeadLetterSettings, where: str, remedy: str) -> int:
    """Like `run`. `where` and `remedy` begin and end the error for a Redis that does not answer."""
    return asyncio.run(_carry_out(settings, where, remedy))


async def _carry_out(settings: DeadLetterSettings, where: str, remedy: str) -> int:
    brokers: dict[str, Broker] = {}
    try:
        name = settings.served_model_name
        for lane in [name] if name else await _lanes(settings.redis_url):
            brokers[lane] = Broker(command_client(settings.redis_url, lane, connections=2), lane)
        if settings.action == "list":
            return await _list(brokers.values(), settings)
        broker, dead = await _find(brokers.values(), settings.entry)
        return await ACTIONS[settings.action](broker, dead, settings.json)
    except BrokerUnavailable as error:
        raise CommandError(str(error)) from error
    except (RedisError, OSError) as error:
        raise CommandError(f"{where}: {str(error).rstrip('.')}; {remedy}") from error
    finally:
        for broker in brokers.values():
            await broker.client.aclose()


async def _list(brokers: Iterable[Broker], settings: DeadLetterSettings) -> int:
    entries = [(broker.keys.lane, dead) for broker in brokers for dead in await broker.read_dead(settings.count)]
    if settings.json:
        print(json.dumps([_fields(lane, dead) for lane, dead in entries], indent=1))
        return 0
    for lane, dead in entries:
        print(f"{dead.entry_id}  {lane}  request {dead.request_id}  worker {dead.worker}  {dead.emitted} tokens")
    if not entries:
        model = f" of model {settings.served_model_name!r}" if settings.served_model_name else ""
        print(f"no request{model} was given up", file=sys.stderr)
    return 0


async def _lanes(url: str) -> list[str]:
    """Return the lanes that have a dead-letter stream."""
    lanes = []
    clients = await node_clients(url)
    try:
        for client in clients:
            async for key in client.scan_iter(LaneKeys("*").dead, count=1000):
                if match := _LANE.match(key.decode()):
                    lanes.append(match[1])
    finally:
        for client in clients:
            await client.aclose()
    return sorted(lanes)


async def _find(brokers: Iterable[Broker], entry: str) -> tuple[Broker, DeadRequest]:
    if not entry:
        raise CommandError("--entry is missing: give one that the action `list` shows")
    matching = [
        (broker, dead) for broker in brokers for dead in await broker.read_dead(count=10_000) if dead.entry_id == entry
    ]
    if not matching:
        raise CommandError(f"there is no entry {entry!r}: the action `list` shows all entries")
    if len(matching) > 1:
        names = ", ".join(broker.keys.lane for broker, _ in matching)
        raise CommandError(f"there is an entry {entry!r} of the models {names}: choose with --served-model-name")
    return matching[0]


def _fields(lane: str, dead: DeadRequest) -> dict[str, object]:
    return {
        "entry": dead.entry_id,
        "model": lane,
        "request": dead.request_id,
        "class": dead.priority_class,
        "worker": dead.worker,
        "emitted_tokens": dead.emitted,
    }


async def _show(broker: Broker, dead: DeadRequest, as_json: bool) -> int:
    fields = _fields(broker.keys.lane, dead)
    try:
        request = GenerationRequest.decode(dead.body)
        fields |= {"prompt_tokens": list(request.prompt), "sampling": repr(request.sampling)}
    except MessageError as error:
        fields["unreadable"] = str(error)
    print(json.dumps(fields, indent=1))
    return 0


async def _retry(broker: Broker, dead: DeadRequest, as_json: bool) -> int:
    """Submit the request again under a new id, as a background request: its client has already had its answer."""
    try:
        request = replace(GenerationRequest.decode(dead.body), id=new_id())
    except MessageError as error:
        raise CommandError(f"entry {dead.entry_id} cannot be read: {error}") from error
    if (files := await broker.images(request)) is None:
        raise CommandError(f"entry {dead.entry_id} is about an image that is not in Redis any more; drop the entry")
    terms = RETRY._replace(
        cost=request.cost,
        prompt_tokens=len(request.prompt),
        rows=request.rows,
        priority_class=dead.priority_class,
        metadata=dead.metadata,
        tenant=dead.tenant,
        weight=dead.weight,
        user=dead.user,
        images=request.image_names,
    )
    await broker.submit(request.id, request.encode(), terms, list(files.values()))
    await broker.drop_dead(dead.entry_id)
    print(json.dumps({"request": request.id}) if as_json else f"queued again as request {request.id}")
    return 0


async def _drop(broker: Broker, dead: DeadRequest, as_json: bool) -> int:
    await broker.drop_dead(dead.entry_id)
    print(json.dumps({"dropped": dead.entry_id}) if as_json else f"dropped {dead.entry_id}")
    return 0


Action = Callable[[Broker, DeadRequest, bool], Awaitable[int]]
ACTIONS: dict[str, Action] = {"show": _show, "retry": _retry, "drop": _drop}
