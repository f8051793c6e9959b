"""The parser of request bodies turns any bytes into an object or into an error of this API."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.gateway.api.parsing import has_more_values, max_values, parse_object
from quire.gateway.errors.api_errors import InvalidRequest, body
from tests.support.gateway.refusals import CHAT, COMPLETIONS, check
from tests.support.gateway.running import RunningGateway, chat_body, raw_request

MALFORMED = {
    "empty": (b"", "not JSON"),
    "cut": (b'{"model": "x"', "not JSON"),
    "an array": (b"[]", "must be a JSON object"),
    "a string": (b'"x"', "must be a JSON object"),
    "null": (b"null", "must be a JSON object"),
    "trailing": (b"{} {}", "not JSON"),
    "NaN": (b'{"temperature": NaN}', "NaN"),
    "Infinity": (b'{"temperature": -Infinity}', "Infinity"),
    "nested arrays": (b'{"messages": ' + b"[" * 60_000, "nested too deeply"),
    "nested objects": (b'{"a":' * 19_000, "nested too deeply"),
    "not UTF-8": (b'{"model": "\xff\xfe"}', "not UTF-8"),
    "UTF-16": ('{"model": "x"}'.encode("utf-16"), "not UTF-8"),
    "UTF-16 without mark": ('{"model": "x"}'.encode("utf-16-le"), "not JSON"),
    "byte order mark": (b"\xef\xbb\xbf{}", "byte order mark"),
    "raw NUL": (b'{"model": "\x00"}', "not JSON"),
    "a number of 5000 digits": (b'{"seed": ' + b"1" * 5000 + b"}", "too long"),
}


@pytest.mark.parametrize(("body", "says"), MALFORMED.values(), ids=MALFORMED)
async def test_a_body_that_is_not_json(server: RunningGateway, body: bytes, says: str) -> None:
    await check(server, CHAT, body, 400, None, says)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_keys_that_occur_twice(server: RunningGateway, path: str) -> None:
    await check(server, path, b'{"model": "a", "model": "b"}', 400, "model", "twice")
    await check(server, path, b'{"model": "a", "x": {"y": 1, "y": 1}}', 400, "y", "twice")


@pytest.mark.parametrize("name", ["messages", "stop", "user", "metadata", "model"])
async def test_half_of_a_surrogate_pair(server: RunningGateway, name: str) -> None:
    await check(server, CHAT, f'{{"{name}": ["\\ud83d"]}}'.encode(), 400, name, "surrogate")
    await check(server, CHAT, f'{{"{name}": {{"\\uDE00x": 1}}}}'.encode(), 400, name, "surrogate")


async def test_a_whole_surrogate_pair_is_a_character(server: RunningGateway) -> None:
    await check(server, CHAT, b'{"model": "\\ud83d\\ude00", "messages": []}', 404, "model", "😀")


async def test_a_number_that_is_infinite_after_parsing(server: RunningGateway) -> None:
    body = json.dumps(chat_body(temperature=1)).replace(": 1}", ": 1e999}")
    await check(server, CHAT, body.encode(), 400, "temperature", "inf")


async def test_a_body_over_the_limit(server: RunningGateway) -> None:
    head = raw_request("POST", CHAT, b"", {"Content-Length": "1000000"})
    reply = await server.send(head)  # refused before the client sent any of the body
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")
    assert "100000 bytes" in reply.error["message"]


async def test_a_chunked_body_over_the_limit(server: RunningGateway) -> None:
    head = raw_request("POST", CHAT, b"", {"Content-Length": "", "Transfer-Encoding": "chunked"})
    chunk = b"2710\r\n" + b" " * 10_000 + b"\r\n"
    reply = await server.send(head + 11 * chunk)
    assert reply.status == 413


async def test_a_body_that_does_not_come(server: RunningGateway) -> None:
    reply = await server.send(raw_request("POST", CHAT, b"", {"Content-Length": "10"}))
    assert (reply.status, reply.error["code"]) == (408, "body_timeout")


async def test_a_body_in_another_encoding_or_of_another_type(server: RunningGateway) -> None:
    for headers in ({"Content-Encoding": "gzip"}, {"Content-Type": "text/plain"}, {"Content-Type": ""}):
        reply = await server.post(CHAT, b"{}", **headers)
        assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")


async def test_after_all_that_the_gateway_still_answers(gateway: RunningGateway) -> None:
    for malformed, _ in MALFORMED.values():
        await gateway.post(CHAT, malformed)
    assert (await gateway.get("/healthz")).json == {"status": "ok"}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.binary(max_size=100))
def test_any_bytes_are_an_object_or_an_error(data: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        assert isinstance(parse_object(data), dict)


@given(st.dictionaries(st.text(), values, max_size=4))
def test_what_python_writes_as_json_is_read_back_or_refused(value: dict[str, Any]) -> None:
    try:
        assert parse_object(json.dumps(value).encode()) == value
    except InvalidRequest as error:
        json.loads(body(error))


def test_many_keys_of_which_one_occurs_twice_cost_little() -> None:
    pairs = ",".join(f'"{index}":0' for index in range(200_000))
    with pytest.raises(InvalidRequest, match="'7' occurs twice"):
        parse_object(f'{{{pairs},"7":1}}'.encode(), 10**6)


def count(value: object) -> int:
    """Count the keys, the elements after the first of each container, and the containers."""
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + len(value) + sum(map(count, value.values()))
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(count, value))
    return 0


tricky = st.text(alphabet='",:[]{}\\a\u00e9', max_size=8)


@given(
    st.recursive(
        st.none() | st.integers() | tricky,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(tricky, inner, max_size=4),
        max_leaves=12,
    ),
    st.booleans(),
)
def test_values_are_counted_as_the_parser_finds_them(value: object, is_ascii: bool) -> None:
    text, found = json.dumps(value, ensure_ascii=is_ascii), count(value)
    strings = text.replace("\\\\", "").replace('\\"', "").count('"') // 2
    assert not has_more_values(text, max(found, strings))
    if found:
        assert has_more_values(text, found - 1)


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt":[' + "[]," * 40_000 + "[]]}",
        '{"messages":[' + "{}," * 40_000 + "{}]}",
        "{" + ",".join(f'"{i}":0' for i in range(40_000)) + "}",
        '{"prompt":[' + "1," * 70_000 + "1]}",
        '{"stop":[' + '"",' * 70_000 + '""]}',
        '{"prompt":[' + "[" * 70_000,  # invalid JSON; the parser must not raise RecursionError
    ],
)
def test_a_body_with_too_many_values_is_refused_before_it_is_parsed(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*_: object, **__: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(json, "loads", parsed)
    with pytest.raises(InvalidRequest, match="more than 65536 values") as caught:
        parse_object(body.encode())
    assert caught.value.code == "too_many_values"


def test_long_texts_are_not_counted_as_values() -> None:
    prompt = 'a, "b": [{c}], \\ ' * 20_000
    assert parse_object(json.dumps({"prompt": prompt}).encode()) == {"prompt": prompt}
    prompts = [prompt[:500]] * 600
    assert parse_object(json.dumps({"prompt": prompts}).encode()) == {"prompt": prompts}


def test_larger_bodies_may_have_more_values() -> None:
    assert (max_values(1024), max_values(1 << 22), max_values(1 << 26)) == (1 << 16, 1 << 18, 1 << 22)
    body = b'{"prompt":[' + b"1," * 70_000 + b"1]}"
    assert len(parse_object(body, max_values(1 << 22))["prompt"]) == 70_001
