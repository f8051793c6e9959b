"""A window is written as a whole, in the order of its lines, also if the storage fails meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.batches import window_run
from quire.gateway.files.storage import ObjectWriter, StorageError
from quire.shared.messages import Delta, GenerationRequest, Outcome
from tests.gateway.batches.test_batch_service import left_in_redis
from tests.gateway.conftest import Start
from tests.gateway.files.test_file_routes import storage_of
from tests.support.gateway.batch_calls import BatchClient, chat_line, jsonl
from tests.support.gateway.fake_worker import Steps, emit
from tests.support.gateway.running import RunningGateway


@pytest.fixture
async def gateway(start_gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunningGateway:
    monkeypatch.setattr(window_run, "PAUSE_S", (0.01, 0.05))
    return await start_gateway(files_dir=str(tmp_path / "files"))


async def test_lines_that_end_in_another_order_are_written_in_their_own(gateway: RunningGateway) -> None:
    ended: list[int] = []

    async def script(request: GenerationRequest) -> Steps:
        number = request.sampling.max_tokens
        await asyncio.sleep(0.02 * (30 - number))
        ended.append(number)
        yield (Delta(0, (ord("a"),), "length"),), Outcome("length")

    client = BatchClient(gateway)
    async with gateway.worker(script):
        lines = [chat_line(number, max_tokens=number) for number in range(1, 30)]
        batch = await client.ended((await client.create(jsonl(lines)))["id"])
    output, _ = await client.outputs(batch)
    assert [one["custom_id"] for one in output] == [f"line-{number}" for number in range(1, 30)]
    assert ended[0] > 20


@pytest.mark.parametrize("place", ["begin", "middle", "end"])
async def test_a_storage_that_fails_is_tried_again(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    storage, failures = storage_of(gateway), 3
    writing = storage.writing

    class Failing:
        async def write(self, data: bytes) -> None:
            raise StorageError("full")

    @asynccontextmanager
    async def sometimes(file_id: str, name: str) -> AsyncIterator[ObjectWriter]:
        nonlocal failures
        if "-" not in name or not failures:  # an upload, or the attempt after the failures
            async with writing(file_id, name) as writer:
                yield writer
            return
        failures -= 1
        if place == "begin":
            raise StorageError("full")
        async with writing(file_id, name) as writer:
            yield writer if place == "end" else Failing()
            raise StorageError("full")

    monkeypatch.setattr(storage, "writing", sometimes)
    client = BatchClient(gateway)
    async with gateway.worker(emit([ord("a")])) as worker:
        batch = await client.ended((await client.create(jsonl([chat_line(number) for number in range(20)])))["id"])
        assert len(worker.claimed) == 20
    output, _ = await client.outputs(batch)
    assert [one["custom_id"] for one in output] == [f"line-{number}" for number in range(20)]
    assert failures == 0
    assert await left_in_redis(gateway) == []
    # The output is one object; nothing is left of the attempts that failed.
    assert len([path for path in (tmp_path / "files").rglob("*") if path.is_file()]) == 2


async def test_long_answers_are_written_in_pieces(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    storage = storage_of(gateway)
    writing = storage.writing

    @asynccontextmanager
    async def watched(file_id: str, name: str) -> AsyncIterator[Any]:
        async with writing(file_id, name) as writer:
            write = writer.write

            async def noted(data: bytes) -> None:
                sizes.append(len(data))
                await write(data)

            writer.write = noted
            yield writer

    monkeypatch.setattr(storage, "writing", watched)
    monkeypatch.setattr(window_run, "CHUNK", 2000)
    client = BatchClient(gateway)
    async with gateway.worker(emit([ord("a")] * 400, step=400)):
        batch = await client.ended((await client.create(jsonl([chat_line(number) for number in range(10)])))["id"])
    output, _ = await client.outputs(batch)
    assert len(output) == 10
    assert len(sizes) > 3
