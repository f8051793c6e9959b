"""Each HTTP request is counted once, and has one line in the access log."""

from __future__ import annotations

import pytest

from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import RunningGateway, tokens


async def test_the_log_has_one_line_per_request_and_no_prompt(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with gateway.worker(emit(tokens("an answer"), "stop")):
        reply = await gateway.chat(messages=[{"role": "user", "content": "a secret question"}])
    lines = [record.getMessage() for record in caplog.records if record.name == "gateway.access"]
    [line] = [line for line in lines if "/v1/chat/completions" in line]
    assert line.startswith(f"POST /v1/chat/completions 200 request={reply.headers['x-request-id']} ms=")
    assert "ttft_ms" not in line  # the answer left in one piece
    assert line.endswith(
        f"outcome=stop prompt_tokens={reply.json['usage']['prompt_tokens']} tokens={len(tokens('an answer'))}"
    )
    assert "secret" not in caplog.text
    assert "an answer" not in caplog.text


async def test_probes_are_logged_at_debug_only(gateway: RunningGateway, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gateway.access")
    await gateway.get("/healthz")
    await gateway.get("/v1/models")
    lines = [record.getMessage() for record in caplog.records if record.name == "gateway.access"]
    assert [line.split(" request=")[0] for line in lines] == ["GET /v1/models 200"]
    caplog.set_level("DEBUG", "gateway.access")
    await gateway.get("/healthz")
    assert caplog.records[-1].getMessage().startswith("GET /healthz 200")


async def test_a_request_is_counted_by_its_route_and_a_call_by_its_outcome(gateway: RunningGateway) -> None:
    meters = gateway.gateway.meters
    async with gateway.worker(emit(tokens("a"), "stop")):
        await gateway.chat()
    await gateway.chat(n=0)
    await gateway.get("/no/such/path")
    await gateway.get("/v1/models/another")
    assert meters.calls["chat", "new", "stop"] == 1
    assert meters.calls["chat", "new", "refused"] == 1
    assert sum(meters.calls.values()) == 2
    assert meters.http["/v1/chat/completions", "200"] == 1
    assert meters.http["/v1/chat/completions", "400"] == 1
    assert meters.http["other", "404"] == 1
    assert meters.http["/v1/models/{name}", "404"] == 1
    assert {name: count for name, count in meters.refusals.items() if count} == {
        "invalid_request": 1,
        "not_found": 1,
        "model_not_found": 1,
    }
