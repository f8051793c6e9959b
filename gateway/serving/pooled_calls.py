"""What calls of embeddings and scores have in common: the answer is one body, so there is no stream to resume."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from aiohttp import web
from redis.exceptions import RedisError

from quire.gateway.api.call import Call
from quire.gateway.api.dialect import Dialect
from quire.gateway.api.headers import IDEMPOTENCY_KEY
from quire.gateway.api.parameters import Body, read
from quire.gateway.api.pooled_call import PooledCall, PooledForm
from quire.gateway.errors.api_errors import REQUEST_ID, GenerationFailed
from quire.gateway.serving.service import Gateway, Hold
from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.transcript import TRANSCRIPT, Transcript
from quire.gateway.stream.writer import write_body
from quire.gateway.telemetry.request_meter import METER

log = logging.getLogger("gateway")

# Longest time for which an answer waits for Redis to delete its output logs.
DROP_S = 0.25


async def write_answer(
    gateway: Gateway, request: web.Request, buffer: OutputBuffer, transcript: Transcript, call: Call
) -> web.StreamResponse:
    """Write what the model computed of all prompts as one body."""
    assert isinstance(call, PooledCall)
    request[TRANSCRIPT] = transcript
    call_id = request[REQUEST_ID]
    values = await collect(buffer, transcript, call.form, call_id)
    if IDEMPOTENCY_KEY not in request.headers:
        await _drop_logs(gateway, buffer)
    parts = call.form.answer(call_id, transcript.model_name, transcript.metadata, values)
    return await write_body(request, parts, request[METER], gateway.settings.write_timeout_s)


async def _drop_logs(gateway: Gateway, buffer: OutputBuffer) -> None:
    """Delete the output logs of a call without an idempotency key.

    No client can ask for them again, and embeddings would fill Redis within their retention time.
    """
    with suppress(RedisError, OSError):  # the logs expire by themselves; TimeoutError is an OSError
        async with asyncio.timeout(DROP_S):
            await gateway.broker.drop_output(list(buffer.cursors))


async def collect(buffer: OutputBuffer, transcript: Transcript, form: PooledForm, call_id: str) -> list[Any]:
    """Wait for the values of all prompts of a call; return them in the order of the prompts.

    Raises ApiError if a request failed, or ended without a value, which is a fault of the worker. call_id: for the log.
    """
    values: dict[str, Any] = {}
    while not transcript.ended:
        for item in await buffer.next():
            transcript.feed(item)  # counts the ends of requests, and keeps the first failure
            if item.outcome is not None and item.outcome.embedding is not None:
                values[item.request_id] = form.finish(item.outcome.embedding)
                await asyncio.sleep(0)  # a call of many inputs must not hold up other calls
    if transcript.error is not None:
        raise transcript.error
    missing = [index for index, id_ in enumerate(buffer.cursors) if id_ not in values]
    if missing:
        log.error(
            "request %s: a worker ended input %d without an embedding (%d of %d inputs have none); check that all "
            "workers of this model have the version of this gateway",
            call_id,
            missing[0],
            len(missing),
            len(values) + len(missing),
            extra={"request_id": call_id},
        )
        raise GenerationFailed("The worker returned no embedding for an input. Try the request again.")
    return [values[id_] for id_ in buffer.cursors]


class PooledLines:
    """The calls of a dialect as lines of batches; those of all owners are the same."""

    def __init__(self, gateway: Gateway, dialect: Dialect, body: Body) -> None:
        self._gateway, self._dialect, self._body = gateway, dialect, body
        self.name = dialect.name

    def check(self, body: dict[str, Any]) -> None:
        read(body, self._body.table, self._body.unsupported)

    async def read(self, body: dict[str, Any], hold: Hold) -> Call:
        return await self._dialect.read(body, self._gateway.limits, self._gateway.renderer)

    def form_of(self, call: Call) -> PooledForm:
        assert isinstance(call, PooledCall)
        return call.form

    async def answer(self, call_id: str, buffer: OutputBuffer, transcript: Transcript, form: Any) -> Iterable[str]:
        values = await collect(buffer, transcript, form, call_id)
        answer: Iterable[str] = form.answer(call_id, transcript.model_name, transcript.metadata, values)
        return answer
