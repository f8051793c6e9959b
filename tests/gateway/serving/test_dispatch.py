"""Which model a request reaches, before its handler runs."""

from __future__ import annotations

from pathlib import Path

from tests.support.gateway.fake_worker import FakeWorker, emit
from tests.support.gateway.running import write_model
from tests.support.registrations import discovering_gateway, register


async def test_a_broken_body_is_counted_as_a_refused_call(redis_url: str, tmp_path: Path) -> None:
    await register(redis_url, "one", write_model(tmp_path / "one"))
    async with discovering_gateway(redis_url) as gateway, FakeWorker(redis_url, "one", emit([5])).running():
        await gateway.until_names("one")
        reply = await gateway.post("/v1/chat/completions", b'{"model": ')
        assert (reply.status, reply.error["code"]) == (400, "invalid_json")
        assert (await gateway.complete(model="two")).error["code"] == "model_not_found"
        reply = await gateway.complete(model=5)
        assert (reply.status, reply.error["param"]) == (400, "model")
        calls = gateway.directory.process.meters.calls
        assert calls["chat", "new", "refused"] == 1
        assert calls["completion", "new", "refused"] == 2
        # A single model needs no name, as with a model folder.
        assert (await gateway.post("/tokenize", {"prompt": "Hi"})).status == 200


async def test_without_any_model_every_call_is_refused(redis_url: str) -> None:
    async with discovering_gateway(redis_url) as gateway:
        assert (await gateway.post("/v1/chat/completions", b"{")).error["code"] == "invalid_json"
        assert (await gateway.chat()).error["code"] == "model_not_found"
        assert (await gateway.get(f"/v1/responses/resp_{'a' * 32}")).status == 404
        assert (await gateway.post(f"/v1/completions/cmpl-{'a' * 32}/cancel", {})).error["code"] == "not_found"
        assert (await gateway.get("/status")).json["workers"] == 0
        assert (await gateway.get("/engine/workers")).status == 404
        assert (await gateway.get("/openapi.json")).status == 200
