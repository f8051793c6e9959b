"""The spans of an attempt: their names, times, links and attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from quire.shared.protocol.broker import Claim
from quire.shared.telemetry.spans import Tracer
from quire.shared.telemetry.trace_context import TraceContext
from quire.worker.queue.attempt_spans import span_id_of, spans_of
from quire.worker.queue.counts import ClaimCounts

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
FIRST, SECOND = "00000000000000aa" + "0" * 16, "00000000000000bb" + "0" * 16


@dataclass
class RecordedSpan:
    name: str
    attributes: dict[str, Any]
    began_ns: int | None
    span_id: int
    links: Sequence[TraceContext]
    ended: bool = False

    def set_attribute(self, name: str, value: Any) -> None:
        self.attributes[name] = value

    def set_status(self, status: object) -> None:
        self.attributes["status"] = status

    def end(self, end_time: int | None = None) -> None:
        assert not self.ended
        self.ended = True


@dataclass
class RecordingTracer:
    spans: list[RecordedSpan] = field(default_factory=list)

    def span(
        self,
        name: str,
        parent: TraceContext,
        attributes: Mapping[str, Any],
        *,
        began_ns: int | None = None,
        span_id: int = 0,
        links: Sequence[TraceContext] = (),
    ) -> RecordedSpan:
        assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}") == (TRACE, SPAN)
        self.spans.append(RecordedSpan(name, dict(attributes), began_ns, span_id, list(links)))
        return self.spans[-1]


def claim(attempt: str = FIRST, emitted: int = 0, deaths: int = 0, **more: Any) -> Claim:
    more = {"traceparent": PARENT, **more}
    return Claim("r1", attempt, "gateway", "standard", b"", emitted, 250, deaths, (), **more)


def test_a_first_attempt_is_queue_then_prefill_then_decode() -> None:
    tracer = RecordingTracer()
    spans = spans_of(cast(Tracer, tracer), claim(), "w1")
    assert spans is not None
    spans.set_prompt_tokens(12)
    spans.first_tokens()
    spans.end("stop", 7)
    queue, prefill, decode = tracer.spans
    assert [one.name for one in tracer.spans] == ["queue", "prefill", "decode"]
    assert all(one.ended for one in tracer.spans)
    assert queue.began_ns is not None
    assert prefill.began_ns == queue.began_ns + 250_000_000
    assert queue.attributes["quire.priority"] == "standard"
    for span in tracer.spans:
        assert {name: span.attributes[f"quire.{name}"] for name in ("request.id", "worker.id", "attempt")} == {
            "request.id": "r1",
            "worker.id": "w1",
            "attempt": 1,
        }
    assert (prefill.span_id, prefill.attributes["gen_ai.usage.input_tokens"]) == (0xAA, 12)
    assert (decode.attributes["quire.outcome"], decode.attributes["gen_ai.usage.output_tokens"]) == ("stop", 7)


def test_a_recovery_links_to_the_attempt_before_it_and_counts_its_own_tokens() -> None:
    tracer = RecordingTracer()
    later = claim(attempt=SECOND, deliveries=2, before=FIRST, emitted=5, deaths=1)
    spans = spans_of(cast(Tracer, tracer), later, "w2")
    assert spans is not None
    spans.first_tokens()
    spans.end("length", 9)
    recovery, decode = tracer.spans
    assert (recovery.name, recovery.span_id) == ("recovery", 0xBB)
    assert [link.span_id for link in recovery.links] == [0xAA]
    assert recovery.attributes["quire.recovery.earlier_tokens"] == 5
    assert recovery.attributes["quire.recovery.deaths"] == 1
    assert {span.attributes["quire.attempt"] for span in tracer.spans} == {2}
    assert decode.attributes["gen_ai.usage.output_tokens"] == 4


@pytest.mark.parametrize("outcome", ["error", "lost"])
def test_an_attempt_that_fails_is_marked(outcome: str) -> None:
    tracer = RecordingTracer()
    spans = spans_of(cast(Tracer, tracer), claim(), "w1")
    assert spans is not None
    spans.end(outcome, 0)
    assert tracer.spans[-1].attributes["error.type"] == outcome
    assert "gen_ai.usage.output_tokens" not in tracer.spans[-1].attributes


def test_an_attempt_token_that_is_not_hexadecimal_gives_no_id() -> None:
    assert span_id_of("not hexadecimal at all") == 0


def test_the_queue_span_tells_how_a_request_came_to_the_holder_of_its_prefix() -> None:
    tracer = RecordingTracer()
    assert spans_of(cast(Tracer, tracer), claim(placement="waited", holder="w7"), "w1")
    queue = tracer.spans[0]
    assert queue.attributes["quire.prefix.placement"] == "waited"
    assert queue.attributes["quire.prefix.holder"] == "w7"
    assert spans_of(cast(Tracer, tracer), claim(), "w1")
    assert not any(name.startswith("quire.prefix") for name in tracer.spans[2].attributes)


def test_first_claims_are_counted_by_placement() -> None:
    counts = ClaimCounts()
    for placement in ("holder", "holder", "waited", "busy", ""):
        counts.note(claim(placement=placement))
    counts.note(claim(placement="holder", deliveries=2))
    assert counts.placed == {"holder": 2, "waited": 1, "busy": 1}
