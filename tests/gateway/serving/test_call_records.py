"""What a call leaves behind beside its answer: in the log, in a trace, and in Redis for its worker."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from quire.gateway.serving.calls import MAX_LOGGED_PROMPT
from quire.shared.protocol.messages import Delta, Outcome, StepItem
from quire.shared.telemetry.trace_context import TraceContext
from tests.gateway.conftest import Start
from tests.gateway.telemetry.test_telemetry import TRACEPARENT, Tracer
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import RunningGateway, chat_body, running_gateway, tokens
from tests.support.hand_worker import HandWorker

CHAT = "/v1/chat/completions"


async def test_a_traced_call_tells_its_worker_the_span(gateway: RunningGateway) -> None:
    tracer = Tracer()
    async with running_gateway(replace(gateway.settings, port=0), tracer) as traced:
        worker = HandWorker(traced)
        call = asyncio.create_task(traced.post(CHAT, chat_body(max_tokens=7), traceparent=TRACEPARENT))
        claim = await worker.claim()
        await worker.log(claim, [StepItem(claim.request_id, 0, (Delta(0, (65,), "stop"),), Outcome("stop"))])
        assert (await asyncio.wait_for(call, 20)).status == 200
    [span] = tracer.spans
    assert span.context is not None
    assert str(tracer.parents[0]) == TRACEPARENT
    told = TraceContext.parse(claim.traceparent)
    assert told is not None
    assert (told.trace_id, told.span_id) == (span.context.trace_id, span.context.span_id)
    attributes: Any = span.attributes
    assert (attributes["gen_ai.operation.name"], attributes["gen_ai.request.max_tokens"]) == ("chat", 7)


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "the secret"}]}),
        ("/v1/completions", {"prompt": "the secret"}),
        ("/v1/responses", {"input": "the secret", "instructions": "the rule"}),
    ],
)
async def test_the_beginning_of_a_prompt_is_logged_if_that_is_asked_for_also_of_a_call_that_is_refused(
    start_gateway: Start, caplog: pytest.LogCaptureFixture, path: str, parameters: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO, "gateway")
    gateway = await start_gateway(log_prompts=True)
    async with gateway.worker(emit(tokens("a"))):
        reply = await gateway.post(path, {"model": gateway.settings.name, "user": "not asked", **parameters})
        long = await gateway.post("/v1/completions", {"prompt": "x" * (2 * MAX_LOGGED_PROMPT)})
    assert (reply.status, long.status) == (200, 400)
    logged = {record.request_id: record for record in caplog.records if hasattr(record, "prompt")}
    first, second = (logged[one.headers["x-request-id"]] for one in (reply, long))
    assert json.loads(first.prompt) == parameters
    assert first.prompt in first.getMessage()
    assert len(second.prompt) == MAX_LOGGED_PROMPT


async def test_a_call_whose_record_is_corrupt_is_gone_and_that_is_counted_and_logged_once(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    one = gateway.gateway
    async with gateway.worker(emit(tokens("a"))):
        call_id = (await gateway.post(CHAT, chat_body(), idempotency_key="k")).headers["x-request-id"]
        await one.broker.client.hset(one.broker.keys.request(call_id), "metadata", b"\xff")
        repeated = await gateway.post(CHAT, chat_body(), idempotency_key="k")
    assert (repeated.status, repeated.error["code"]) == (503, "broker_unavailable")
    resumed = await gateway.get(f"{CHAT}/chatcmpl-{call_id}/stream")
    cancelled = await gateway.post(f"{CHAT}/chatcmpl-{call_id}/cancel", b"")
    assert [(reply.status, reply.error["code"]) for reply in (resumed, cancelled)] == [(404, "not_found")] * 2
    assert one.meters.corrupt_metadata == 3
    errors = [record for record in caplog.records if (record.name, record.levelname) == ("gateway", "ERROR")]
    assert [vars(record)["request_id"] for record in errors] == [call_id]
