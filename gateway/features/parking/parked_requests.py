"""The command about parked requests: lists them, parks requests that wait or run, and queues parked ones again."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from redis.exceptions import RedisError

from quire.gateway.features.parking.commands import ParkingSettings
from quire.shared.config.command_line import CommandError
from quire.shared.process.interrupts import raise_at_ctrl_c
from quire.shared.protocol.broker import Broker
from quire.shared.protocol.keys import LaneKeys
from quire.shared.protocol.messages import GenerationRequest, MessageError
from quire.shared.protocol.states import ParkReply, UnparkReply
from quire.shared.redis.clients import command_client, node_clients
from quire.shared.redis.url import BrokerUnavailable, redact

_LANE = re.compile(r"^quire:\{(.+)\}:(?:load|parked)$")


def run(settings: ParkingSettings, environ: Mapping[str, str]) -> int:
    """Carry out the action at `settings.redis_url`, and print what it found. Raises CommandError."""
    raise_at_ctrl_c()
    where = f"no Redis at {redact(settings.redis_url)}"
    return carry_out(settings, where, "pass another --redis-url (QUIRE_REDIS_URL)")


def carry_out(settings: ParkingSettings, where: str, remedy: str) -> int:
    """Like `run`. `where` and `remedy` begin and end the error for a Redis that does not answer."""
    return asyncio.run(_carry_out(settings, where, remedy))


async def _carry_out(settings: ParkingSettings, where: str, remedy: str) -> int:
    if settings.worker and settings.action != "park":
        raise CommandError("--worker belongs to the action `park`; leave it out")
    brokers: list[Broker] = []
    try:
        name = settings.served_model_name
        for lane in [name] if name else await _lanes(settings.redis_url):
            brokers.append(Broker(command_client(settings.redis_url, lane, connections=2), lane))
        return await {"list": _list, "park": _park, "unpark": _unpark}[settings.action](brokers, settings)
    except BrokerUnavailable as error:
        raise CommandError(str(error)) from error
    except (RedisError, OSError) as error:
        raise CommandError(f"{where}: {str(error).rstrip('.')}; {remedy}") from error
    finally:
        for broker in brokers:
            await broker.client.aclose()


async def _lanes(url: str) -> list[str]:
    """Return the lanes with requests."""
    lanes = set()
    clients = await node_clients(url)
    try:
        for client in clients:
            for pattern in (LaneKeys("*").load, LaneKeys("*").parked):
                async for key in client.scan_iter(pattern, count=1000):
                    if match := _LANE.match(key.decode()):
                        lanes.add(match[1])
    finally:
        for client in clients:
            await client.aclose()
    return sorted(lanes)


async def _list(brokers: Sequence[Broker], settings: ParkingSettings) -> int:
    entries = [(broker.keys.lane, parked) for broker in brokers for parked in await broker.read_parked(settings.count)]
    if settings.json:
        shown = [{**asdict(parked), "model": lane} for lane, parked in entries]
        print(json.dumps([{name: row[name] for name in row if name != "metadata"} for row in shown], indent=1))
        return 0
    for lane, parked in entries:
        left = f"{max(0.0, parked.left_s) / 3600:.1f} h left"
        print(f"{parked.request_id}  {lane}  {parked.priority_class}  {parked.emitted} tokens  {left}")
    if not entries:
        print("no request is parked", file=sys.stderr)
    return 0


async def _park(brokers: Sequence[Broker], settings: ParkingSettings) -> int:
    parked = 0
    for broker in brokers:
        ids = await broker.unended(settings.worker)
        for id_ in _of_call(ids, settings.id) if settings.id else await _without_embeddings(broker, ids):
            parked += await broker.park(id_, retention_s=settings.retention_s) is ParkReply.PARKED
    return _report(parked, "parked", settings)


async def _unpark(brokers: Sequence[Broker], settings: ParkingSettings) -> int:
    queued = 0
    for broker in brokers:
        ids = await broker.parked_ids()
        for id_ in _of_call(ids, settings.id) if settings.id else ids:
            queued += await broker.unpark(id_) is UnparkReply.QUEUED
    return _report(queued, "queued again", settings)


def _of_call(ids: Iterable[str], call_id: str) -> list[str]:
    """Return the requests of a call: one for each prompt. The id of each but the first ends with a number."""
    return [id_ for id_ in ids if id_.partition("-")[0] == call_id]


async def _without_embeddings(broker: Broker, ids: Sequence[str]) -> list[str]:
    """Return the requests but those for embeddings: these are short, and their clients cannot resume."""
    pipe = broker.client.pipeline(transaction=False)
    for id_ in ids:
        pipe.hget(broker.keys.request(id_), "body")
    bodies = await pipe.execute() if ids else []
    return [id_ for id_, body in zip(ids, bodies, strict=True) if not _is_embedding(body)]


def _is_embedding(body: bytes | None) -> bool:
    try:
        return bool(body and GenerationRequest.decode(body).pooling)
    except MessageError:
        return False


def _report(count: int, what: str, settings: ParkingSettings) -> int:
    """Print the number of requests. Raises CommandError if the one that was asked for is not among them."""
    if settings.id and not count:
        raise CommandError(
            f"request {settings.id[:64]!r} cannot be {what}: it has ended, or is unknown; see the action `list`"
        )
    print(
        json.dumps({"requests": count, "action": settings.action}) if settings.json else f"{count} requests are {what}"
    )
    return 0
