"""Batches from the upload to the output file, at one gateway and at several."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.features.batches import batch_runner, batch_store, line_run, validation
from quire.gateway.features.batches.batch import BatchStatus
from quire.gateway.features.batches.batch_runner import BatchRunner
from quire.gateway.features.batches.batch_service import BATCHES
from quire.gateway.features.batches.batch_store import BatchStore, Window
from quire.gateway.features.batches.line import call_id_of
from quire.shared.protocol.broker import QueueFull
from quire.shared.protocol.broker.lane_state import read_lane
from quire.shared.protocol.broker.parking import NO_BOUNDS
from quire.shared.protocol.keys import GROUP, AccountKeys, BatchKeys
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from quire.shared.protocol.states import ExpireReply, ParkReply, UnparkReply
from tests.gateway.conftest import Start
from tests.support.gateway.batch_calls import BatchClient, chat_line, completion_line, jsonl, with_key
from tests.support.gateway.fake_worker import Steps, emit, endless
from tests.support.gateway.running import MODEL, RunningGateway, tokens, until

# --- Batches from the upload to the output file, through a gateway with a worker that follows a script ----------------


pytestmark = pytest.mark.slow

VECTOR = b"\x00\x00\x40\x40\x00\x00\x80\x40"  # 3.0 and 4.0 as float32


@pytest.fixture
async def gateway(start_gateway: Start, tmp_path: Path) -> RunningGateway:
    return await start_gateway(files_dir=str(tmp_path / "files"))


@pytest.fixture
def client(gateway: RunningGateway) -> BatchClient:
    return BatchClient(gateway)


async def left_in_redis(gateway: RunningGateway) -> list[bytes]:
    """Return the keys of requests, and of windows of batches."""
    redis, keys = gateway.gateway.broker.client, BatchKeys()
    lane = gateway.gateway.broker.keys.prefix
    patterns = [f"{lane}req:*", f"{lane}out:*", keys.windows("*"), keys.leases("*"), keys.open("*"), keys.active]
    return [name for pattern in patterns for name in await redis.keys(pattern.replace("{", r"\{"))]


async def test_a_batch_has_one_line_of_output_for_each_line(gateway: RunningGateway, client: BatchClient) -> None:
    lines = [chat_line(number) for number in range(100)]
    content = b"\n" * 5000 + jsonl(lines).replace(b"\n", b"\n \r\n")  # blank lines are not counted
    async with gateway.worker(emit([ord("a"), ord("b")])) as worker:
        batch = await client.create(content, metadata={"job": "7"})
        assert batch["status"] == "validating"
        batch = await client.ended(batch["id"])
        assert len(worker.claimed) == 100
    assert batch["status"] == "completed", batch
    assert batch["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
    assert batch["metadata"] == {"job": "7"}
    assert batch["model"] == MODEL
    assert batch["error_file_id"] is None
    output, _ = await client.outputs(batch)
    assert [line["custom_id"] for line in output] == [line["custom_id"] for line in lines]
    for number, line in enumerate(output, start=1):
        call_id = call_id_of(batch["id"].removeprefix("batch_"), number)
        assert line["id"] == f"batch_req_{call_id}"
        assert line["error"] is None
        assert (line["response"]["status_code"], line["response"]["request_id"]) == (200, call_id)
        body = line["response"]["body"]
        assert (body["id"], body["object"]) == (f"chatcmpl-{call_id}", "chat.completion")
    answers = sum(line["response"]["body"]["usage"]["completion_tokens"] for line in output)
    prompts = sum(line["response"]["body"]["usage"]["prompt_tokens"] for line in output)
    assert batch["usage"] == {"input_tokens": prompts, "output_tokens": answers, "total_tokens": prompts + answers}
    assert await left_in_redis(gateway) == []


async def test_lines_wait_in_the_class_batch(gateway: RunningGateway, client: BatchClient) -> None:
    batch = await client.create(jsonl([chat_line(1, service_tier="auto"), chat_line(2, priority="batch")]))
    broker = gateway.gateway.broker

    async def both_wait() -> bool:
        return (await read_lane(broker)).waiting["batch"] == 2

    await until(both_wait)
    async with gateway.worker(emit([ord("a")])):
        batch = await client.ended(batch["id"])
    first, second = (await client.outputs(batch))[0]
    assert first["response"]["body"]["service_tier"] == "flex"
    assert "service_tier" not in second["response"]["body"]
    assert (await broker.client.xpending(broker.keys.queue("batch"), GROUP))["pending"] == 0


@pytest.mark.parametrize(
    ("acts", "status", "code"),
    [
        (("unpark",), "completed", None),
        (("cancel",), "cancelled", "batch_cancelled"),
        (("expire",), "expired", "batch_expired"),
        (("unpark", "expire"), "expired", "batch_expired"),  # its deadline has moved by the time of the parking
        (("lapse",), "completed", "deadline_exceeded"),
    ],
)
async def test_a_parked_line_waits_until_it_is_unparked_or_its_batch_ends(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, acts: tuple[str, ...], status: str, code: str | None
) -> None:
    """Its tokens count once, and nothing of it stays in Redis."""
    monkeypatch.setattr(line_run, "PARKED_S", (0.05, 0.1))
    client, key_id = await with_key(gateway)
    broker, accounts = gateway.gateway.broker, gateway.gateway.process.keys.client
    looks, attach = 0, broker.attach

    async def script(request: GenerationRequest) -> Steps:
        if len(worker.claimed) == 1:
            yield (Delta(0, tuple(tokens("ab"))),), None
            await asyncio.Event().wait()
        while code is not None:
            await asyncio.sleep(0.01)
            yield (), None
        yield (Delta(0, tuple(tokens("c")), "stop"),), Outcome("stop")

    async def counted() -> list[int]:
        """Return the open requests of the key and its tokens of today, reservations included."""
        spent = await accounts.hmget(AccountKeys().spent(f"key:{key_id}"), "open", "day_tokens")
        return [int(float(value or 0)) for value in spent]

    async def attach_and_count(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        return await attach(*arguments)

    async def has_begun() -> bool:
        return await broker.client.hget(broker.keys.request(request), "emitted") == b"2"

    async def was_looked_at_twice() -> bool:
        return looks >= 2

    async def goes_on() -> bool:
        return len(worker.claimed) == 2

    broker.attach = attach_and_count  # type: ignore[method-assign]
    async with gateway.worker(script) as worker:
        batch = await client.create(jsonl([chat_line(1, max_tokens=50)]))
        batch_id = batch["id"].removeprefix("batch_")
        request = call_id_of(batch_id, 1)
        await until(has_begun)
        prompt = len(worker.claimed[0].prompt)
        assert await counted() == [1, prompt + 50]
        assert await broker.park(request, retention_s=60) is ParkReply.PARKED
        assert await counted() == [0, prompt + 2]
        await until(was_looked_at_twice)
        assert (await client.show(batch["id"]))["status"] == "in_progress"
        for act in acts:
            if act == "unpark":
                assert await broker.unpark(request, NO_BOUNDS) is UnparkReply.QUEUED
                await until(goes_on)
            elif act == "cancel":
                await client.json("POST", f"/v1/batches/{batch['id']}/cancel")
            elif act == "expire":
                await accounts.hset(BatchKeys().batch(batch_id), "expires", int(time.time()))
            else:
                await broker.client.zadd(broker.keys.parked, {request: 1})
                assert await broker.expire(request) is ExpireReply.EXPIRED
        batch = await client.ended(batch["id"])
    assert batch["status"] == status
    assert batch["request_counts"] == {"total": 1, "completed": int(code is None), "failed": int(code is not None)}
    output, errors = await client.outputs(batch)
    assert [line["response"]["body"]["choices"][0]["message"]["content"] for line in output] == ["abc"] * (code is None)
    found = [(line["error"] or line["response"]["body"]["error"])["code"] for line in errors]
    assert found == ([] if code is None else [code])
    assert await counted() == [0, prompt + 2 + (code is None)]
    assert await left_in_redis(gateway) == []
    keys = broker.keys
    assert await broker.client.exists(keys.parked, keys.holders, keys.due, keys.ended(key_id)) == 0


async def test_completions_with_several_prompts(gateway: RunningGateway, client: BatchClient) -> None:
    lines = [completion_line(1, prompt=["a", "b", "c"], n=2), completion_line(2)]
    async with gateway.worker(emit([ord("x")])):
        batch = await client.ended((await client.create(jsonl(lines), "/v1/completions"))["id"])
    output, _ = await client.outputs(batch)
    assert [len(line["response"]["body"]["choices"]) for line in output] == [6, 1]
    assert await left_in_redis(gateway) == []


async def test_responses_are_not_stored(gateway: RunningGateway, client: BatchClient) -> None:
    url = "/v1/responses"
    line = {"custom_id": "r", "method": "POST", "url": url, "body": {"model": MODEL, "input": "Hello"}}
    async with gateway.worker(emit([*tokens("x"), 2], "stop")):
        batch = await client.ended((await client.create(jsonl([line]), url))["id"])
    ((one,), _) = await client.outputs(batch)
    body = one["response"]["body"]
    assert (body["object"], body["status"], body["store"], body["background"]) == (
        "response",
        "completed",
        False,
        False,
    )
    assert body["output"][0]["content"][0]["text"] == "x"
    assert (await client.call("GET", f"{url}/{body['id']}"))[0] == 404


async def fail_some(request: GenerationRequest) -> Steps:
    if request.sampling.max_tokens == 13:
        yield (), Outcome("error", "the model has no answer")
    else:
        yield (Delta(0, (ord("a"),), "stop"),), Outcome("stop")


async def test_failed_lines_are_in_the_error_file(gateway: RunningGateway, client: BatchClient) -> None:
    lines = [chat_line(1), chat_line(2, max_tokens=13), chat_line(3, max_tokens=100_000), chat_line(4)]
    async with gateway.worker(fail_some):
        batch = await client.ended((await client.create(jsonl(lines)))["id"])
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 4, "completed": 2, "failed": 2}
    output, errors = await client.outputs(batch)
    assert [line["custom_id"] for line in output] == ["line-1", "line-4"]
    assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [
        ("line-2", 500),
        ("line-3", 400),
    ]
    assert errors[0]["response"]["body"]["error"]["message"] == "the model has no answer"
    assert errors[1]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert all(line["error"] is None for line in errors)


async def test_nothing_runs_if_a_line_is_wrong(gateway: RunningGateway, client: BatchClient) -> None:
    lines = [chat_line(1), {**chat_line(2), "url": "/v1/completions"}, chat_line(1), chat_line(4, temperature="hot")]
    lines.append(chat_line(5, model="other"))
    content = jsonl(lines) + b"{not json\n"
    batch = await client.ended((await client.create(content))["id"])
    assert batch["status"] == "failed"
    found = [(one["line"], one["code"], one["param"]) for one in batch["errors"]["data"]]
    assert found == [
        (2, "invalid_value", "url"),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_value", "body.temperature"),
        (5, "model_not_found", "body.model"),
        (6, "invalid_json", None),
    ]
    assert batch["failed_at"]
    assert await gateway.accepted() == 0
    # The input is not in use any more.
    assert (await client.json("DELETE", f"/v1/files/{batch['input_file_id']}"))["deleted"] is True


async def test_a_cancelled_batch_keeps_its_answers_and_names_the_lines_that_did_not_end(
    gateway: RunningGateway, client: BatchClient
) -> None:
    async def script(request: GenerationRequest) -> Steps:
        if request.sampling.max_tokens == 1:
            yield (Delta(0, (ord("a"),), "length"),), Outcome("length")
            return
        while True:
            await asyncio.sleep(0.001)
            yield (Delta(0, (ord("a"),)),), None

    lines = [chat_line(number, max_tokens=1 if number < 10 else 400) for number in range(200)]
    async with gateway.worker(script) as worker:
        batch = await client.create(jsonl(lines))

        async def all_short_ones_ended() -> bool:
            return bool((await client.show(batch["id"]))["request_counts"]["completed"] == 10)

        await until(all_short_ones_ended)
        status = (await client.json("POST", f"/v1/batches/{batch['id']}/cancel"))["status"]
        assert status in ("cancelling", "cancelled")
        batch = await client.ended(batch["id"])
        before = len(worker.claimed)
    assert batch["status"] == "cancelled"
    assert batch["request_counts"] == {"total": 200, "completed": 10, "failed": 190}
    output, errors = await client.outputs(batch)
    assert [line["custom_id"] for line in output] == [f"line-{number}" for number in range(10)]
    assert [line["custom_id"] for line in errors] == [f"line-{number}" for number in range(10, 200)]
    assert {(line["response"], line["error"]["code"]) for line in errors} == {(None, "batch_cancelled")}
    # Not more lines than were in flight have ever run.
    assert before <= 10 + gateway.settings.batch_lines_in_flight
    assert await left_in_redis(gateway) == []


async def test_a_batch_that_is_cancelled_while_it_is_validated_runs_nothing(
    start_gateway: Start, tmp_path: Path
) -> None:
    gateway = await start_gateway(files_dir=str(tmp_path))
    client = BatchClient(gateway)
    file = await client.upload(jsonl([chat_line(1)]))
    gateway.gateway.draining = True  # this gateway begins no validation
    given = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = await client.json("POST", "/v1/batches", json=given)
    batch = await client.json("POST", f"/v1/batches/{batch['id']}/cancel")
    assert batch["status"] == "cancelled"
    assert batch["cancelled_at"]
    assert (await client.json("POST", f"/v1/batches/{batch['id']}/cancel"))["status"] == "cancelled"
    assert await left_in_redis(gateway) == []


async def test_an_expired_batch_names_the_lines_that_did_not_end(gateway: RunningGateway, client: BatchClient) -> None:
    keys, redis = BatchKeys(), gateway.gateway.process.keys.client
    gateway.gateway.draining = True  # no window is begun before the record is changed
    async with gateway.worker(endless(ord("a"))):
        batch = await client.create(jsonl([chat_line(number) for number in range(100)]))
        # As if the batch had been created long ago.
        key = keys.batch(batch["id"].removeprefix("batch_"))
        await redis.hset(key, "expires", int(time.time()) + 2)
        gateway.gateway.draining = False
        batch = await client.ended(batch["id"])
    assert batch["status"] == "expired"
    assert batch["expired_at"]
    assert batch["request_counts"] == {"total": 100, "completed": 0, "failed": 100}
    output, errors = await client.outputs(batch)
    assert output == []
    assert [line["custom_id"] for line in errors] == [f"line-{number}" for number in range(100)]
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}


async def test_the_input_cannot_be_deleted_while_the_batch_needs_it(
    gateway: RunningGateway, client: BatchClient
) -> None:
    batch = await client.create(jsonl([chat_line(1)]))
    status, data = await client.call("DELETE", f"/v1/files/{batch['input_file_id']}")
    assert (status, json.loads(data)["error"]["code"]) == (409, "file_in_use")
    async with gateway.worker(emit([ord("a")])):
        batch = await client.ended(batch["id"])
    for file_id in (batch["input_file_id"], batch["output_file_id"]):
        assert (await client.json("DELETE", f"/v1/files/{file_id}"))["deleted"] is True
    assert (await client.json("GET", "/v1/files"))["data"] == []


async def test_batches_are_listed_in_pages(gateway: RunningGateway, client: BatchClient) -> None:
    ids = [(await client.create(jsonl([chat_line(1)])))["id"] for _ in range(3)]
    page = await client.json("GET", "/v1/batches?limit=2")
    assert [one["id"] for one in page["data"]] == [ids[2], ids[1]]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[2], ids[1], True)
    page = await client.json("GET", f"/v1/batches?limit=2&after={ids[1]}")
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([ids[0]], False)
    assert (await client.call("GET", f"/v1/batches?after=batch_{'0' * 32}"))[0] == 400


async def test_the_queue_keeps_room_for_clients(
    start_gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(files_dir=str(tmp_path), max_queued_requests=40)
    client, broker = BatchClient(gateway), gateway.gateway.broker
    refused, submit = 0, broker.submit

    async def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal refused
        try:
            return await submit(*arguments, **options)
        except QueueFull:
            refused += 1
            raise

    monkeypatch.setattr(broker, "submit", counted)
    batch = await client.create(jsonl([chat_line(number) for number in range(100)]))

    async def was_refused() -> bool:
        return refused >= 5

    async def is_full() -> bool:
        return await gateway.queued() == 10

    await until(is_full)
    await until(was_refused)
    assert await gateway.queued() == 10
    async with gateway.worker(emit([ord("a")])):
        batch = await client.ended(batch["id"])
    assert batch["request_counts"]["completed"] == 100


async def test_without_a_storage_the_answer_names_the_setting(start_gateway: Start) -> None:
    gateway = await start_gateway()
    client = BatchClient(gateway)
    calls = [("GET", "/v1/files"), ("GET", "/v1/files/file-1"), ("GET", "/v1/files/file-1/content")]
    calls += [("POST", "/v1/files"), ("DELETE", "/v1/files/file-1"), ("GET", "/v1/batches"), ("POST", "/v1/batches")]
    calls += [("GET", "/v1/batches/batch_1"), ("POST", "/v1/batches/batch_1/cancel")]
    for method, path in calls:
        status, data = await client.call(method, path)
        error = json.loads(data)["error"]
        assert (status, error["code"]) == (404, "files_off"), path
        assert "--files-dir" in error["message"]


# --- Windows at several gateways: they share a batch, take windows over, and never write a line twice -----------------


def runner_of(gateway: RunningGateway) -> BatchRunner:
    runner: BatchRunner = gateway.app[BATCHES].runner
    return runner


async def die(gateway: RunningGateway) -> None:
    """Stop the runner of a gateway as a kill does: it releases nothing."""
    runner = runner_of(gateway)
    tasks = [*runner._tasks, *(one.task for one in runner._open.values())]
    runner._open.clear()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "LEASE_MS", 1000)


@pytest.mark.parametrize("place", ["end", "close"])
async def test_a_gateway_that_dies_after_it_has_written_a_window_leaves_no_line_twice(
    start_gateway: Start, tmp_path: Path, short_leases: None, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    first = await start_gateway(files_dir=str(tmp_path))
    second = await start_gateway(files_dir=str(tmp_path))
    second.gateway.draining = True
    store, reached = runner_of(first)._store, asyncio.Event()

    async def never(*_: object) -> str:
        reached.set()
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(store, place, never)
    lines = [chat_line(number) for number in range(50)]
    async with first.worker(emit([ord("a")])) as worker:
        batch = await BatchClient(first).create(jsonl(lines))
        await asyncio.wait_for(reached.wait(), 60)
        await die(first)
        second.gateway.draining = False
        batch = await BatchClient(second).ended(batch["id"])
        assert len(worker.claimed) == 50
    output, _ = await BatchClient(second).outputs(batch)
    assert [line["custom_id"] for line in output] == [f"line-{number}" for number in range(50)]
    assert batch["request_counts"] == {"total": 50, "completed": 50, "failed": 0}
    assert second.app[BATCHES].meter.taken_over == 1
    assert await left_in_redis(second) == []


async def test_a_gateway_that_ends_hands_its_windows_over_at_once(
    start_gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not when its lease ends, which would be after this test."""
    monkeypatch.setattr(batch_store, "LEASE_MS", 3_600_000)
    first = await start_gateway(files_dir=str(tmp_path))
    second = await start_gateway(files_dir=str(tmp_path))
    second.gateway.draining = True
    batch = await BatchClient(first).create(jsonl([chat_line(1)]))

    async def is_queued() -> bool:
        return await first.gateway.broker.queued() != (0, 0)

    await until(is_queued)
    await runner_of(first).close()
    second.gateway.draining = False
    async with first.worker(emit([ord("a")])):
        batch = await BatchClient(second).ended(batch["id"])
    assert batch["status"] == "completed"


