"""Errors: their statuses, their shape in each dialect, and what they hide."""

from __future__ import annotations

import asyncio

import pytest

from quire.gateway.errors import api_errors
from quire.gateway.errors.api_errors import ApiError
from quire.gateway.errors.message_errors import error_json, is_messages_path
from tests.support.gateway.running import CHAT, RunningGateway, raw_request, read_reply

# --- The errors of the API: status, type and code of each class, and the JSON of a body -------------------------------


def classes(cls: type[ApiError] = ApiError) -> list[type[ApiError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in classes(child))]


@pytest.mark.parametrize("cls", [cls for cls in classes() if cls.__module__ == api_errors.__name__])
def test_a_class_says_whether_client_or_server_is_at_fault(cls: type[ApiError]) -> None:
    assert 400 <= cls.status < 600
    assert cls.type
    if cls.type == "invalid_request_error":
        assert cls.status < 500


# --- Error responses have one shape, also for malformed HTTP and for internal errors of the gateway -------------------


async def test_paths_and_methods_that_are_not_here(server: RunningGateway) -> None:
    reply = await server.get("/v1/nothing")
    assert (reply.status, reply.error["code"]) == (404, "not_found")
    reply = await server.get(CHAT)
    assert (reply.status, reply.error["code"], reply.headers["allow"]) == (405, "method_not_allowed", "POST")
    reply = await server.post("/v1/models", {})
    assert reply.status == 405


async def test_an_expectation_that_no_server_knows(server: RunningGateway) -> None:
    """aiohttp itself would answer an unknown Expect header first, in plain text."""
    for method, path in [("POST", CHAT), ("GET", "/healthz"), ("GET", "/nothing"), ("PUT", CHAT)]:
        before = server.gateway.meters.refusals["expectation_failed"]
        reply = await server.send(raw_request(method, path, b"{}", {"Expect": "tea"}))
        assert (reply.status, reply.error["code"]) == (417, "expectation_failed")
        assert reply.error["message"] == "The header Expect may only be 100-continue, not 'tea'; leave it out."
        assert reply.headers["content-type"].startswith("application/json")
        assert len(reply.headers["x-request-id"]) == 32
        assert reply.headers["server"] == "quire"
        assert server.gateway.meters.refusals["expectation_failed"] == before + 1


HTTP: dict[str, tuple[bytes, int]] = {
    "no HTTP": (b"hello\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50 + b"\r\n\r\n", 400),
    "both lengths": (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "negative length": (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
    "a header of 10 kB": (b"GET / HTTP/1.1\r\nX: " + b"x" * 10_000 + b"\r\n\r\n", 431),
    "a path of 10 kB": (b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\n\r\n", 431),
    "10000 headers": (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n", 431),
    "NUL in a header": (b"GET / HTTP/1.1\r\nX: a\x00b\r\n\r\n", 400),
}


async def test_what_is_not_http(server: RunningGateway) -> None:
    for data, status in HTTP.values():
        reply = await server.send(data)
        assert reply.status == status
        assert reply.error["type"] == "invalid_request_error"
        # The headers of every answer hide the versions of the server's software.
        assert (reply.headers["server"], reply.headers["x-content-type-options"]) == ("quire", "nosniff")


async def test_a_broken_chunk_is_the_clients_fault(server: RunningGateway) -> None:
    head = raw_request("POST", CHAT, b"", {"Content-Length": "", "Transfer-Encoding": "chunked"})
    reader, writer = await server.connect(head + b"zz\r\nnot a chunk\r\n")
    reply = await asyncio.wait_for(read_reply(reader), 60)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    writer.close()


async def test_a_fault_of_the_gateway_is_a_500_without_details(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*arguments: object) -> None:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(gateway.gateway.submission, "submit", broken)
    reply = await gateway.chat()
    assert (reply.status, reply.error["code"]) == (500, "internal")
    assert "secret" not in reply.error["message"]
    assert reply.headers["x-request-id"] in reply.error["message"]


# --- Errors in the shape of the Messages API --------------------------------------------------------------------------


def test_the_json_is_one_line_of_ascii() -> None:
    text = error_json(api_errors.ApiError("line\n\u2028\u00e9"), "abc")
    assert text.isascii()
    assert "\n" not in text


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/messages", True),
        ("/v1/messages/count_tokens", True),
        ("/v1/messages/", True),
        ("/v1/messages/msg_1/stream", True),
        ("/v1/messagesx", False),
        ("/v1/chat/completions", False),
        ("/", False),
    ],
)
def test_the_paths(path: str, expected: bool) -> None:
    assert is_messages_path(path) is expected
