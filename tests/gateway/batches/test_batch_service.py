"""Batches from the upload to the output file, through a gateway with a worker that follows a script."""

from __future__ import annotations

from pathlib import Path

from tests.gateway.batches.calls import BatchClient, chat_line, jsonl
from tests.gateway.conftest import Start
from tests.gateway.fake_worker import emit


async def test_a_batch_has_one_line_of_output_for_each_line(start_gateway: Start, tmp_path: Path) -> None:
    gateway = await start_gateway(files_dir=str(tmp_path))
    client = BatchClient(gateway)
    lines = [chat_line(number) for number in range(300)]
    async with gateway.worker(emit([ord("a"), ord("b")])):
        batch = await client.create(jsonl(lines), metadata={"job": "7"})
        assert batch["status"] == "validating"
        batch = await client.ended(batch["id"])
    assert batch["status"] == "completed", batch
    assert batch["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
    assert batch["metadata"] == {"job": "7"}
    assert batch["error_file_id"] is None
    output, _ = await client.outputs(batch)
    assert [line["custom_id"] for line in output] == [line["custom_id"] for line in lines]
    assert {line["response"]["status_code"] for line in output} == {200}
    assert {line["response"]["body"]["object"] for line in output} == {"chat.completion"}
