"""Below the application: errors of HTTP have the shape of the API, and every response the common headers."""

from __future__ import annotations

from quire.gateway.http_server import MAX_HEADER_BYTES, MAX_HEADERS, HttpServer
from tests.gateway.running import RunningGateway, raw_request


async def test_connections_are_those_of_the_gateways_server(gateway: RunningGateway) -> None:
    assert gateway._runner is not None
    assert type(gateway._runner.server) is HttpServer


async def test_every_response_has_the_common_headers(gateway: RunningGateway) -> None:
    for data in (raw_request("GET", "/healthz"), raw_request("GET", "/nothing"), b"no HTTP at all\r\n\r\n"):
        reply = await gateway.send(data)
        assert reply.headers["server"] == "quire"
        assert reply.headers["x-content-type-options"] == "nosniff"


async def test_a_head_that_is_too_large_is_refused_and_counted(gateway: RunningGateway) -> None:
    long = await gateway.send(raw_request("GET", "/healthz", headers={"X-Long": "x" * (MAX_HEADER_BYTES + 1)}))
    many = await gateway.send(raw_request("GET", "/healthz", headers={f"X-{n}": "1" for n in range(MAX_HEADERS + 1)}))
    for reply in (long, many):
        assert (reply.status, reply.error["code"]) == (431, "headers_too_large")
    meters = gateway.gateway.meters
    assert meters.http["other", "431"] == meters.refusals["headers_too_large"] == 2


async def test_an_unknown_expectation_is_an_error_with_the_id_of_the_request(gateway: RunningGateway) -> None:
    reply = await gateway.send(raw_request("GET", "/healthz", headers={"Expect": "a-miracle"}))
    assert (reply.status, reply.error["code"]) == (417, "expectation_failed")
    assert len(reply.headers["x-request-id"]) == 32
    assert gateway.gateway.meters.refusals["expectation_failed"] == 1
