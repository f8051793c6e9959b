"""The routes of batches, and the validation of their input."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.errors.api_errors import ApiError, InvalidRequest, refused
from quire.gateway.features.batches import validation
from quire.gateway.features.batches.batch import Batch
from quire.gateway.features.batches.batch_store import LinePlace
from quire.gateway.features.batches.line import BatchLine
from quire.gateway.features.batches.line_endpoints import LineEndpoints
from quire.gateway.features.batches.validation import MAX_ERRORS, WINDOW_LINES, Report, validate
from quire.gateway.features.batches.validation_check import check_of
from quire.gateway.routes.table import LINE_ENDPOINTS
from quire.gateway.serving.model_directory import ModelDirectory
from tests.gateway.conftest import Start
from tests.support.gateway.batch_calls import CHAT, BatchClient, chat_line, jsonl, with_key
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, RunningGateway, until

# --- /v1/batches: wrong calls, and callers that own nothing of what they ask for --------------------------------------


HOUR = {"anchor": "created_at", "seconds": 3600}


@pytest.fixture
async def gateway(start_gateway: Start, tmp_path: Path) -> RunningGateway:
    return await start_gateway(files_dir=str(tmp_path / "files"), max_batches=2)


@pytest.fixture
def client(gateway: RunningGateway) -> BatchClient:
    return BatchClient(gateway)


async def error(client: BatchClient, method: str, path: str, **options: Any) -> tuple[int, Any]:
    status, data = await client.call(method, path, **options)
    return status, json.loads(data)["error"]


async def test_an_output_file_is_no_input(gateway: RunningGateway, client: BatchClient) -> None:
    async with gateway.worker(emit([ord("a")])):
        batch = await client.ended((await client.create(jsonl([chat_line(1)])))["id"])
    given = {"input_file_id": batch["output_file_id"], "endpoint": CHAT, "completion_window": "24h"}
    status, found = await error(client, "POST", "/v1/batches", json=given)
    assert (status, found["param"]) == (400, "input_file_id")


async def test_the_number_of_batches_is_bounded(client: BatchClient) -> None:
    file = await client.upload(jsonl([chat_line(1)]))
    given = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    first, _ = [await client.json("POST", "/v1/batches", json=given) for _ in range(2)]
    status, found = await error(client, "POST", "/v1/batches", json=given)
    assert (status, found["type"], found["code"]) == (429, "rate_limit_error", "too_many_batches")
    await client.json("POST", f"/v1/batches/{first['id']}/cancel")

    async def has_room() -> bool:
        return (await client.call("POST", "/v1/batches", json=given))[0] == 200

    await until(has_room)


async def test_output_files_expire_when_the_batch_says(gateway: RunningGateway, client: BatchClient) -> None:
    async with gateway.worker(emit([ord("a")])):
        batch = await client.create(jsonl([chat_line(1)]), output_expires_after=HOUR)
        batch = await client.ended(batch["id"])
    file = await client.json("GET", f"/v1/files/{batch['output_file_id']}")
    assert file["expires_at"] - file["created_at"] == 3600
    assert file["filename"] == f"{batch['id']}_output.jsonl"


async def test_a_key_finds_nothing_of_another_key(gateway: RunningGateway) -> None:
    """Every endpoint of files and batches, with the ids of another key, and without a key."""
    (owner, _), (stranger, _) = (
        await with_key(gateway),
        await with_key(gateway, "other"),
    )
    async with gateway.worker(emit([ord("a")])):
        batch = await owner.ended((await owner.create(jsonl([chat_line(1)])))["id"])
    running = await owner.create(jsonl([chat_line(1)]))
    files = [batch["input_file_id"], batch["output_file_id"]]
    calls: list[tuple[str, str, dict[str, Any]]] = [("GET", f"/v1/batches/{one['id']}", {}) for one in (batch, running)]
    calls += [("POST", f"/v1/batches/{running['id']}/cancel", {})]
    for file_id in files:
        calls += [("GET", f"/v1/files/{file_id}", {}), ("GET", f"/v1/files/{file_id}/content", {})]
        calls += [("DELETE", f"/v1/files/{file_id}", {})]
        given = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        calls += [("POST", "/v1/batches", {"json": given})]
    for other in (stranger, BatchClient(gateway)):
        for method, path, options in calls:
            status, found = await error(other, method, path, **options)
            assert (status, found["code"]) == (404, "not_found"), (method, path)
        for path in ("/v1/files", "/v1/batches"):
            assert (await other.json("GET", path))["data"] == []
        for path in (f"/v1/files?after={files[0]}", f"/v1/batches?after={batch['id']}"):
            assert (await error(other, "GET", path))[0] == 400
    # The answers of lines are calls like others, with the same owner.
    line_id = (await owner.content(batch["output_file_id"]))[0]["response"]["body"]["id"]
    assert (await error(stranger, "POST", f"{CHAT}/{line_id}/cancel"))[0] == 404
    assert len((await owner.json("GET", "/v1/files"))["data"]) == 3
    assert len((await owner.json("GET", "/v1/batches"))["data"]) == 2
    assert (await owner.json("POST", f"/v1/batches/{running['id']}/cancel"))["status"] in ("cancelling", "cancelled")


async def test_ids_of_another_form_are_unknown(client: BatchClient) -> None:
    for path in ("/v1/batches/x", "/v1/batches/batch_..%2F..", f"/v1/batches/file-{'0' * 32}", "/v1/files/..%2fx"):
        status, found = await error(client, "GET", path)
        assert (status, found["code"]) == (404, "not_found"), path


# --- The report of a validation, and where windows begin --------------------------------------------------------------


def accept(line: BatchLine) -> None:
    pass


async def report(data: bytes, max_lines: int = 10_000, check: Any = accept, max_bytes: int = 10_000) -> Report:
    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 1000):
            yield data[at : at + 1000]

    return await validate(chunks(), CHAT, check, max_lines, max_bytes)


async def test_windows_have_a_number_of_lines() -> None:
    data = jsonl([chat_line(number) for number in range(2 * WINDOW_LINES + 1)])
    found = await report(data)
    assert (found.errors, found.lines) == ([], 2 * WINDOW_LINES + 1)
    lines = data.splitlines(keepends=True)
    offsets = [sum(map(len, lines[:count])) for count in (0, WINDOW_LINES, 2 * WINDOW_LINES, len(lines))]
    assert found.places == [
        LinePlace(offsets[0], 1),
        LinePlace(offsets[1], WINDOW_LINES + 1),
        LinePlace(offsets[2], 2 * WINDOW_LINES + 1),
        LinePlace(offsets[3], len(lines) + 1),
    ]


async def test_windows_have_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "WINDOW_BYTES", 3000)
    found = await report(jsonl([chat_line(number, user="x" * 1000) for number in range(10)]))
    assert [place.number for place in found.places] == [1, 4, 7, 10, 11]


async def test_an_input_without_lines_is_wrong() -> None:
    for data in (b"\n", b" \n\n\t"):
        assert [one["code"] for one in (await report(data)).errors] == ["empty_file"]


async def test_too_many_lines() -> None:
    (error,) = (await report(jsonl([chat_line(number) for number in range(5)]), max_lines=4)).errors
    assert (error["code"], error["line"]) == ("too_many_lines", 5)
    assert "--max-batch-lines" in error["message"]


async def test_a_report_is_bounded() -> None:
    def check(line: BatchLine) -> None:
        raise refused("x", "m" * 10_000)

    found = await report(jsonl([chat_line(number) for number in range(3 * MAX_ERRORS)]), check=check)
    assert len(found.errors) == MAX_ERRORS
    assert {len(one["message"]) for one in found.errors} == {validation.MAX_MESSAGE}


async def test_a_line_that_is_too_long() -> None:
    found = await report(jsonl([chat_line(1), chat_line(2, user="x" * 2000), chat_line(3)]), max_bytes=500)
    assert [(one["line"], one["code"]) for one in found.errors] == [(2, "line_too_long")]


# --- All lines of a batch mean one model, which its key may use -------------------------------------------------------


GOOD = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}


def batch(lane: str = MODEL, owner: str = "") -> Batch:
    return Batch.read("0" * 32, {"lane": lane, "endpoint": CHAT, "owner": owner})


async def test_the_wrong_parameter_has_its_place_in_the_line(gateway: RunningGateway) -> None:
    check = await check_of(ModelDirectory.of(gateway.gateway), LineEndpoints(LINE_ENDPOINTS), batch())
    for body, param in (
        ({**GOOD, "temperature": 5}, "body.temperature"),
        ({"model": MODEL}, "body.messages"),
        ({**GOOD, "messages": [{"role": "nobody", "content": "x"}]}, "body.messages[0].role"),
        ({**GOOD, "model": 5}, "body.model"),
    ):
        with pytest.raises(ApiError) as caught:
            check(BatchLine(1, "a", body))
        assert caught.value.param == param


async def test_a_second_model(gateway: RunningGateway) -> None:
    for lane in ["another", ""]:
        check = await check_of(ModelDirectory.of(gateway.gateway), LineEndpoints(LINE_ENDPOINTS), batch(lane))
        with pytest.raises(InvalidRequest, match="a batch has one model") as caught:
            check(BatchLine(1, "a", GOOD))
        assert caught.value.param == "body.model"


async def test_a_key_that_is_gone(gateway: RunningGateway) -> None:
    with pytest.raises(ApiError, match="expired or was revoked"):
        await check_of(ModelDirectory.of(gateway.gateway), LineEndpoints(LINE_ENDPOINTS), batch(owner="0" * 16))
