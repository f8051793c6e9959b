"""Embedding calls through a gateway."""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from quire.gateway.features.several_models.registered_model import RegistrationFault, load_registered
from quire.gateway.settings import GatewaySettings
from quire.shared.protocol.messages import GenerationRequest, Outcome, StepItem
from quire.shared.protocol.messages.manifest import FileEntry, ModelManifest
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Steps, endless
from tests.support.gateway.running import (
    MODEL,
    Reply,
    RunningGateway,
    raw_request,
    running_gateway,
    tokens,
    until,
    write_model,
)
from tests.support.hand_worker import HandWorker
from tests.support.registrations import open_registry, register
from tests.support.tokenizers import byte_level

# --- Embedding calls from the request to the answer: many inputs, failures, lost messages, repeated keys, and ---------


PATH = "/v1/embeddings"


def vector(request: GenerationRequest) -> bytes:
    return struct.pack("<3f", len(request.prompt), sum(request.prompt) % 97, 1.0)


async def embedder(request: GenerationRequest) -> Steps:
    yield (), Outcome("stop", embedding=vector(request))


async def embed(gateway: RunningGateway, *, key: str = "", **parameters: Any) -> Reply:
    headers = {"Idempotency-Key": key} if key else {}
    body = {"model": MODEL, "input": "Hello", "normalize": False, **parameters}
    return await gateway.post(PATH, body, **headers)


def embeddings(reply: Reply) -> list[list[float]]:
    assert reply.status == 200, reply.json
    assert [one["index"] for one in reply.json["data"]] == list(range(len(reply.json["data"])))
    return [one["embedding"] for one in reply.json["data"]]


async def test_hundreds_of_inputs_come_back_in_their_order(gateway: RunningGateway) -> None:
    inputs = [[5 + index % 90] * (1 + index % 7) for index in range(500)]
    async with gateway.worker(embedder) as worker:
        found = embeddings(await embed(gateway, input=inputs))
    assert found == [[len(one), sum(one) % 97, 1.0] for one in inputs]
    assert len(worker.claimed) == 500


@pytest.mark.parametrize(
    ("outcome", "status", "code"),
    [
        (Outcome("error", "this model gives no hidden states"), 500, "generation_failed"),
        (Outcome("quarantined", "crashed three workers"), 500, "quarantined"),
        (Outcome("deadline", "too late"), 504, "deadline_exceeded"),
        (Outcome("cancelled", "by an operator"), 499, "cancelled"),
    ],
)
async def test_one_input_that_fails_fails_the_call(
    gateway: RunningGateway, outcome: Outcome, status: int, code: str
) -> None:
    async def script(request: GenerationRequest) -> Steps:
        if request.prompt == tuple(tokens("bad")):
            yield (), outcome
        else:
            yield (), Outcome("stop", embedding=vector(request))

    async with gateway.worker(script):
        reply = await embed(gateway, input=["good", "bad", "good"])
    assert (reply.status, reply.error["code"]) == (status, code)
    assert outcome.detail in reply.error["message"]


