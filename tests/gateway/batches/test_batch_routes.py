"""/v1/batches: wrong calls, and callers that own nothing of what they ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Start
from tests.support.gateway.batch_calls import CHAT, BatchClient, chat_line, jsonl
from tests.support.gateway.batch_keys import with_key
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import RunningGateway

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


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": []}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"priority": "batch"}, "priority"),
    ],
    ids=str,
)
async def test_a_wrong_parameter_is_named(client: BatchClient, change: dict[str, Any], param: str) -> None:
    file = await client.upload(jsonl([chat_line(1)]))
    given = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h", **change}
    status, found = await error(client, "POST", "/v1/batches", json=given)
    assert (status, found["param"]) == (400, param)


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
    assert await error(client, "POST", "/v1/batches", json=given) == (
        429,
        {
            "message": "2 batches have not ended, as many as this server's setting --max-batches allows; wait for "
            "the end of one, or cancel one.",
            "type": "rate_limit_error",
            "param": None,
            "code": "too_many_batches",
        },
    )
    await client.json("POST", f"/v1/batches/{first['id']}/cancel")


async def test_output_files_expire_when_the_batch_says(gateway: RunningGateway, client: BatchClient) -> None:
    async with gateway.worker(emit([ord("a")])):
        batch = await client.create(jsonl([chat_line(1)]), output_expires_after=HOUR)
        batch = await client.ended(batch["id"])
    file = await client.json("GET", f"/v1/files/{batch['output_file_id']}")
    assert file["expires_at"] - file["created_at"] == 3600
    assert file["filename"] == f"{batch['id']}_output.jsonl"


async def test_a_key_finds_nothing_of_another_key(gateway: RunningGateway) -> None:
    """Every endpoint of files and batches, with the ids of another key, and without a key."""
    (owner, _), (stranger, _) = await with_key(gateway), await with_key(gateway, "other")
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
