"""Models that a gateway finds in Redis: the names it serves, the lane of a call, and what a hostile model costs."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.features.several_models import discovery
from quire.gateway.model.served_model import ServedModel
from quire.shared.accounts.limits import AccountLimits
from quire.shared.protocol.messages.manifest import FILE_LIMITS, FileEntry, ModelManifest
from tests.support.gateway.fake_worker import FakeWorker, Script, emit
from tests.support.gateway.running import write_model
from tests.support.registrations import DiscoveringGateway, discovering_gateway, forget, open_registry, register
from tests.support.tokenizers import byte_fallback, byte_level

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def short_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gateways look for registrations more often than once a second."""
    monkeypatch.setattr(discovery, "BEAT_S", 0.05)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models whose tokenizers read the same tokens as different texts."""
    place = tmp_path_factory.mktemp("two")
    return write_model(place / "one"), write_model(place / "two", byte_fallback())


def fake(redis_url: str, lane: str, script: Script) -> FakeWorker:
    return FakeWorker(redis_url, lane, script)


async def test_calls_reach_the_worker_of_the_model_that_they_name(redis_url: str, folders: tuple[Path, Path]) -> None:
    one, two = folders
    await register(redis_url, "one", one, "first")
    await register(redis_url, "two", two)
    hello = byte_level().encode("hello", add_special_tokens=False).ids
    world = byte_fallback().encode("world", add_special_tokens=False).ids
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(fake(redis_url, "one", emit(hello)).running())
        second = await stack.enter_async_context(fake(redis_url, "two", emit(world)).running())
        gateway = await stack.enter_async_context(discovering_gateway(redis_url))
        await gateway.until_names("one", "first", "two")
        replies = await asyncio.gather(
            *(gateway.complete(model=name, prompt="Hi", max_tokens=20) for name in ("one", "two", "first"))
        )
        assert [reply.json["choices"][0]["text"].strip() for reply in replies] == ["hello", "world", "hello"]
        assert [reply.json["model"] for reply in replies] == ["one", "two", "one"]
        # Each prompt was tokenized by the tokenizer of its model.
        assert first.claimed[0].prompt == tuple(byte_level().encode("Hi").ids)
        assert second.claimed[0].prompt == tuple(byte_fallback().encode("Hi").ids)
        cards = {card["id"]: card for card in (await gateway.get("/v1/models")).json["data"]}
        assert (cards["first"]["root"], cards["first"]["parent"]) == ("one", None)
        assert (await gateway.get("/v1/models/two")).json["id"] == "two"
        reply = await gateway.post("/tokenize", {"model": "two", "prompt": "Hi"})
        assert reply.json["tokens"] == byte_fallback().encode("Hi").ids
        # A stream is resumed by its id alone.
        call = (await gateway.chat(model="two", stream=False)).json["id"]
        async with gateway.stream(f"/v1/chat/completions/{call}/stream") as stream:
            assert '"model":"two"' in (await stream.response.text())
        assert (await gateway.post(f"/v1/chat/completions/{call}/cancel", {})).json["cancelled"] is False
        response = await gateway.post("/v1/responses", {"model": "two", "input": "Hi"})
        assert response.json["model"] == "two"
        assert (await gateway.get(f"/v1/responses/{response.json['id']}")).json["model"] == "two"
        # A conversation belongs to one model, and is found by its id alone.
        assert (await gateway.post("/v1/conversations", {})).error["code"] == "missing_model"
        conversation = (await gateway.post("/v1/conversations", {"model": "two"})).json["id"]
        asked = {"input": "Hi", "conversation": conversation}
        assert (await gateway.post("/v1/responses", {"model": "one", **asked})).status == 404
        assert (await gateway.post("/v1/responses", {"model": "two", **asked})).status == 200
        assert len((await gateway.get(f"/v1/conversations/{conversation}/items")).json["data"]) == 2


async def test_an_unknown_model_is_refused_with_the_names_that_are_served(
    redis_url: str, folders: tuple[Path, Path]
) -> None:
    async with discovering_gateway(redis_url) as gateway:
        reply = await gateway.complete(model="one")
        assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
        assert "no worker is alive" in reply.error["message"]
        assert (await gateway.get("/v1/models")).json["data"] == []
        assert (await gateway.get("/readyz")).status == 503
        await register(redis_url, "one", folders[0], "first")
        await register(redis_url, "two", folders[1])
        async with fake(redis_url, "one", emit([5])).running(), fake(redis_url, "two", emit([5])).running():
            await gateway.until_names("one", "first", "two")
            assert (await gateway.get("/readyz")).status == 200
            reply = await gateway.complete(model="three")
            assert reply.status == 404
            assert reply.error["message"] == ("There is no model 'three' here; this server has 'one', 'first', 'two'.")
            assert (await gateway.get("/v1/models/three")).status == 404
            reply = await gateway.post("/tokenize", {"prompt": "Hi"})
            assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "missing_model", "model")


async def test_a_key_has_its_models_only_and_its_usage_by_model(redis_url: str, folders: tuple[Path, Path]) -> None:
    await register(redis_url, "one", folders[0])
    await register(redis_url, "two", folders[1])
    async with AsyncExitStack() as stack:
        for lane in ("one", "two"):
            await stack.enter_async_context(fake(redis_url, lane, emit([300])).running())
        gateway = await stack.enter_async_context(discovering_gateway(redis_url, prices="one=1:2"))
        await gateway.until_names("one", "two")
        store = gateway.directory.process.keys.ring.store
        body = {"prompt": "Hi", "max_tokens": 4}
        owners = []
        for models in (["one"], []):
            account, secret = await store.create("acme", "web", "test", AccountLimits.of({"models": models}))
            key = {"Authorization": f"Bearer {secret}"}
            owners.append((account.id, key))
        (limited, key), (free, other) = owners
        # The key of one model: the other model looks as if it did not exist.
        listed = await gateway.get("/v1/models", **key)
        assert [card["id"] for card in listed.json["data"]] == ["one"]
        assert (await gateway.get("/v1/models/two", **key)).status == 404
        assert (await gateway.get("/v1/models/one", **key)).status == 200
        for path, call in (("/v1/completions", body), ("/tokenize", {"prompt": "Hi"})):
            assert (await gateway.post(path, {**call, "model": "one"}, **key)).status == 200
            refused = await gateway.post(path, {**call, "model": "two"}, **key)
            missing = await gateway.post(path, {**call, "model": "six"}, **key)
            assert (refused.status, refused.error["code"]) == (404, "model_not_found")
            assert refused.error["message"] == missing.error["message"].replace("six", "two")
            assert refused.error["message"].endswith("this server has 'one'.")
        unnamed = await gateway.post("/v1/completions", body, **key)
        assert (unnamed.status, "'two'" in unnamed.error["message"]) == (400, False)
        # A key without a limit.
        for name in ("one", "two"):
            assert (await gateway.post("/v1/completions", {**body, "model": name}, **other)).status == 200
        usage = (await gateway.get("/v1/usage", **other)).json["data"]
        assert [(row["key"], row["model"], row["requests"]) for row in usage] == [(free, "one", 1), (free, "two", 1)]
        assert usage[0]["cost"] > 0 == usage[1]["cost"]
        usage = (await gateway.get("/v1/usage", **key)).json["data"]
        assert [(row["key"], row["model"], row["requests"]) for row in usage] == [(limited, "one", 1)]


async def test_models_appear_and_disappear_without_a_restart(redis_url: str, folders: tuple[Path, Path]) -> None:
    async with discovering_gateway(redis_url) as gateway:
        await register(redis_url, "one", folders[0])
        async with fake(redis_url, "one", emit([300])).running():
            await gateway.until_names("one")
            assert (await gateway.complete(model="one")).status == 200
        await forget(redis_url, "one")
        await gateway.until_names()
        assert (await gateway.complete(model="one")).status == 404
        # The same name comes back with another tokenizer.
        await register(redis_url, "one", folders[1])
        async with fake(redis_url, "one", emit([300])).running() as worker:
            await gateway.until_names("one")
            assert (await gateway.complete(model="one", prompt="Hi")).status == 200
            assert worker.claimed[0].prompt == tuple(byte_fallback().encode("Hi").ids)
            # The tokenizer changes while the model is served.
            await register(redis_url, "one", folders[0])
            async with asyncio.timeout(60):
                while worker.claimed[-1].prompt != tuple(byte_level().encode("Hi").ids):
                    assert (await gateway.complete(model="one", prompt="Hi")).status == 200


async def knows(gateway: DiscoveringGateway, name: str) -> None:
    async with asyncio.timeout(60):
        while gateway.directory.find(name) is None:  # noqa: ASYNC110 - a task of the gateway loads it
            await asyncio.sleep(0.02)


async def test_a_model_without_a_worker_is_waited_for(redis_url: str, folders: tuple[Path, Path]) -> None:
    await register(redis_url, "one", folders[0])
    async with discovering_gateway(redis_url, no_worker_timeout_s=0.2) as gateway:
        await knows(gateway, "one")
        reply = await gateway.complete(model="one")
        assert (reply.status, reply.error["code"]) == (503, "no_workers")
        assert "No worker of this model is alive" in reply.error["message"]
        assert reply.headers["retry-after"] == "10"
        events = await gateway.events("/v1/completions", {"model": "one", "prompt": "Hi", "stream": True})
        assert events[-1].data["error"]["code"] == "no_workers"
    # A worker that comes in time takes the call.
    async with discovering_gateway(redis_url, no_worker_timeout_s=60) as gateway:
        await knows(gateway, "one")
        waiting = asyncio.create_task(gateway.complete(model="one"))
        async with fake(redis_url, "one", emit([300])).running():
            assert (await waiting).status == 200
        one = gateway.directory.find("one")
        assert one is not None
        async with asyncio.timeout(60):  # nothing is left in the queue
            while await one.broker.queued() != (0, 0):  # noqa: ASYNC110 - the canceller works in the background
                await asyncio.sleep(0.02)


async def hostile_registrations(redis_url: str, folder: Path) -> dict[str, str]:
    """Register models that cannot be served, and return a part of the reason of each."""
    huge = FILE_LIMITS["tokenizer.json"]
    await register(redis_url, "malformed", folder, tokenizer_json=b'{"model": 1}')
    await register(redis_url, "template", folder, tokenizer_config_json=b'{"chat_template": "{% if %}"}')
    await register(redis_url, "no-object", folder, config_json=b"[]")
    wrong = await register(redis_url, "digest", folder, tokenizer_json=b'{"version": "1.0"}')
    long = await register(redis_url, "length", folder, tokenizer_json=b'{"version": "2.0"}')
    own = await register(redis_url, "name", folder)
    async with open_registry(redis_url) as registry:
        client, keys = registry.client, registry.keys
        files = {entry.name: entry for entry in wrong.files}
        await client.set(keys.file(files["tokenizer.json"].digest), b'{"version": "9.9"}')
        files = {entry.name: entry for entry in long.files}
        await client.setrange(keys.file(files["tokenizer.json"].digest), 3 * huge, b"x")
        await client.set(keys.manifest("other"), own.encode())
        await client.set(keys.manifest("bytes"), b"\xff" * 100)
        await client.set(keys.manifest("large"), b"\x00" * 1_000_000)
        too_large = ModelManifest("size", (), (FileEntry("tokenizer.json", "0" * 64, huge + 1),))
        await client.set(keys.manifest("size"), too_large.encode())
        escape = ModelManifest("path", (), (FileEntry("../../evil.py", "0" * 64, 1),))
        await client.set(keys.manifest("path"), escape.encode())
        await client.set(keys.manifest("missing"), ModelManifest("missing", (), own.files[:1]).encode())
        await client.lpush(keys.manifest("list"), b"1")
        typed = await register(redis_url, "type", folder, tokenizer_json=b'{"version": "3.0"}')
        files = {entry.name: entry for entry in typed.files}
        await client.delete(keys.file(files["tokenizer.json"].digest))
        await client.lpush(keys.file(files["tokenizer.json"].digest), b"1")
        names = ("other", "bytes", "large", "size", "path", "missing", "list", "evil\n{name}", "\udcff")
        await client.zadd(keys.models, {name.encode(errors="surrogateescape"): 2e12 for name in names})
    return {
        "malformed": "not a tokenizer",
        "template": "chat template",
        "no-object": "not a JSON object",
        "digest": "does not have the registered digest",
        "length": f"Redis has {3 * huge + 1}",
        "other": "the name of another model",
        "bytes": "not msgpack",
        "large": "over the limit",
        "size": "wrong size for tokenizer.json",
        "path": "may only have",
        "missing": "lacks tokenizer.json",
        "type": "Redis has -1",
    }


async def test_a_hostile_registration_costs_nobody_else_anything(
    redis_url: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    await register(redis_url, "good", folders[0])
    async with discovering_gateway(redis_url) as gateway, fake(redis_url, "good", emit([300])).running() as worker:
        await gateway.until_names("good")
        expected = await hostile_registrations(redis_url, folders[0])
        served = 0

        def told(name: str) -> str:
            fault = gateway.discovery.faults.get(name)
            return "" if fault is None else fault.why

        async with asyncio.timeout(60):
            # A registration that was read half-way through its change is tried again, and then has the expected fault.
            while not all(why in told(name) for name, why in expected.items()):
                assert (await gateway.complete(model="good")).status == 200
                served += 1
                await worker.beat()
        assert served > 5
        assert await gateway.names() == ["good"]
        assert (await gateway.complete(model="malformed")).status == 404
        # A corrected registration is served without a restart.
        await register(redis_url, "malformed", folders[0])
        async with fake(redis_url, "malformed", emit([300])).running():
            async with asyncio.timeout(60):
                while (await gateway.complete(model="malformed")).status != 200:  # noqa: ASYNC110 - a task of the gateway
                    await asyncio.sleep(0.05)


async def test_a_gateway_serves_as_many_models_as_it_may(redis_url: str, folders: tuple[Path, Path]) -> None:
    await register(redis_url, "one", folders[0])
    async with discovering_gateway(redis_url, max_models=1) as gateway, fake(redis_url, "one", emit([300])).running():
        await gateway.until_names("one")
        await register(redis_url, "two", folders[1])
        async with asyncio.timeout(60):
            while "two" not in gateway.discovery.faults:  # noqa: ASYNC110 - a task of the gateway
                await asyncio.sleep(0.02)
        assert "--max-models" in gateway.discovery.faults["two"].why
        # A place is free once a model is gone.
        await forget(redis_url, "one")
        await knows(gateway, "two")


async def test_a_registration_that_cannot_be_served_is_tried_again_after_longer_and_longer_times(
    redis_url: str, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "FIRST_RETRY_S", 0.2)
    clock, tried = asyncio.get_running_loop().time, list[float]()
    load = discovery.load_registered

    async def noted(*args: Any) -> ServedModel:
        tried.append(clock())
        return await load(*args)

    monkeypatch.setattr(discovery, "load_registered", noted)
    await register(redis_url, "bad", folders[0], config_json=b"[]")
    async with asyncio.timeout(60), discovering_gateway(redis_url):
        while len(tried) < 4:  # noqa: ASYNC110 - a task of the gateway
            await asyncio.sleep(0.02)
    assert [
        later - earlier >= wait for earlier, later, wait in zip(tried, tried[1:], (0.2, 0.4, 0.8), strict=False)
    ] == [True] * 3
