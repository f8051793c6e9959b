"""Below the application: errors of HTTP have the shape of the API, and every response the common headers."""

from __future__ import annotations

import asyncio

from quire.gateway.server.http_server import MAX_HEADER_BYTES, MAX_HEADERS
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, RunningGateway, chat_body, raw_request, read_reply, tokens


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


async def test_a_slash_at_the_end_of_a_path_does_not_count(gateway: RunningGateway) -> None:
    models = await gateway.get("/v1/models/")
    assert (models.status, models.body) == (200, (await gateway.get("/v1/models")).body)
    assert (await gateway.get(f"/v1/models/{MODEL}/")).status == 200
    async with gateway.worker(emit(tokens("a"), "stop")):
        reply = await gateway.post("/v1/chat/completions/", chat_body())
    assert reply.status == 200
    assert gateway.gateway.meters.http["/v1/chat/completions", "200"] == 1
    # The query stays, and an absolute path is the same one.
    assert "'worker'" in (await gateway.get("/status/?worker=1")).error["message"]
    assert (await gateway.get("http://test/v1/models/")).status == 200
    for path in ("/", "/chat.js/"):
        assert (await gateway.get(path)).status == 200
    for path in ("/v1/models//", "/v1/%2F"):
        assert (await gateway.get(path)).status == 404
    assert (await gateway.send(b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n")).status in (400, 404, 405)


async def test_a_client_that_waits_for_100_gets_it(gateway: RunningGateway) -> None:
    body = b'{"prompt": "x", "add_special_tokens": false}'
    head = raw_request("POST", "/tokenize", b"", {"Expect": "100-Continue", "Content-Length": str(len(body))})
    reader, writer = await gateway.connect(head)
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    reply = await asyncio.wait_for(read_reply(reader), 60)
    writer.close()
    assert (reply.status, reply.json["count"]) == (200, 1)
