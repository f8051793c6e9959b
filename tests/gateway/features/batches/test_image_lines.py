"""Lines of batches with images: their memory counts, and a storage or a host that fails for a while fails no line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from quire.gateway.api.body_budget import BODIES
from quire.gateway.errors.api_errors import ApiError, ImageTimeout, ServerBusy, StorageDown
from quire.gateway.features.batches import line_run
from tests.gateway.conftest import Start
from tests.support.gateway.batch_calls import BatchClient, jsonl
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import RunningGateway, until
from tests.support.gateway.seeing import data_url, response, response_part, write_seeing_model
from tests.support.pictures import noise, saved

PICTURE = saved(noise("RGB", 30, 20), "PNG")
SCRIPT = emit([5, 6])


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("models") / "test-model")


@pytest.fixture
async def gateway(start_gateway: Start, tmp_path: Path, seeing: Path) -> RunningGateway:
    return await start_gateway(model=str(seeing), files_dir=str(tmp_path))


async def begun(client: BatchClient, *parts: dict[str, object]) -> str:
    """Begin a batch with a line for each part: an image of Responses. Returns its id."""
    calls = [response(part) for part in parts]
    lines = [
        {"custom_id": str(index), "method": "POST", "url": path, "body": body}
        for index, (path, body) in enumerate(calls)
    ]
    return str((await client.create(jsonl(lines), "/v1/responses"))["id"])


async def test_a_line_waits_for_the_memory_of_its_images(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits as long as it takes, and gives the memory back when its images are in Redis."""
    client, budget = BatchClient(gateway), gateway.app[BODIES]
    file = await client.upload(PICTURE, "a.png", purpose="vision")
    url = data_url(PICTURE)
    taken: list[int] = []
    gate, take = asyncio.Event(), budget.take

    async def noted(name: str, size: int, timeout_s: float | None) -> None:
        if timeout_s is None:
            taken.append(size)
            await gate.wait()
        await take(name, size, timeout_s)

    monkeypatch.setattr(budget, "take", noted)
    async with gateway.worker(SCRIPT) as worker:
        batch = await begun(client, response_part(file_id=file["id"]), response_part(image_url=url))

        async def both_wait() -> bool:
            return len(taken) == 2

        await until(both_wait)
        assert not worker.claimed
        gate.set()
        assert (await client.ended(batch))["request_counts"]["completed"] == 2
    assert sorted(taken) == [len(PICTURE), len(url)]
    await take("nobody else", gateway.gateway.settings.max_bodies_bytes, 1)  # all was given back


@pytest.mark.parametrize(
    "error", [StorageDown("down"), ServerBusy("busy"), ImageTimeout("slow")], ids=["storage", "busy", "host"]
)
async def test_a_line_whose_image_cannot_be_read_now_is_tried_again(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, error: ApiError
) -> None:
    """It is tried MAX_TRIES times."""
    monkeypatch.setattr(line_run, "AGAIN_S", (0.001, 0.001))
    client, images = BatchClient(gateway), gateway.gateway.process.images
    file = await client.upload(PICTURE, "a.png", purpose="vision")
    find, left = images.find_file, line_run.MAX_TRIES - 1
    assert find is not None

    async def failing(file_id: str, owner: str) -> tuple[int, Callable[[], Awaitable[bytes]]]:
        nonlocal left
        left -= 1
        if left >= 0:
            raise error
        return await find(file_id, owner)

    monkeypatch.setattr(images, "find_file", failing)
    async with gateway.worker(SCRIPT):
        batch = await begun(client, response_part(file_id=file["id"]))
        assert (await client.ended(batch))["request_counts"]["completed"] == 1
        left = line_run.MAX_TRIES
        batch = await client.ended(await begun(client, response_part(file_id=file["id"])))
    assert batch["request_counts"]["failed"] == 1
    [line] = await client.content(batch["error_file_id"])
    assert line["response"]["body"]["error"]["code"] == error.code
