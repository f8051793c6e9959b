"""POST /v1/responses/compact, and the summaries of calls whose prompt passes their `compact_threshold`.

A summary is the answer of an ordinary request: it waits in the queue, is charged to the API key of the call, and goes
on at another worker if its own dies.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from quire.gateway.admission.terms import REQUEST_TIMEOUT, read_terms
from quire.gateway.api.call import Call
from quire.gateway.api.caller import caller_of
from quire.gateway.api.labels import user_hash
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.api.responses.dialect import ResponseDialect
from quire.gateway.api.responses.summaries import compacted_response, summary_text
from quire.gateway.errors.api_errors import REQUEST_ID
from quire.gateway.model.renderer import Renderer
from quire.gateway.serving.calls import serve_with
from quire.gateway.serving.service import Gateway
from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.transcript import Transcript
from quire.gateway.stream.writer import write_body
from quire.shared.protocol.broker import new_id


async def compact(dialect: ResponseDialect, gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """POST /v1/responses/compact: returns the messages of the user and a summary, as the input of a later call."""
    compaction = _CompactCall(dialect)
    return await serve_with(dialect, gateway, request, compaction.write, compaction.read)


@dataclass(slots=True)
class _CompactCall:
    """One call of /v1/responses/compact. items: those that it compacts."""

    dialect: ResponseDialect
    items: list[dict[str, Any]] = field(default_factory=list)

    async def read(self, body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> Call:
        self.items, call = await self.dialect.read_compaction(body, limits, renderer)
        return call

    async def write(
        self, gateway: Gateway, request: web.Request, buffer: OutputBuffer, transcript: Transcript, call: Call
    ) -> web.StreamResponse:
        call_id = request[REQUEST_ID]
        summary = await summary_text(call_id, gateway.model, buffer, transcript)
        answer = compacted_response(call_id, self.items, summary, transcript)
        return await write_body(request, iter([answer]), gateway.meters, gateway.settings.write_timeout_s)


async def summarise(gateway: Gateway, request: web.Request, call: Call) -> str:
    """Run the call that asks for a summary, before the call of `request` that needs it. Raises ApiError."""
    caller, settings = caller_of(request), gateway.settings
    call = gateway.key_limits.restricted(caller, call, {})
    given = ((name, value) for name, value in request.headers.items() if name.title() == REQUEST_TIMEOUT)
    headers = CIMultiDictProxy(CIMultiDict(given))
    terms = read_terms(gateway.submission.terms, headers, {}, request.path, call, settings.max_timeout_s)
    terms = gateway.key_limits.charged(caller, call.model, terms, user_hash(call.user, gateway.user_hash_key))
    call_id = new_id()
    requests = call.requests(call_id)
    metadata = call.metadata(ResponseDialect.name, int(time.time()))
    terms = terms._replace(metadata=metadata.encode())
    with gateway.listening([call_id], False, caller.owner) as buffer:
        await gateway.submission.submit(requests, terms, call.files)
        buffer.accept(terms.deadline_ms / 1000 or None, is_logged=False)
        buffer.is_responsible = True
        transcript = Transcript(metadata, gateway.model, buffer.cursors)
        return await summary_text(call_id, gateway.model, buffer, transcript)
