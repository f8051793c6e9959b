"""The memory of a gateway under calls with large images is bounded by --max-bodies-bytes, and does not grow."""

from __future__ import annotations

import asyncio
import io
import json
import random
from pathlib import Path

import aiohttp
import pytest
from PIL import Image as Pillow

from tests.conftest import QuireProcess, clean_environ
from tests.gateway.features.batches.test_batch_memory import Resident
from tests.support.gateway.fake_worker import FakeWorker, emit
from tests.support.gateway.running import MODEL
from tests.support.gateway.seeing import data_url, response, response_part, write_seeing_model
from tests.support.pictures import saved

MIB = 2**20
PARALLEL, CALLS, PICTURES = 50, 1000, 4
BODIES = 256 * MIB  # the default of --max-bodies-bytes


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", ["body", "upload"])
async def test_memory_is_bounded_and_does_not_grow(redis_url: str, tmp_path: Path, way: str) -> None:
    """50 calls at a time, each with an image of 10 MB."""
    model = write_seeing_model(tmp_path / MODEL)
    side = 1826
    pictures = [
        saved(Pillow.frombytes("RGB", (side, side), random.Random(seed).randbytes(3 * side**2)), "PNG")
        for seed in range(PICTURES)
    ]
    assert all(len(picture) > 10_000_000 for picture in pictures)
    arguments = ("gateway", str(model), "--port", "0", "--redis-url", redis_url, "--body-timeout-s", "600")
    process = QuireProcess((*arguments, "--files-dir", str(tmp_path / "files")), clean_environ(), None)
    try:
        url = await asyncio.to_thread(lambda: process.wait_for(r"(http://[\d.]+:\d+)")[1])
        timeout = aiohttp.ClientTimeout(total=None)
        worker = FakeWorker(redis_url, MODEL, emit([5, 6]))
        async with worker.running(), aiohttp.ClientSession(timeout=timeout) as session:

            async def upload(picture: bytes) -> str:
                form = aiohttp.FormData({"purpose": "vision"}, quote_fields=False)
                form.add_field("file", io.BytesIO(picture), filename="a.png")
                async with session.post(f"{url}/v1/files", data=form) as answer:
                    return str((await answer.json())["id"])

            if way == "body":
                parts = [response_part(image_url=data_url(picture)) for picture in pictures]
            else:
                parts = [response_part(file_id=await upload(picture)) for picture in pictures]
            bodies = [json.dumps(response(part, store=False)[1]).encode() for part in parts]
            resident = Resident(process.pid)
            before, left = resident.now(), CALLS
            peaks: list[int] = []

            async def client() -> None:
                nonlocal left
                while left > 0:
                    left -= 1
                    headers = {"Content-Type": "application/json"}
                    async with session.post(
                        f"{url}/v1/responses", data=io.BytesIO(bodies[left % PICTURES]), headers=headers
                    ) as answer:
                        assert answer.status == 200, await answer.text()
                        await answer.read()
                    if left == CALLS // 5:
                        peaks.append(resident.peak)
                        resident.peak = 0

            await asyncio.gather(*(client() for _ in range(PARALLEL)))
            peaks.append(resident.peak)
            await resident.stop()
            after = resident.now()
        print(
            f"{way}: MiB at start {before // MIB}, largest {[peak // MIB for peak in peaks]}, at the end {after // MIB}"
        )
        assert max(peaks) - before < 3 * BODIES
        assert peaks[1] <= peaks[0] + 64 * MIB
    finally:
        process.close()
