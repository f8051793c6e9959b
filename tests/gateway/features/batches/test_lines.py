"""Lines of batches: how they are read, checked, run and written."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.gateway.errors.api_errors import ApiError, InvalidRequest, refused
from quire.gateway.features.batches.batch_parameters import BATCH_ENDPOINTS
from quire.gateway.features.batches.batch_store import LinePlace
from quire.gateway.features.batches.custom_ids import CustomIds
from quire.gateway.features.batches.files.storage import CHUNK
from quire.gateway.features.batches.jsonl import RawLine, read_lines
from quire.gateway.features.batches.line import BatchLine, answer_line, call_id_of, error_line, read_line, unrun_line
from quire.gateway.features.batches.line_endpoints import LineEndpoints
from quire.gateway.features.batches.line_run import SHARE
from quire.gateway.routes.table import LINE_ENDPOINTS
from quire.shared.accounts.store import AccountStore
from quire.shared.protocol.keys import LINE_RETENTION_S
from quire.shared.protocol.messages import GenerationRequest, Outcome
from tests.gateway.conftest import Start
from tests.gateway.features.batches.test_batch_service import VECTOR
from tests.support.gateway.batch_calls import BatchClient, chat_line, jsonl, with_key
from tests.support.gateway.fake_worker import Steps, emit
from tests.support.gateway.running import MODEL, RunningGateway, tokens, until

# --- The form of a line of a batch, and the lines of the output files -------------------------------------------------


URL = "/v1/chat/completions"
GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": URL, "body": {"model": "m"}}


def parse(value: Any, *, is_too_long: bool = False) -> BatchLine:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return read_line(RawLine(LinePlace(100, 7), data, is_too_long), URL, 1000)


def test_a_line() -> None:
    assert parse(GOOD) == BatchLine(7, "a", {"model": "m"})


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"custom_id": ""}, "custom_id", "invalid_value"),
        ({"custom_id": 5}, "custom_id", "invalid_value"),
        ({"custom_id": "x" * 513}, "custom_id", "invalid_value"),
        ({"method": "GET"}, "method", "invalid_value"),
        ({"url": "/v1/completions"}, "url", "invalid_value"),
        ({"body": []}, "body", "invalid_value"),
        ({"more": 1}, "more", "invalid_value"),
        ({"body": {"stream": True}}, "stream", "invalid_value"),
        ({"body": {"background": True}}, "background", "invalid_value"),
        ({"body": {"store": True}}, "store", "invalid_value"),
        ({"body": {"priority": "interactive"}}, "priority", "invalid_value"),
        ({"body": {"priority": 0}}, "priority", "invalid_value"),
        ({"body": {"service_tier": "priority"}}, "service_tier", "invalid_value"),
        ({"body": {"service_tier": []}}, "service_tier", "invalid_value"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(change: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse({**GOOD, **change})
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize("name", GOOD)
def test_every_field_is_required(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is missing") as caught:
        parse({key: value for key, value in GOOD.items() if key != name})
    assert caught.value.code == "missing_required_parameter"


@pytest.mark.parametrize(
    "body", [{"stream": False}, {"store": False}, {"priority": "batch"}, {"priority": 5}, {"service_tier": "flex"}]
)
def test_values_that_ask_for_what_a_line_has_are_accepted(body: dict[str, Any]) -> None:
    assert parse({**GOOD, "body": body}).body == body


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"a":NaN}', b'{"a":1,"a":2}', b"\xff", b"null"])
def test_json_is_strict(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"[Ll]ine|key|NaN"):
        parse(data)


def test_a_line_that_is_too_long_names_the_setting() -> None:
    with pytest.raises(InvalidRequest, match="--max-body-bytes"):
        parse(GOOD, is_too_long=True)


def test_the_id_of_a_call_follows_from_batch_and_line() -> None:
    ids = {call_id_of(batch, number) for batch in ("a", "b") for number in range(100)}
    assert len(ids) == 200
    assert all(len(one) == 32 for one in ids)
    assert call_id_of("a", 5) == call_id_of("a", 5)


def test_lines_of_the_output_files_are_one_line_each() -> None:
    name = 'quote " line\n end \u2028'
    answer = "".join(answer_line("id", name, ['{"a":', "1}"]))
    error = error_line("id", name, refused("x", "bad\nvalue"))
    unrun = unrun_line("id", name, "batch_expired", "too late")
    for text in (answer, error, unrun):
        assert text.endswith("\n")
        assert text.count("\n") == 1
        assert json.loads(text)["custom_id"] == name
        assert json.loads(text)["id"] == "batch_req_id"
    assert json.loads(answer)["response"] == {"status_code": 200, "request_id": "id", "body": {"a": 1}}
    assert json.loads(error)["response"]["body"]["error"]["message"] == "bad\nvalue"
    assert (json.loads(unrun)["response"], json.loads(unrun)["error"]["code"]) == (None, "batch_expired")


# --- Duplicates are found among many ids, in little memory ------------------------------------------------------------


def test_every_duplicate_is_found_and_no_other_id() -> None:
    ids = CustomIds()
    assert all(ids.add(f"line-{number}") for number in range(20_000))
    assert not any(ids.add(f"line-{number}") for number in range(0, 20_000, 7))
    assert ids.add("another")
    assert not ids.add("another")


def test_an_id_takes_a_few_bytes() -> None:
    ids = CustomIds()
    for number in range(20_000):
        ids.add(str(number))
    assert ids._slots.itemsize * len(ids._slots) <= 32 * 20_000


def test_two_tables_have_different_hashes() -> None:
    """A client cannot know which ids meet."""
    tables = [CustomIds(), CustomIds()]
    for table in tables:
        table.add("x")
    assert set(tables[0]._slots) != set(tables[1]._slots)


# --- A stream of bytes becomes the same lines, however it is cut ------------------------------------------------------


LINES = st.binary(max_size=20).filter(lambda line: b"\n" not in line)


async def stream(chunks: list[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def split(data: bytes, size: int, most: int = 100) -> list[RawLine | LinePlace]:
    chunks = [data[at : at + size] for at in range(0, len(data), size)]
    return [one async for one in read_lines(stream(chunks), most, LinePlace(0, 1))]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
async def test_places_and_blank_lines(size: int) -> None:
    found = await split(b'{"a":1}\n\n \t\r\n{"b":2}\r\nlast', size)
    assert found == [
        RawLine(LinePlace(0, 1), b'{"a":1}', line=1),
        RawLine(LinePlace(13, 2), b'{"b":2}\r', line=4),
        RawLine(LinePlace(22, 3), b"last", line=5),
        LinePlace(26, 4),
    ]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_line_that_is_too_long_is_cut_and_the_next_one_is_found(size: int) -> None:
    first, *rest = await split(b"x" * 500 + b"\nnext\n", size, most=10)
    assert isinstance(first, RawLine)
    assert (first.is_too_long, first.place) == (True, LinePlace(0, 1))
    assert rest == [RawLine(LinePlace(501, 2), b"next", line=2), LinePlace(506, 3)]


@pytest.mark.parametrize("length", [9, 10, 11])
async def test_the_longest_line(length: int) -> None:
    for end in (b"", b"\n"):
        line, _ = await split(b"x" * length + end, 3, most=10)
        assert isinstance(line, RawLine)
        assert line.is_too_long == (length > 10)


@settings(deadline=None)
@given(lines=st.lists(LINES, max_size=20), size=st.integers(1, 40))
async def test_lines_are_those_of_the_text_and_a_window_reads_its_part(lines: list[bytes], size: int) -> None:
    data = b"\n".join(lines)
    *found, end = await split(data, size)
    assert isinstance(end, LinePlace)
    assert end.offset == len(data)
    raw = [one for one in found if isinstance(one, RawLine)]
    assert [one.data for one in raw] == [line for line in lines if line.strip(b" \t\r")]
    for number, one in enumerate(raw, start=1):
        assert data[one.place.offset :].startswith(one.data)
        assert lines[one.line - 1] == one.data
        assert one.place.number == number
    # Reading from the place of any line gives that line and those after it, with their numbers.
    for index, one in enumerate(raw):
        rest = read_lines(stream([data[one.place.offset :]]), 100, one.place)
        again = [line async for line in rest if isinstance(line, RawLine)]
        assert [replace(line, line=0) for line in again] == [replace(line, line=0) for line in raw[index:]]


@pytest.mark.parametrize("blank", [b"\n", b" \r\n", b" "], ids=repr)
async def test_thirty_megabytes_of_white_space_are_skipped_at_once(blank: bytes) -> None:
    """The event loop stands still only while a piece is searched."""
    data, most = blank * (30_000_000 // len(blank)), 0.0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal most
        for at in range(0, len(data), CHUNK):
            began = time.process_time()
            yield data[at : at + CHUNK]
            most = max(most, time.process_time() - began)
        yield b"\nlast\n"

    began = time.process_time()
    found = [one async for one in read_lines(pieces(), 4_194_304, LinePlace(0, 1))]
    assert time.process_time() - began < 3  # 20 s if each line costs
    assert most < 0.05
    line, end = found
    assert isinstance(line, RawLine)
    assert (line.data, line.place.number, line.line) == (b"last", 1, data.count(b"\n") + 2)
    assert end == LinePlace(len(data) + 6, 2)


# --- The answer of a line is the answer over HTTP ---------------------------------------------------------------------


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "metadata": {"a": "b"}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "stop": ["l"], "user": "u"}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 7}),
    ("/v1/responses", {"input": "Hi", "instructions": "Be short.", "store": False}),
    ("/v1/embeddings", {"input": ["a", "b"], "dimensions": 1}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
    ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
]
# Fields that differ between two calls; the fingerprint has the weights once the gateway knows of the worker.
OWN = ("id", "created", "created_at", "completed_at", "system_fingerprint")


@pytest.fixture
async def gateway(start_gateway: Start, tmp_path: Path) -> RunningGateway:
    return await start_gateway(files_dir=str(tmp_path / "files"), score_tokens="n,y")


def without_own(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_own(one) for key, one in value.items() if key not in OWN}
    return [without_own(one) for one in value] if isinstance(value, list) else value


async def script(request: GenerationRequest) -> Steps:
    if request.pooling:
        yield (), Outcome("stop", embedding=VECTOR)
        return
    async for step in emit([*tokens("Hello"), 2], "stop")(request):
        yield step


async def test_the_answer_is_that_over_http(gateway: RunningGateway) -> None:
    for path, body in CALLS:
        client, call = BatchClient(gateway), {"model": MODEL, **body}
        line = {"custom_id": "x", "method": "POST", "url": path, "body": call}
        async with gateway.worker(script):
            expected = await client.json("POST", path, json=call)
            batch = await client.ended((await client.create(jsonl([line]), path))["id"])
        ((found,), errors) = await client.outputs(batch)
        assert errors == []
        assert without_own(found["response"]["body"]) == without_own(expected)


async def test_parameters_are_checked_without_a_worker(gateway: RunningGateway) -> None:
    for path in BATCH_ENDPOINTS:
        endpoint = LineEndpoints(LINE_ENDPOINTS).at(path, gateway.gateway, "")
        good = next(body for url, body in CALLS if url == path)
        endpoint.check({"model": MODEL, **good})
        with pytest.raises(ApiError) as caught:
            endpoint.check({"model": MODEL, **good, "no_such_parameter": 1})
        assert caught.value.param == "no_such_parameter"
        assert json.dumps(good)


def test_other_paths_are_no_endpoints() -> None:
    with pytest.raises(KeyError, match="/v1/messages"):
        LineEndpoints(LINE_ENDPOINTS).at("/v1/messages", None, "")  # type: ignore[arg-type]


# --- A line is submitted under the limits of its key, and is found again after its gateway has died -------------------


async def test_lines_are_charged_to_the_key_of_the_batch(gateway: RunningGateway) -> None:
    client, key_id = await with_key(gateway)
    async with gateway.worker(emit([ord("a"), ord("b")])):
        batch = await client.ended((await client.create(jsonl([chat_line(number) for number in range(20)])))["id"])
    (row,) = (await client.json("GET", "/v1/usage"))["data"]
    assert (row["key"], row["requests"], row["completion_tokens"]) == (key_id, 20, 40)
    assert row["prompt_tokens"] == batch["usage"]["input_tokens"]


async def test_a_limit_per_minute_makes_lines_wait(gateway: RunningGateway) -> None:
    """Six calls are allowed at once; the others follow one per tenth of a second."""
    client, _ = await with_key(gateway, requests_per_minute=600, concurrent_requests=3)
    most = 0

    async def script(request: GenerationRequest) -> Steps:
        nonlocal most
        waiting = len([one for one in worker.claimed if one.id not in worker.steps])
        most = max(most, waiting)
        await asyncio.sleep(0.01)
        yield (), Outcome("stop")

    async with gateway.worker(script) as worker:
        batch = await client.ended((await client.create(jsonl([chat_line(number) for number in range(20)])))["id"])
    assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert 1 <= most <= 3


async def test_a_spent_budget_fails_lines_as_over_http(gateway: RunningGateway) -> None:
    client, _ = await with_key(gateway, tokens_per_day=200)
    lines = [chat_line(number, max_tokens=50) for number in range(10)]
    async with gateway.worker(emit([ord("a")] * 50)):
        batch = await client.ended((await client.create(jsonl(lines)))["id"])
    assert batch["status"] == "completed"
    _, errors = await client.outputs(batch)
    assert 7 <= len(errors) <= 9
    assert {(one["response"]["status_code"], one["response"]["body"]["error"]["code"]) for one in errors} == {
        (402, "insufficient_quota")
    }


async def test_a_limit_that_one_line_alone_exceeds_fails_this_line(gateway: RunningGateway) -> None:
    client, _ = await with_key(gateway, tokens_per_minute=100)
    lines = [chat_line(1, max_tokens=300), chat_line(2, max_tokens=5)]
    async with gateway.worker(emit([ord("a")])):
        batch = await client.ended((await client.create(jsonl(lines)))["id"])
    output, errors = await client.outputs(batch)
    assert [one["custom_id"] for one in output] == ["line-2"]
    assert [one["response"]["status_code"] for one in errors] == [429]


@pytest.mark.slow
async def test_lines_of_a_key_that_was_revoked_are_refused(gateway: RunningGateway) -> None:
    client, key_id = await with_key(gateway)
    gateway.gateway.draining = True  # no line is submitted before
    batch = await client.create(jsonl([chat_line(number) for number in range(3)]))
    store = AccountStore(gateway.gateway.process.keys.client, "test")
    await store.revoke(key_id)
    gateway.gateway.process.keys.ring.forget()
    gateway.gateway.draining = False
    keys, redis = gateway.gateway.broker.keys, gateway.gateway.process.keys.client

    async def has_failed() -> bool:
        return await redis.hget(f"quire:{{batches!}}:batch:{batch['id'][6:]}", "status") == b"failed"

    await until(has_failed)
    errors = await redis.hget(f"quire:{{batches!}}:batch:{batch['id'][6:]}", "errors")
    assert b"invalid_api_key" in errors
    assert await gateway.gateway.broker.client.exists(keys.totals) == 0


async def test_models_of_the_key_are_those_of_the_lines(gateway: RunningGateway) -> None:
    client, _ = await with_key(gateway, models=["another"])
    batch = await client.ended((await client.create(jsonl([chat_line(1)])))["id"])
    assert batch["status"] == "failed"
    assert batch["errors"]["data"][0]["code"] == "model_not_found"


async def test_the_request_of_a_line_waits_for_its_collection(gateway: RunningGateway) -> None:
    client = BatchClient(gateway)
    batch = await client.create(jsonl([chat_line(1)]))
    broker, key = gateway.gateway.broker, call_id_of(batch["id"].removeprefix("batch_"), 1)

    async def is_queued() -> bool:
        return bool(await broker.client.exists(broker.keys.request(key)))

    await until(is_queued)
    names = ("class", "background", "retention", "state")
    found = dict(zip(names, await broker.client.hmget(broker.keys.request(key), *names), strict=True))
    assert found == {
        "class": b"batch",
        "background": b"1",
        "retention": str(LINE_RETENTION_S).encode(),
        "state": b"queued",
    }
    assert await broker.client.exists(broker.keys.held) == 0
    assert gateway.settings.max_queued_requests // SHARE > 1


async def test_a_line_that_redis_has_lost_runs_again(gateway: RunningGateway) -> None:
    client, runs = BatchClient(gateway), 0

    async def script(request: GenerationRequest) -> Steps:
        nonlocal runs
        runs += 1
        if runs == 1:  # as if Redis had come back without this request
            broker = gateway.gateway.broker
            await broker.client.delete(broker.keys.request(request.id), broker.keys.output(request.id))
            return
        yield (), Outcome("stop")

    async with gateway.worker(script):
        batch = await client.ended((await client.create(jsonl([chat_line(1)])))["id"])
    output, errors = await client.outputs(batch)
    assert len(output) + len(errors) == 1
    assert [one["custom_id"] for one in output] == ["line-1"]
    assert runs == 2
