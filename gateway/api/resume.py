"""Resumes a call that is in Redis: looks it up, and finds the place in its stream that a client names."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from aiohttp import web

from quire.gateway.errors.api_errors import InvalidRequest, NotFound
from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.sse import BEGINNING, EVENT_ID, EventId
from quire.gateway.stream.transcript import Transcript
from quire.gateway.stream.writer import EventRenderer
from quire.shared.config.schema_parts import Schema, request_parameter
from quire.shared.config.validators import shown
from quire.shared.protocol.broker import Broker
from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.messages import MessageError
from quire.shared.protocol.states import RequestState

T = TypeVar("T")

_HEXADECIMAL = re.compile(r"[0-9a-f]{32}", re.ASCII)

LAST_EVENT_ID = "Last-Event-ID"
STARTING_AFTER = "starting_after"
# For /openapi.json: the meaning of the header, and the parameters of a stream by their names there.
AS_STARTING_AFTER = "the same as `starting_after`, with precedence"
PARAMETERS: Schema = {
    "StartingAfter": request_parameter("query", STARTING_AFTER, EVENT_ID, "the last event that the client has"),
    "LastEventId": request_parameter("header", LAST_EVENT_ID, EVENT_ID, AS_STARTING_AFTER),
}
# Wait for a place that a running request has not reached: Redis may have died and lost a part of the log.
LOST_TAIL_S = 5.0
LOOKS = 10


class Retry(Protocol):
    """Retries a command to Redis (`admission.retry.RetryPolicy`)."""

    async def __call__(self, command: Callable[[], Awaitable[T]]) -> T: ...


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A call as Redis has it. left_s: seconds until its deadline; None without one. is_queued: no worker has it."""

    metadata: CallMetadata
    is_done: bool
    tokens: int
    left_s: float | None
    is_queued: bool = False


class StoredCalls:
    """The calls of one owner in Redis, which any gateway may have accepted."""

    def __init__(
        self, broker: Broker, retry: Retry, note_corrupt: Callable[[str, MessageError], None], owner: str
    ) -> None:
        """note_corrupt: called with the id of a call whose metadata cannot be decoded."""
        self.broker = broker
        self.retry = retry
        self._note_corrupt = note_corrupt
        self._owner = owner

    async def look_up(self, call_id: str, dialect: str) -> StoredCall | None:
        """Return the call with this id; None if it is unknown or corrupt, or of another dialect or owner.

        Raises BrokerDown.
        """
        try:
            known = await self.retry(partial(look_up, self.broker, call_id, self._owner))
        except MessageError as error:
            self._note_corrupt(call_id, error)
            return None
        return known if known is not None and known.metadata.dialect == dialect else None


def read_call_id(public_id: str, prefix: str) -> str:
    """Return the id of a call from the id that clients see; empty if it is none."""
    call_id = public_id.removeprefix(prefix)
    return call_id if public_id.startswith(prefix) and _HEXADECIMAL.fullmatch(call_id) else ""


def read_event_id(request: web.Request) -> EventId:
    """Return the id of the last event that the client has. The header has precedence: browsers update only the header.

    Raises InvalidRequest.
    """
    if unknown := request.query.keys() - {STARTING_AFTER}:
        name = min(unknown)[:80]
        raise InvalidRequest(
            f"{name!r} is not a parameter of a stream that is taken up again; it has {STARTING_AFTER}.",
            param=name,
            code="unknown_parameter",
        )
    for name, values in (
        (LAST_EVENT_ID, request.headers.getall(LAST_EVENT_ID, [])),
        (STARTING_AFTER, request.query.getall(STARTING_AFTER, [])),
    ):
        if not values:
            continue
        event_id = EventId.parse(values[0]) if len(values) == 1 else None
        if event_id is None:
            what = shown(values[0]) if len(values) == 1 else f"{len(values)} values"
            raise _wrong(name, f"{name} must be the id of an event, like 12 or 12.1, not {what}.")
        return event_id
    return BEGINNING


async def look_up(broker: Broker, request_id: str, owner: str = "") -> StoredCall | None:
    """Return the call that Redis has under the id of its first request; None if it is unknown or has another owner.

    Raises MessageError, RedisError or OSError.
    """
    pipe = broker.client.pipeline(transaction=False)
    pipe.hmget(broker.keys.request(request_id), "metadata", "state", "emitted", "deadline", "account")
    pipe.time()
    (metadata, state, emitted, deadline, account), (seconds, micros) = await pipe.execute()
    if not metadata or (account or b"") != owner.encode():
        return None
    left_ms = int(deadline) - (1000 * seconds + micros // 1000) if int(deadline or 0) else None
    return StoredCall(
        CallMetadata.decode(metadata),
        text(state) == RequestState.DONE,
        int(emitted or 0),
        None if left_ms is None else left_ms / 1000,
        text(state) in (RequestState.QUEUED, RequestState.PARKED),
    )


async def catch_up(
    outputs: OutputBuffer, answer: Transcript, events: EventRenderer, after: EventId, known: StoredCall
) -> str:
    """Read the output log up to the place that the client names, and return the events after it that were read, too.

    Raises InvalidRequest if the stream has no such place, or does not reach it soon.
    """
    beginning = events.opening()
    # The events of a prompt, and perhaps the first ones of all, come with the first item of the log.
    has_prompt = (known.metadata.needs_prompt or events.form.opens_late) and events.reached < after and not after.tokens
    # The worker sends again what Redis lost when it died, or another worker computes it again.
    is_ahead = after.tokens > known.tokens or (has_prompt and not known.tokens and not known.is_done)
    if not (known.is_done and is_ahead):
        async with _waiting(outputs) if is_ahead else nullcontext():
            # After the last token of a request, more events exist only if the request is done: the events of its end.
            while not answer.ended and (
                answer.tokens < after.tokens or ((known.is_done or has_prompt) and events.reached < after)
            ):
                beginning += events.feed(await outputs.next())
    if events.reached < after:
        last = max(events.reached, EventId(known.tokens))
        raise _wrong(None, f"There is no event {after} in this stream yet; its last one is {last}.")
    return beginning


@asynccontextmanager
async def _waiting(outputs: OutputBuffer) -> AsyncIterator[None]:
    """Wait for at most LOST_TAIL_S, and look at the log often: output is not published to this gateway yet."""
    loop = asyncio.get_running_loop()
    looks = [loop.call_later(LOST_TAIL_S * n / LOOKS, outputs.suspect) for n in range(1, LOOKS)]
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOST_TAIL_S):
                yield
    finally:
        for look in looks:
            look.cancel()


def not_found() -> NotFound:
    """Return the error for a stream that cannot be resumed. The error hides whether the stream ever existed."""
    return NotFound("There is no such stream. It may have ended too long ago; check the id, and the path.")


def several_prompts(count: int) -> InvalidRequest:
    return InvalidRequest(
        f"The stream of a call with {count} prompts cannot be taken up again; send one prompt per call.",
        param="id",
        code="several_prompts",
    )


def _wrong(param: str | None, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=param or LAST_EVENT_ID, code="invalid_event_id")
