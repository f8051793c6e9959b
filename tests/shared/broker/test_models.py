"""The model registry: contents under their digests, and who may replace a manifest."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from quire.shared.broker.models import PIECE, ModelRegistry
from quire.shared.keys import MODEL_TTL_S, REGISTRY_LANE
from quire.shared.messages import MessageError
from quire.shared.messages.manifest import MAX_MANIFEST_BYTES, FileEntry, ModelManifest
from quire.shared.model.registered_files import manifest_of
from quire.shared.redis.clients import command_client

FILES = {"config.json": b"{}", "tokenizer.json": bytes(range(256)) * (PIECE // 100)}


@pytest.fixture
async def registry(redis_url: str) -> AsyncIterator[ModelRegistry]:
    client = command_client(redis_url, REGISTRY_LANE)
    yield ModelRegistry(client)
    await client.aclose()


async def test_files_are_stored_once_and_read_in_pieces(registry: ModelRegistry) -> None:
    one, two = manifest_of("one", (), FILES), manifest_of("two", ("b",), FILES)
    assert await registry.register(one, FILES, replaces=True)
    assert await registry.register(two, FILES, replaces=False)
    assert await registry.registered() == {"two": two.encode(), "one": one.encode()}
    for entry in one.files:
        assert await registry.read(entry) == FILES[entry.name]
        assert 0 < await registry.client.ttl(registry.keys.file(entry.digest)) <= MODEL_TTL_S
    assert len(await registry.client.keys("*:file:*")) == 2, "no draft is left"


async def test_another_manifest_is_replaced_only_at_the_start_of_a_worker(registry: ModelRegistry) -> None:
    one = manifest_of("m", (), FILES)
    other = manifest_of("m", ("alias",), FILES)
    assert await registry.register(one, FILES, replaces=True)
    assert not await registry.register(other, FILES, replaces=False)
    assert await registry.registered() == {"m": one.encode()}
    assert await registry.register(other, FILES, replaces=True)
    assert not await registry.register(one, FILES, replaces=False)
    assert await registry.registered() == {"m": other.encode()}


async def test_what_redis_lost_is_written_again(registry: ModelRegistry) -> None:
    one = manifest_of("m", (), FILES)
    await registry.register(one, FILES, replaces=True)
    await registry.client.flushall()
    assert await registry.register(one, FILES, replaces=False)
    assert await registry.read(one.files[0]) == b"{}"


async def test_content_that_is_not_what_the_manifest_names_is_refused(registry: ModelRegistry) -> None:
    entry = FileEntry.of("config.json", b"{}")
    with pytest.raises(MessageError, match="Redis has 0"):
        await registry.read(entry)
    await registry.client.set(registry.keys.file(entry.digest), b"[]")
    with pytest.raises(MessageError, match="does not have the registered digest"):
        await registry.read(entry)


async def test_a_large_manifest_is_cut(registry: ModelRegistry) -> None:
    await registry.client.zadd(registry.keys.models, {"m": 1, "n" * 300: 2})
    await registry.client.set(registry.keys.manifest("m"), b"x" * 10 * MAX_MANIFEST_BYTES)
    found = await registry.registered()
    assert list(found) == ["m"]
    assert len(found["m"]) == MAX_MANIFEST_BYTES + 1
    with pytest.raises(MessageError, match="over the limit"):
        ModelManifest.decode(found["m"])
