"""The spans of an attempt at a request, under the gateway's span: `queue`, `prefill` or `recovery`, `decode`.

    created           claimed                 first token                 end
       |----- queue -----|------- prefill --------|-------- decode --------|      first attempt
                         |------- recovery -------|-------- decode --------|      later attempt

The span from claim to first token takes its id from the beginning of the attempt token. So the recovery of a later
attempt can link to it even if the worker that made it has died.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from quire.shared.protocol.broker import Claim
from quire.shared.protocol.states import OutcomeName
from quire.shared.telemetry.trace_context import TraceContext
from quire.worker.queue.committer import LOST

if TYPE_CHECKING:
    from quire.shared.telemetry.spans import Tracer

_SPAN_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)


class AttemptSpans:
    """The spans of one attempt: three calls per attempt, none per token."""

    def __init__(self, tracer: Tracer, parent: TraceContext, claim: Claim, worker_id: str) -> None:
        self._tracer = tracer
        self._parent = parent
        self._earlier = claim.emitted
        self._attributes: dict[str, str | int] = {
            "quire.request.id": claim.request_id,
            "quire.worker.id": worker_id,
            "quire.attempt": claim.deliveries,
        }
        self.has_tokens = False
        now_ns = time.time_ns()
        name = "prefill"
        more: dict[str, int] = {}
        before: list[TraceContext] = []
        if claim.deliveries == 1:
            attributes = {**self._attributes, "quire.priority": claim.priority_class}
            if claim.placement:
                attributes |= {"quire.prefix.placement": claim.placement, "quire.prefix.holder": claim.holder}
            tracer.span("queue", parent, attributes, began_ns=now_ns - 1_000_000 * max(0, claim.waited_ms)).end(now_ns)
        else:
            name = "recovery"
            more = {"quire.recovery.earlier_tokens": claim.emitted, "quire.recovery.deaths": claim.deaths}
            if span_id := span_id_of(claim.before):
                before.append(TraceContext(parent.trace_id, span_id, parent.flags))
        self._span = tracer.span(
            name,
            parent,
            {**self._attributes, **more},
            began_ns=now_ns,
            span_id=span_id_of(claim.attempt),
            links=before,
        )

    def set_prompt_tokens(self, prompt_tokens: int) -> None:
        """Note the length of the prompt."""
        self._span.set_attribute("gen_ai.usage.input_tokens", prompt_tokens)

    def first_tokens(self) -> None:
        """End the first span and begin `decode`: a step of this attempt has emitted tokens."""
        self.has_tokens = True
        now_ns = time.time_ns()
        self._span.end(now_ns)
        self._span = self._tracer.span("decode", self._parent, self._attributes, began_ns=now_ns)

    def end(self, outcome: str, tokens: int) -> None:
        """End the attempt.

        outcome: that of the request, or LOST or RELEASED. tokens: those in the request's log.
        """
        self._span.set_attribute("quire.outcome", outcome)
        if self.has_tokens:
            self._span.set_attribute("gen_ai.usage.output_tokens", max(0, tokens - self._earlier))
        if outcome in (OutcomeName.ERROR, LOST):
            from quire.shared.telemetry.spans import fail

            fail(self._span, outcome)
        self._span.end()


def spans_of(tracer: Tracer, claim: Claim, worker_id: str) -> AttemptSpans | None:
    """Begin the spans of a claim; None if its gateway does not trace the request."""
    parent = TraceContext.parse(claim.traceparent)
    return AttemptSpans(tracer, parent, claim, worker_id) if parent else None


def span_id_of(attempt: str) -> int:
    """Return the id of the span from an attempt's claim to its first token; 0 for a token that is not hexadecimal."""
    return int(attempt[:16], 16) if _SPAN_ID.match(attempt) else 0