@pytest.mark.parametrize("name", ["stop", "length"])
async def test_an_outcome_without_an_embedding_is_an_error_that_is_logged(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    async def script(request: GenerationRequest) -> Steps:
        yield (), Outcome(name, embedding=None if request.prompt == tuple(tokens("bad")) else vector(request))

    async with gateway.worker(script):
        reply = await embed(gateway, input=["good", "bad", "good"])
    assert (reply.status, reply.error["code"]) == (500, "generation_failed")
    assert "no embedding" in reply.error["message"]
    [record] = [record for record in caplog.records if record.name == "gateway" and record.levelname == "ERROR"]
    assert reply.headers["x-request-id"] in record.getMessage()
    assert "input 1 without an embedding (1 of 3 inputs" in record.getMessage()


async def test_the_requests_of_a_client_that_leaves_are_cancelled(gateway: RunningGateway) -> None:
    data = json.dumps({"model": MODEL, "input": ["a", "b", "c"]}).encode()
    async with gateway.worker(endless(65)) as worker:
        _, writer = await gateway.connect(raw_request("POST", PATH, data))

        async def run() -> bool:
            return len(worker.steps) == 3

        await until(run)
        writer.close()
        for _ in range(3):
            await asyncio.wait_for(worker.cancelled.get(), 60)


async def test_an_embedding_that_was_never_published_is_read_from_the_log(gateway: RunningGateway) -> None:
    worker = HandWorker(gateway)
    call = asyncio.create_task(embed(gateway, input=[[5, 6], [7]]))
    for claim in [await worker.claim(), await worker.claim()]:
        data = vector(GenerationRequest.decode(claim.body))
        await worker.log(claim, [StepItem(claim.request_id, 0, (), Outcome("stop", embedding=data))])
    assert embeddings(await asyncio.wait_for(call, 60)) == [[2.0, 11.0, 1.0], [1.0, 7.0, 1.0]]
    assert gateway.gateway.router.stats.log_reads > 0


async def test_an_embedding_that_is_published_twice_counts_once(gateway: RunningGateway) -> None:
    worker = HandWorker(gateway)
    call = asyncio.create_task(embed(gateway, input=[[5, 6]]))
    claim = await worker.claim()
    item = StepItem(claim.request_id, 0, (), Outcome("stop", embedding=vector(GenerationRequest.decode(claim.body))))
    await worker.log(claim, [item])
    await worker.publish(item.encode() + item.encode())
    assert embeddings(await asyncio.wait_for(call, 60)) == [[2.0, 11.0, 1.0]]


async def test_the_same_key_gets_the_same_answer_at_any_gateway(start_gateway: Start) -> None:
    gateway = await start_gateway()
    async with running_gateway(gateway.settings) as other, gateway.worker(embedder) as worker:
        first = await embed(gateway, key="k", input=["one", "two"])
        again = await embed(gateway, key="k", input=["one", "two"])
        elsewhere = await embed(other, key="k", input=["one", "two"])
        conflict = await embed(other, key="k", input=["one", "three"])
    assert first.status == 200
    assert first.json == again.json == elsewhere.json
    assert (conflict.status, conflict.error["code"]) == (409, "idempotency_conflict")
    assert len(worker.claimed) == 2
    assert gateway.gateway.meters.calls["embeddings", "joined", "stop"] == 1


async def test_callers_with_one_key_share_requests_that_still_wait(gateway: RunningGateway) -> None:
    calls = [asyncio.create_task(embed(gateway, key="k", input=["one", "two"])) for _ in range(3)]

    async def joined() -> bool:
        return gateway.gateway.meters.open_calls["embeddings"] == 3 and await gateway.queued() == 2

    await until(joined)
    async with gateway.worker(embedder) as worker:
        replies = [await call for call in calls]
    assert [reply.status for reply in replies] == [200] * 3
    assert replies[0].json == replies[1].json == replies[2].json
    assert len(worker.claimed) == 2


async def test_logs_stay_only_for_calls_that_can_be_repeated(gateway: RunningGateway) -> None:
    broker = gateway.gateway.broker

    async def logs() -> int:
        return len([key async for key in broker.client.scan_iter(broker.keys.output("*"))])

    async with gateway.worker(embedder):
        assert (await embed(gateway, input=["one", "two"])).status == 200
        assert await logs() == 0
        assert (await embed(gateway, key="k", input=["one", "two"])).status == 200
        assert await logs() == 2
        assert (await embed(gateway, key="k", input=["one", "two"])).status == 200
        assert await logs() == 2


@pytest.mark.parametrize("error", [RedisConnectionError("away"), None], ids=["away", "hangs"])
async def test_the_answer_does_not_need_redis_to_delete_logs(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    async def fails(request_ids: list[str]) -> None:
        if error is not None:
            raise error
        await asyncio.Event().wait()

    monkeypatch.setattr(gateway.gateway.broker, "drop_output", fails)
    async with gateway.worker(embedder):
        assert (await embed(gateway)).status == 200


async def test_a_chat_cannot_take_the_key_of_an_embedding(gateway: RunningGateway) -> None:
    async with gateway.worker(embedder):
        assert (await embed(gateway, key="k")).status == 200
    reply = await gateway.post("/v1/completions", {"model": MODEL, "prompt": "Hello"}, Idempotency_Key="k")
    assert (reply.status, reply.error["code"]) == (409, "idempotency_conflict")


async def test_an_embedding_has_no_stream(gateway: RunningGateway) -> None:
    async with gateway.worker(embedder):
        reply = await embed(gateway)
    call_id = reply.json["id"].removeprefix("embd-")
    for path in (f"/v1/completions/cmpl-{call_id}/stream", f"/v1/chat/completions/chatcmpl-{call_id}/stream"):
        assert (await gateway.get(path)).status == 404


async def test_calls_and_prompt_tokens_are_counted_and_logged(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    meters = gateway.gateway.meters
    async with gateway.worker(embedder):
        reply = await embed(gateway, input=["a secret", "another secret"])
        await embed(gateway, input=[])
    count = reply.json["usage"]["prompt_tokens"]
    assert meters.calls["embeddings", "new", "stop"] == 1
    assert meters.calls["embeddings", "new", "refused"] == 1
    assert meters.open_calls["embeddings"] == 0
    assert (meters.prompt_tokens["embeddings"], meters.completion_tokens["embeddings"]) == (count, 0)
    assert meters.complete_s["embeddings"].count == 1
    lines = [record.getMessage() for record in caplog.records if record.name == "gateway.access"]
    assert lines[0].startswith(f"POST {PATH} 200 request={reply.headers['x-request-id']} ms=")
    assert lines[0].endswith(f"outcome=stop prompt_tokens={count} tokens=0")
    assert "secret" not in caplog.text


# --- Loading a model from its registration ----------------------------------------------------------------------------


async def test_a_registered_model_is_that_of_the_folder(redis_url: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    generation = json.dumps({"temperature": 0.25, "eos_token_id": 2}).encode()
    manifest = await register(redis_url, "name", folder, "alias", generation_config_json=generation)
    shutil.rmtree(folder)
    async with open_registry(redis_url) as registry:
        model = await load_registered(registry, manifest, GatewaySettings())
        assert (model.name, model.aliases, model.max_model_len) == ("name", ("alias",), 512)
        assert model.tokenizer.encode("Hi").ids == byte_level().encode("Hi").ids
        assert model.template is not None
        assert model.eos_token_ids == {2}
        assert model.sampling_defaults["temperature"] == 0.25
        plain = await load_registered(registry, manifest, GatewaySettings(generation_config="none"))
        assert plain.sampling_defaults["temperature"] == 1.0
        kept = [entry for entry in manifest.files if entry.name != "tokenizer.json"]
        lost = ModelManifest("name", (), (*kept, FileEntry("tokenizer.json", "0" * 64, 5)))
        with pytest.raises(RegistrationFault, match="Redis has 0"):
            await load_registered(registry, lost, GatewaySettings())
