"""The verb of an embedding call, `serve`, and embeddings in batches.

The answer is one body, so there is no stream to resume.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from aiohttp import web
from redis.exceptions import RedisError

from quire.gateway.api.call import Call
from quire.gateway.api.embeddings import EMBEDDINGS, EmbeddingCall, EmbeddingDialect, EmbeddingFormat, render_answer
from quire.gateway.api.headers import IDEMPOTENCY_KEY
from quire.gateway.api.parameters import read
from quire.gateway.errors.api_errors import REQUEST_ID, GenerationFailed
from quire.gateway.serving.calls import serve_with
from quire.gateway.serving.service import Gateway, Hold
from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.transcript import TRANSCRIPT, Transcript
from quire.gateway.stream.writer import write_body
from quire.gateway.telemetry.request_meter import METER

log = logging.getLogger("gateway")

# Longest time for which an answer waits for Redis to delete its output logs.
DROP_S = 0.25


async def serve(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """POST /v1/embeddings: computes the embedding of each input."""
    dialect = EmbeddingDialect(gateway.model, gateway.settings.max_embedding_inputs)
    return await serve_with(dialect, gateway, request, _write_answer)


async def _write_answer(
    gateway: Gateway, request: web.Request, buffer: OutputBuffer, transcript: Transcript, call: Call
) -> web.StreamResponse:
    """Write the embeddings as one body."""
    assert isinstance(call, EmbeddingCall)
    request[TRANSCRIPT] = transcript
    call_id = request[REQUEST_ID]
    embeddings = await collect(buffer, transcript, call.form, call_id)
    if IDEMPOTENCY_KEY not in request.headers:
        await _drop_logs(gateway, buffer)
    parts = render_answer(call_id, transcript.model_name, transcript.metadata, call.form, embeddings)
    return await write_body(request, parts, request[METER], gateway.settings.write_timeout_s)


async def _drop_logs(gateway: Gateway, buffer: OutputBuffer) -> None:
    """Delete the output logs of a call without an idempotency key.

    No client can ask for them again, and embeddings would fill Redis within their retention time.
    """
    with suppress(RedisError, OSError):  # the logs expire by themselves; TimeoutError is an OSError
        async with asyncio.timeout(DROP_S):
            await gateway.broker.drop_output(list(buffer.cursors))


async def collect(
    buffer: OutputBuffer, transcript: Transcript, form: EmbeddingFormat, call_id: str
) -> list[array[float]]:
    """Wait for all embeddings of a call; return them in the order of the inputs.

    Raises ApiError if a request failed, or ended without an embedding, which is a fault of the worker. call_id: for the
    log.
    """
    embeddings: dict[str, array[float]] = {}
    while not transcript.ended:
        for item in await buffer.next():
            transcript.feed(item)  # counts the ends of requests, and keeps the first failure
            if item.outcome is not None and item.outcome.embedding is not None:
                embeddings[item.request_id] = form.finish(item.outcome.embedding)
                await asyncio.sleep(0)  # a call of many inputs must not hold up other calls
    if transcript.error is not None:
        raise transcript.error
    missing = [index for index, id_ in enumerate(buffer.cursors) if id_ not in embeddings]
    if missing:
        log.error(
            "request %s: a worker ended input %d without an embedding (%d of %d inputs have none); check that all "
            "workers of this model have the version of this gateway",
            call_id,
            missing[0],
            len(missing),
            len(embeddings) + len(missing),
            extra={"request_id": call_id},
        )
        raise GenerationFailed("The worker returned no embedding for an input. Try the request again.")
    return [embeddings[id_] for id_ in buffer.cursors]


class EmbeddingLines:
    """Embeddings as lines of batches; those of all owners are the same."""

    def __init__(self, gateway: Gateway, _owner: str) -> None:
        self._gateway = gateway
        self._dialect = EmbeddingDialect(gateway.model, gateway.settings.max_embedding_inputs)
        self.name = self._dialect.name

    def check(self, body: dict[str, Any]) -> None:
        read(body, EMBEDDINGS, unsupported={})

    async def read(self, body: dict[str, Any], hold: Hold) -> EmbeddingCall:
        return await self._dialect.read(body, self._gateway.limits, self._gateway.renderer)

    def form_of(self, call: Call) -> EmbeddingFormat:
        assert isinstance(call, EmbeddingCall)
        return call.form

    async def answer(self, call_id: str, buffer: OutputBuffer, transcript: Transcript, form: object) -> Iterable[str]:
        assert isinstance(form, EmbeddingFormat), "an embedding call has a form"
        embeddings = await collect(buffer, transcript, form, call_id)
        return render_answer(call_id, transcript.model_name, transcript.metadata, form, embeddings)