async def test_several_gateways_share_a_batch(
    start_gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "WINDOW_LINES", 20)
    gateways = [await start_gateway(files_dir=str(tmp_path), batch_lines_in_flight=8) for _ in range(2)]
    lines = [chat_line(number) for number in range(300)]
    client = BatchClient(gateways[0])
    batch = await client.create(jsonl(lines))

    async def both_have_lines() -> bool:
        return (await gateways[0].gateway.broker.queued())[0] == 16

    await until(both_have_lines)
    async with gateways[0].worker(emit([ord("a"), ord("b"), ord("c")])) as worker:
        batch = await client.ended(batch["id"])
        assert len(worker.claimed) == 300
    output, _ = await client.outputs(batch)
    assert [line["custom_id"] for line in output] == [f"line-{number}" for number in range(300)]
    assert all(gateway.app[BATCHES].meter.completed > 0 for gateway in gateways)
    assert await left_in_redis(gateways[0]) == []


async def test_batches_take_turns(start_gateway: Start, tmp_path: Path) -> None:
    gateway = await start_gateway(files_dir=str(tmp_path), batch_lines_in_flight=32)
    client = BatchClient(gateway)
    long = await client.create(jsonl([chat_line(number) for number in range(600)]))
    short = await client.create(jsonl([chat_line(number) for number in range(10)]))
    async with gateway.worker(emit([ord("a")])):
        await client.ended(short["id"])
        assert (await client.show(long["id"]))["status"] == "in_progress"
        assert (await client.ended(long["id"]))["request_counts"]["completed"] == 600


