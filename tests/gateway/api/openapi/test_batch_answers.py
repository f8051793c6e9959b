"""The schemas of files and batches describe real answers."""

from __future__ import annotations

from pathlib import Path

from tests.gateway.api.openapi.test_answers import validator
from tests.gateway.conftest import Start
from tests.support.gateway.batch_calls import BatchClient, chat_line, jsonl
from tests.support.gateway.fake_worker import emit


async def test_answers_of_files_and_batches(start_gateway: Start, tmp_path: Path) -> None:
    gateway = await start_gateway(files_dir=str(tmp_path))
    client = BatchClient(gateway)
    wrong = await client.create(b"{}\n")
    created = await client.create(jsonl([chat_line(1)]), metadata={"a": "b"})
    async with gateway.worker(emit([ord("a")])):
        ended = [await client.ended(one["id"]) for one in (wrong, created)]
    for batch in (wrong, created, *ended):
        validator("Batch").validate(batch)
    assert not validator("Batch").is_valid({**ended[0], "status": "done"})
    assert not validator("Batch").is_valid({**ended[0], "errors": {"object": "list", "data": [{}]}})
    validator("BatchList").validate(await client.json("GET", "/v1/batches"))
    files = await client.json("GET", "/v1/files")
    validator("FileList").validate(files)
    assert {one["purpose"] for one in files["data"]} == {"batch", "batch_output"}
    validator("FileDeletion").validate(await client.json("DELETE", f"/v1/files/{files['data'][0]['id']}"))
