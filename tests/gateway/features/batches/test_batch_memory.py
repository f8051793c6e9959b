"""The memory of a gateway does not grow with the size of a file: upload, validation, run and download."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.conftest import QuireProcess, clean_environ
from tests.support.gateway.batch_calls import chat_line
from tests.support.gateway.fake_worker import FakeWorker, emit
from tests.support.gateway.running import MODEL

# Growth of the resident memory that a file may cause, whatever its size.
MOST_BYTES = 32 * 1024 * 1024
LINE_BYTES = 64 * 1024


class Resident:
    """The resident memory of a process, sampled until `stop`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.peak = self.now()
        self._task = asyncio.create_task(self._sample())

    def now(self) -> int:
        text = Path(f"/proc/{self._pid}/status").read_text()
        return 1024 * int(text.split("VmRSS:")[1].split()[0])

    async def _sample(self) -> None:
        while True:
            self.peak = max(self.peak, self.now())
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def padded(number: int) -> bytes:
    """A line of LINE_BYTES, most of which are spaces between its parts."""
    line = json.dumps(chat_line(number)).encode()
    return line[:-1] + b" " * (LINE_BYTES - len(line) - 1) + line[-1:] + b"\n"


async def run(session: aiohttp.ClientSession, url: str, count: int) -> int:
    """Run a batch of `count` lines; returns the bytes of its output."""

    async def form() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
        for number in range(count):
            yield padded(number)
        yield b"\r\n--b--\r\n"

    async def call(method: str, path: str, **options: Any) -> Any:
        async with session.request(method, url + path, **options) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    file = await call("POST", "/v1/files", data=form(), headers=kind)
    assert file["bytes"] == count * LINE_BYTES
    given = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = await call("POST", "/v1/batches", json=given)
    while batch["status"] in ("validating", "in_progress"):
        await asyncio.sleep(0.2)
        batch = await call("GET", f"/v1/batches/{batch['id']}")
    assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}, batch
    size = lines = 0
    for file_id in (batch["output_file_id"], file["id"]):
        async with session.get(f"{url}/v1/files/{file_id}/content") as response:
            async for piece in response.content.iter_any():
                if file_id == batch["output_file_id"]:
                    size += len(piece)
                    lines += piece.count(b"\n")
    assert lines == count
    return size


@pytest.mark.alone
@pytest.mark.parametrize(
    "megabytes",
    [pytest.param(64, marks=pytest.mark.slow), pytest.param(1024, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
)
async def test_the_memory_of_a_gateway_does_not_grow_with_a_file(
    redis_url: str, model_folder: Path, tmp_path: Path, megabytes: int
) -> None:
    arguments = ("gateway", str(model_folder), "--port", "0", "--redis-url", redis_url, "--max-body-bytes", "1048576")
    process = QuireProcess((*arguments, "--files-dir", str(tmp_path / "files")), clean_environ(), None)
    try:
        url = await asyncio.to_thread(lambda: process.wait_for(r"(http://[\d.]+:\d+)")[1])
        worker = FakeWorker(redis_url, MODEL, emit([ord("a")] * 20, step=20))
        timeout = aiohttp.ClientTimeout(total=None)
        async with worker.running(), aiohttp.ClientSession(timeout=timeout) as session:
            await run(session, url, 300)
            resident = Resident(process.pid)
            before = resident.now()
            await run(session, url, megabytes * 1024 * 1024 // LINE_BYTES)
            await resident.stop()
        grown = resident.peak - before
        print(f"{megabytes} MiB: the resident memory grew from {before / 2**20:.1f} MiB by {grown / 2**20:.1f} MiB")
        assert grown <= MOST_BYTES
    finally:
        process.close()
