"""Images of conversations: Redis keeps a file as long as a conversation or a response names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from quire.gateway.api.responses import images as stored
from tests.gateway.api.responses.test_stored_images import KEYS, OTHER, PICTURE, SCRIPT, URLS, digests, hashed, images
from tests.gateway.conftest import Start
from tests.support.gateway.running import MODEL, RunningGateway
from tests.support.gateway.seeing import data_url, response_part, write_seeing_model


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("models") / "test-model")


@pytest.fixture
async def gateway(start_gateway: Start, seeing: Path) -> RunningGateway:
    return await start_gateway(model=str(seeing), max_conversation_bytes=4096)


def shown(picture: bytes) -> Any:
    return {"role": "user", "content": [response_part(image_url=data_url(picture))]}


async def lives(redis: Redis) -> list[int]:
    return [await redis.ttl(key) async for key in redis.scan_iter(KEYS.image("*"))]


async def test_a_conversation_keeps_its_images(gateway: RunningGateway) -> None:
    """They are not in its JSON, survive its responses, and go with it."""
    redis = gateway.gateway.broker.client
    async with gateway.worker(SCRIPT) as worker, gateway.openai() as client:
        conversation: Any = await client.conversations.create(items=[shown(PICTURE)])
        response = await client.responses.create(model=MODEL, input=[shown(OTHER)], conversation=conversation.id)
        [item, *_] = (await client.conversations.items.list(conversation.id, order="asc", include=[URLS])).data  # type: ignore[list-item]
        await client.responses.delete(response.id)
        assert sorted(await images(redis)) == sorted([PICTURE, OTHER])
        assert all(0 < life <= gateway.settings.response_retention_s for life in await lives(redis))
        await client.responses.create(model=MODEL, input="And now?", conversation=conversation.id, store=False)
        assert [digests(request) for request in worker.claimed] == [hashed(PICTURE, OTHER)] * 2
        items = (await client.conversations.items.list(conversation.id, order="asc")).data
        compacted = await gateway.post("/v1/responses/compact", {"model": MODEL, "input": [shown(PICTURE)]})
        for request in worker.claimed:
            await gateway.gateway.broker.delete(request.id)
        assert sorted(await images(redis)) == sorted([PICTURE, OTHER])
        await client.conversations.items.delete(items[0].id, conversation_id=conversation.id)
        assert await images(redis) == [OTHER]
        await client.conversations.delete(conversation.id)
        assert await images(redis) == []
    for shown_item in (item.to_dict(), compacted.json["output"][0]):
        assert shown_item["content"][0]["image_url"] == data_url(PICTURE)


async def test_a_conversation_has_a_bounded_number_of_images(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "MAX_STORED_IMAGES", 1)
    async with gateway.openai() as client:
        conversation: Any = await client.conversations.create(items=[shown(PICTURE)])
        name = f"/v1/conversations/{conversation.id}/items"
        assert (await gateway.post(name, {"items": [shown(PICTURE)]})).status == 200
        calls = [(name, {"items": [shown(OTHER)]}, "items")]
        asked = {"model": MODEL, "input": [shown(OTHER)], "conversation": conversation.id}
        calls.append(("/v1/responses", asked, "conversation"))
        for path, body, param in calls:
            reply = await gateway.post(path, body)
            assert (reply.status, reply.error["param"]) == (400, param)
            assert "2 images; at most 1" in reply.error["message"]


async def test_an_image_in_the_last_step_is_seen_once(gateway: RunningGateway) -> None:
    rule: Any = [{"type": "compaction", "compact_threshold": 1}]
    history: Any = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}, shown(PICTURE)]
    async with gateway.worker(SCRIPT) as worker, gateway.openai() as client:
        first = await client.responses.create(model=MODEL, input=history, context_management=rule)
        await client.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
    assert [digests(request) for request in worker.claimed] == [[], hashed(PICTURE), []]