async def test_a_window_that_waits_is_handed_back_only_for_one_that_is_begun(
    start_gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches that wait for their limits take turns at the only place; one of another gateway gets no turn."""
    idle_s, claim, active = 0.1, BatchStore.claim, BatchStore.active
    turns: list[tuple[str, float]] = []
    looks: list[float] = []

    async def noted_claim(store: BatchStore, name: str) -> Window | None:
        if (window := await claim(store, name)) is not None:
            turns.append((name, time.monotonic()))
        return window

    async def noted_look(store: BatchStore) -> list[str]:
        looks.append(time.monotonic())
        return await active(store)

    monkeypatch.setattr(batch_runner, "MAX_WINDOWS", 1)
    monkeypatch.setattr(batch_runner, "IDLE_S", idle_s)
    monkeypatch.setattr(batch_runner, "POLL_S", idle_s / 5)
    gateway = await start_gateway(files_dir=str(tmp_path))
    store, names = BatchStore(gateway.gateway.process.keys.client), []
    async with gateway.worker(emit([ord("a")])):
        for project in ("one", "two"):
            client, _ = await with_key(gateway, project, requests_per_minute=1)
            names.append((await client.create(jsonl([chat_line(1), chat_line(2)])))["id"].removeprefix("batch_"))

        async def has_place(name: str) -> bool:
            found = await store.get(name)
            leases = await store.client.zcount(BatchKeys().leases(name), time.time() * 1000, "inf")
            return found is not None and found.status == BatchStatus.IN_PROGRESS and leases == 1

        for name in names:  # both are validated
            await until(lambda name=name: has_place(name))
        monkeypatch.setattr(BatchStore, "claim", noted_claim)
        await until(lambda: asyncio.sleep(0, len(turns) >= 4))
        assert all(turn[0] != later[0] and later[1] - turn[1] > idle_s for turn, later in pairwise(turns))
        while (other := await claim(store, names[0])) is None:  # noqa: ASYNC110 - the gateway changes it
            await asyncio.sleep(0.01)
        claimed_at = time.monotonic()
        monkeypatch.setattr(BatchStore, "active", noted_look)
        await until(lambda: asyncio.sleep(0, sum(at > claimed_at + 3 * idle_s for at in looks) >= 2))
        await store.release(other)
        assert await has_place(names[1])
        await until(lambda: has_place(names[0]))
