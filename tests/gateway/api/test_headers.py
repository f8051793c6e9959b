"""The id that a client gives is in the answer and in the log; the server's own id stays its own."""

from __future__ import annotations

import re

import pytest

from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import RunningGateway, raw_request, tokens


async def test_without_an_id_of_the_client_both_headers_have_that_of_the_server(gateway: RunningGateway) -> None:
    reply = await gateway.get("/v1/models")
    assert re.fullmatch("[0-9a-f]{32}", reply.headers["x-request-id"])
    assert reply.headers["x-quire-request-id"] == reply.headers["x-request-id"]


async def test_the_id_of_a_client_comes_back_and_is_logged(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gateway.access")
    async with gateway.worker(emit(tokens("a"), "stop")):
        reply = await gateway.post(
            "/v1/completions", {"model": "test-model", "prompt": "x"}, X_Request_Id="trace/1.2:[x]~!"
        )
    assert reply.headers["x-request-id"] == "trace/1.2:[x]~!"
    server_id = reply.headers["x-quire-request-id"]
    assert reply.json["id"] == f"cmpl-{server_id}"
    [record] = caplog.records
    assert record.__dict__["client_request_id"] == "trace/1.2:[x]~!"
    assert record.__dict__["request_id"] == server_id
    assert f"request={server_id} " in record.getMessage()
    assert "client_request=trace/1.2:[x]~!" in record.getMessage()


async def test_streams_and_errors_have_both_ids(gateway: RunningGateway) -> None:
    async with (
        gateway.worker(emit(tokens("a"), "stop")),
        gateway.stream(
            "/v1/completions", {"model": "test-model", "prompt": "x", "stream": True}, X_Request_Id="mine"
        ) as stream,
    ):
        assert stream.response.headers["X-Request-Id"] == "mine"
        assert len(stream.response.headers["X-Quire-Request-Id"]) == 32
    lost = await gateway.send(raw_request("GET", "/nothing", headers={"X-Request-Id": "mine"}))
    assert (lost.status, lost.headers["x-request-id"]) == (404, "mine")


@pytest.mark.parametrize("value", ["two words", 'a"b', "a'b", "x" * 129, "é", "a\tb"])
async def test_an_id_that_cannot_be_logged_is_refused(gateway: RunningGateway, value: str) -> None:
    reply = await gateway.send(raw_request("GET", "/v1/models", headers={"X-Request-Id": value}))
    assert (reply.status, reply.error["param"]) == (400, "X-Request-Id")
    assert len(reply.headers["x-request-id"]) == 32


async def test_two_ids_are_refused(gateway: RunningGateway) -> None:
    reply = await gateway.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\r\nX-Request-Id: b\r\n\r\n")
    assert (reply.status, reply.error["param"]) == (400, "X-Request-Id")
    assert "2 values" in reply.error["message"]
