"""Images of stored responses: Redis keeps a file once, and conversations name it."""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from quire.gateway.api.body_budget import BODIES, BodyBudget
from quire.shared.protocol.keys import LaneKeys
from tests.gateway.conftest import Start
from tests.support.gateway.batch_calls import BatchClient
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, RunningGateway
from tests.support.gateway.seeing import data_url, response, response_part, write_seeing_model
from tests.support.pictures import noise, saved

PICTURE, OTHER = (saved(noise("RGB", 300, 200, seed), "PNG") for seed in (1, 2))
KEYS = LaneKeys(MODEL)
SCRIPT = emit([5, 6])
URLS = "message.input_image.image_url"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("models") / "test-model")


@pytest.fixture
async def gateway(start_gateway: Start, tmp_path: Path, seeing: Path) -> RunningGateway:
    return await start_gateway(model=str(seeing), files_dir=str(tmp_path), max_conversation_bytes=4096)


def digests(request: Any) -> list[str]:
    return [image.digest for image in request.images]


def hashed(*pictures: bytes) -> list[str]:
    return [hashlib.sha256(picture).hexdigest() for picture in pictures]


def notes(budget: BodyBudget, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of the sizes that calls take from a budget from now on."""
    taken: list[int] = []
    take = budget.take

    async def noted(name: str, size: int, timeout_s: float) -> None:
        taken.append(size)
        await take(name, size, timeout_s)

    monkeypatch.setattr(budget, "take", noted)
    return taken


async def images(redis: Redis) -> list[bytes]:
    keys = [key async for key in redis.scan_iter(KEYS.image("*")) if not key.endswith(b":users")]
    return list(await redis.mget(keys)) if keys else []


async def test_a_thread_keeps_each_image_once_until_its_last_response_is_deleted(gateway: RunningGateway) -> None:
    """The conversation would be too long with the image in it."""
    client, redis = BatchClient(gateway), gateway.gateway.broker.client
    async with gateway.worker(SCRIPT) as worker:
        path, body = response(response_part(image_url=data_url(PICTURE)))
        first = await client.json("POST", path, json=body)
        _, body = response(response_part(image_url=data_url(OTHER)), previous_response_id=first["id"])
        second = await client.json("POST", path, json=body)
        body = {"model": MODEL, "input": "And now?", "previous_response_id": second["id"]}
        third = await client.json("POST", path, json=body)
        assert [digests(request) for request in worker.claimed] == [
            hashed(PICTURE),
            hashed(PICTURE, OTHER),
            hashed(PICTURE, OTHER),
        ]
    assert sorted(await images(redis)) == sorted([PICTURE, OTHER])
    conversation = await redis.get(KEYS.conversation(third["id"].removeprefix("resp_")))
    assert conversation is not None
    assert b'data:image/png;base64,"' in zlib.decompress(conversation)
    for one in (first, second):
        await client.json("DELETE", f"/v1/responses/{one['id']}")
    assert len(await images(redis)) == 2
    await client.json("DELETE", f"/v1/responses/{third['id']}")
    assert await images(redis) == []


async def test_input_items_show_the_url_of_an_image_if_include_names_it(gateway: RunningGateway) -> None:
    client = BatchClient(gateway)
    file = await client.upload(OTHER, "a.png", purpose="vision")
    parts = [response_part(image_url=data_url(PICTURE), detail="high"), response_part(file_id=file["id"])]
    async with gateway.worker(SCRIPT), gateway.openai() as sdk:
        path, body = response(*parts)
        answer = await client.json("POST", path, json=body)
        for include, url in (([], None), (["message.input_image.image_url"], data_url(PICTURE))):
            [item] = (await sdk.responses.input_items.list(answer["id"], include=include)).data  # type: ignore[arg-type]
            assert item.to_dict()["content"][:2] == [  # type: ignore[index]
                {"type": "input_image", "detail": "high", "file_id": None, "image_url": url},
                {"type": "input_image", "detail": "auto", "file_id": file["id"], "image_url": None},
            ]


async def test_a_page_of_input_items_with_images_ends_at_the_size_of_a_body(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image counts as often as it is shown, and its memory until the answer is written."""
    client, budget = BatchClient(gateway), gateway.app[BODIES]
    url = data_url(PICTURE)
    path, body = response(response_part(image_url=url))
    async with gateway.worker(SCRIPT):
        answer = await client.json("POST", path, json=body | {"input": body["input"] * 3})
    taken = notes(budget, monkeypatch)
    size = len(url) - len("data:image/png;base64,")
    items = f"/v1/responses/{answer['id']}/input_items?order=asc&include[]={URLS}"
    for bound, count in ((2 * size, 2), (size - 1, 1), (3 * size, 3)):
        settings = replace(gateway.gateway.settings, max_body_bytes=bound)
        monkeypatch.setattr(gateway.gateway, "settings", settings)
        page = await client.json("GET", items)
        assert [item["content"][0]["image_url"] for item in page["data"]] == [url] * count
        assert (page["has_more"], page["last_id"]) == (count < 3, page["data"][-1]["id"])
        assert taken.pop() == count * size
    await budget.take("nobody else", gateway.gateway.settings.max_bodies_bytes, 1)  # all was given back


async def test_a_conversation_keeps_the_images_that_truncation_leaves_out(gateway: RunningGateway) -> None:
    client, redis = BatchClient(gateway), gateway.gateway.broker.client
    async with gateway.worker(SCRIPT, max_model_len=100) as worker:
        await gateway.gateway.worker_registry.refresh()
        path, body = response(response_part(image_url=data_url(PICTURE)))
        first = await client.json("POST", path, json=body)
        body = {"model": MODEL, "input": "x" * 75, "previous_response_id": first["id"], "truncation": "auto"}
        second = await client.json("POST", path, json=body)
        assert digests(worker.claimed[1]) == []
        await client.json("DELETE", f"/v1/responses/{first['id']}")
        assert await images(redis) == [PICTURE]
        query = "include=message.input_image.image_url"
        items = await client.json("GET", f"/v1/responses/{second['id']}/input_items?order=asc&{query}")
        assert items["data"][0]["content"][0]["image_url"] == data_url(PICTURE)


async def test_a_deleted_file_is_still_in_the_conversation(gateway: RunningGateway) -> None:
    client = BatchClient(gateway)
    file = await client.upload(PICTURE, "a.png", purpose="vision")
    async with gateway.worker(SCRIPT) as worker:
        path, body = response(response_part(file_id=file["id"]))
        first = await client.json("POST", path, json=body)
        await client.json("DELETE", f"/v1/files/{file['id']}")
        body = {"model": MODEL, "input": "And now?", "previous_response_id": first["id"]}
        await client.json("POST", path, json=body)
        assert digests(worker.claimed[1]) == hashed(PICTURE)
        _, body = response(response_part(file_id=file["id"]))
        async with gateway.openai() as sdk:
            with pytest.raises(openai.BadRequestError, match="No such File object"):
                await sdk.responses.create(**body)


async def test_a_call_takes_the_memory_of_all_its_images_at_once(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that held one image while they waited for the memory of the next could wait for each other."""
    client, budget = BatchClient(gateway), gateway.app[BODIES]
    file = await client.upload(OTHER, "a.png", purpose="vision")
    part = response_part(file_id=file["id"])
    async with gateway.worker(SCRIPT):
        path, body = response(response_part(image_url=data_url(PICTURE)))
        first = await client.json("POST", path, json=body)
        taken = notes(budget, monkeypatch)
        _, body = response(part, part, previous_response_id=first["id"])
        await client.json("POST", path, json=body)
    assert taken[1:] == [len(PICTURE) + 2 * len(OTHER)]
    await budget.take("nobody else", gateway.gateway.settings.max_bodies_bytes, 1)


async def test_a_call_that_can_never_get_its_memory_is_refused_at_once(
    start_gateway: Start, tmp_path: Path, seeing: Path
) -> None:
    sizes = {"max_bodies_bytes": 2**20, "max_body_bytes": 400_000, "max_image_bytes": 200_000}
    gateway = await start_gateway(model=str(seeing), files_dir=str(tmp_path), **sizes)
    client = BatchClient(gateway)
    file = await client.upload(PICTURE + bytes(200_000 - len(PICTURE)), "a.png", purpose="vision")
    path, body = response(response_part(file_id=file["id"]), instructions="x" * 350_000)
    status, answer = await client.call("POST", path, json=body)
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, "input[0].content[0].file_id")
    assert "half of this server's --max-bodies-bytes" in error["message"]


async def test_images_as_earlier_versions_stored_them_are_read(gateway: RunningGateway) -> None:
    client, redis = BatchClient(gateway), gateway.gateway.broker.client
    async with gateway.worker(SCRIPT) as worker:
        path, body = response(response_part(image_url=data_url(PICTURE)))
        first = await client.json("POST", path, json=body)
        key = KEYS.conversation(first["id"].removeprefix("resp_"))
        items = json.loads(zlib.decompress(await redis.get(key) or b""))
        part = items[0]["content"][0]
        del part["file"]
        part["image_url"] = data_url(PICTURE)
        await redis.set(key, zlib.compress(json.dumps(items).encode()), keepttl=True)
        shown = await client.json("GET", f"/v1/responses/{first['id']}/input_items?include[]={URLS}")
        assert shown["data"][0]["content"][0]["image_url"] == data_url(PICTURE)
        body = {"model": MODEL, "input": "And now?", "previous_response_id": first["id"]}
        await client.json("POST", path, json=body)
        assert digests(worker.claimed[1]) == hashed(PICTURE)
