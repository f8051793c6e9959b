"""The span of an HTTP request, as the main path uses it. `gateway/features/tracing` makes spans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from quire.gateway.api.call import Call
from quire.shared.telemetry.trace_context import TraceContext


class RequestSpan(Protocol):
    """The span of one HTTP request. context: for the spans of its attempts."""

    context: TraceContext

    @property
    def trace_id(self) -> str: ...

    def asks(self, dialect: str, call: Call) -> None:
        """Record the parameters of the call."""
        ...

    def end(self, status: int | None) -> None:
        """End the span; `status` is None if the client left."""
        ...


# Begins the span of a request; None for a request that is not traced.
BeginSpan = Callable[[web.Request], RequestSpan | None]
# The span of a request, if it is traced.
SPAN: web.RequestKey[RequestSpan] = web.RequestKey("span")
