"""Options of a call: idempotency key, deadline, priority class and rate limit; and gateways that share a port."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from quire.gateway.admission.service_rate import ServiceRate
from quire.gateway.api import resume
from quire.gateway.stream import buffer
from quire.shared.protocol.broker import Admission, Broker, QueueReader, Submitted, new_id
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from quire.shared.redis.clock import unix_time
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Steps, emit, endless
from tests.support.gateway.running import MODEL, Event, Reply, RunningGateway, chat_body, texts, tokens, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"model": MODEL, "prompt": "Hello"}
STREAM = {**BODY, "stream": True}


async def count(gateway: RunningGateway, name: str) -> int:
    return (await gateway.gateway.broker.read_totals()).get(name, 0)


async def reaches(gateway: RunningGateway, name: str, expected: int) -> None:
    async def reached() -> bool:
        return await count(gateway, name) == expected

    await until(reached)


async def keyed(gateway: RunningGateway, body: Any = BODY, key: str = "key", path: str = COMPLETIONS) -> Reply:
    return await gateway.post(path, body, Idempotency_Key=key)


async def keyed_events(gateway: RunningGateway, body: Any = STREAM, key: str = "key") -> list[Event]:
    async with gateway.stream(COMPLETIONS, body, Idempotency_Key=key) as stream:
        assert stream.response.status == 200, await stream.response.text()
        assert stream.response.headers["x-request-id"]
        return await stream.rest()


# --- Idempotency-Key --------------------------------------------------------------------------------------------------


async def test_twenty_calls_at_once_with_one_key_are_one_request(start_gateway: Start) -> None:
    gateways = [await start_gateway() for _ in range(2)]
    async with gateways[0].worker(emit(tokens("an answer"), "stop")) as worker:
        replies = await asyncio.gather(*(keyed(gateways[index % 2]) for index in range(20)))
    assert {reply.status for reply in replies} == {200}
    assert len({reply.body for reply in replies}) == 1
    assert len({reply.headers["x-request-id"] for reply in replies}) == 1
    assert replies[0].json["id"] == f"cmpl-{replies[0].headers['x-request-id']}"
    assert len(worker.claimed) == 1
    assert await count(gateways[0], "accepted") == 1


async def test_twenty_streams_at_once_with_one_key_are_one_stream(start_gateway: Start) -> None:
    gateways = [await start_gateway() for _ in range(2)]
    async with gateways[0].worker(emit(tokens("an answer 😀"), "stop")) as worker:
        found = await asyncio.gather(*(keyed_events(gateways[index % 2]) for index in range(20)))
    assert all(events == found[0] for events in found)
    assert "".join(texts(found[0])) == "an answer 😀"
    assert len(worker.claimed) == 1


async def test_a_key_is_bound_to_path_and_body(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("abc"))):
        first = await keyed(gateway)
        again = await keyed(gateway, {"prompt": "Hello", "model": MODEL})  # the order of JSON keys does not matter
        other = await keyed(gateway, {**BODY, "seed": 1})
        elsewhere = await keyed(gateway, chat_body(), path=CHAT)
        free = await keyed(gateway, {**BODY, "seed": 1}, key="another")
    assert first.body == again.body
    for reply in (other, elsewhere):
        assert (reply.status, reply.error["code"]) == (409, "idempotency_conflict")
    assert free.status == 200
    assert free.json["id"] != first.json["id"]


async def test_a_key_that_is_none_is_refused(gateway: RunningGateway) -> None:
    for key in ("x" * 256, "a b", "é"):
        reply = await keyed(gateway, key=key)
        assert (reply.status, reply.error["param"]) == (400, "Idempotency-Key")
    reply = await gateway.post(COMPLETIONS, BODY, Idempotency_Key="a\r\nIdempotency-Key: a")
    assert reply.status == 400
    assert "2 times" in reply.error["message"]
    async with gateway.worker(emit(tokens("abc"))):
        assert (await keyed(gateway, key="!" + "~" * 254)).status == 200


async def test_what_failed_stays_the_answer_to_its_key(gateway: RunningGateway) -> None:
    async def script(request: GenerationRequest) -> Steps:
        yield (), Outcome("error", "broken")

    async with gateway.worker(script) as worker:
        replies = [await keyed(gateway) for _ in range(2)]
    assert {reply.status for reply in replies} == {500}
    assert replies[0].body == replies[1].body
    assert len(worker.claimed) == 1


async def test_a_key_whose_call_was_cancelled_is_free_again(gateway: RunningGateway) -> None:
    """A client repeats its call after a broken connection. The cancelled first call is not the answer to the second."""
    async with gateway.stream(COMPLETIONS, STREAM, Idempotency_Key="key"):
        pass
    await reaches(gateway, "cancelled", 1)
    again = [asyncio.create_task(keyed_events(gateway)) for _ in range(5)]
    await reaches(gateway, "accepted", 2)
    async with gateway.worker(emit(tokens("abc"))) as worker:
        found = [await task for task in again]
    assert all(events == found[0] for events in found)
    assert "".join(texts(found[0])) == "abc"
    assert len(worker.claimed) == 1


async def echo(request: GenerationRequest) -> Steps:
    for index, token in enumerate(request.prompt):
        last = index + 1 == len(request.prompt)
        yield (Delta(0, (token,), "stop" if last else None),), Outcome("stop") if last else None


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_that_was_half_submitted_when_its_gateway_died_is_completed(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    here, there = await start_gateway(), await start_gateway()
    body = {**BODY, "prompt": ["one", "two", "three"], "stream": stream}
    real, submitted = Broker.submit, asyncio.Event()

    async def dying(
        self: Broker, request_id: str, body: bytes, terms: Admission, files: Sequence[bytes] = ()
    ) -> Submitted:
        if terms.gateway == here.gateway.id and request_id.endswith("-1"):
            submitted.set()
            await asyncio.Event().wait()
        return await real(self, request_id, body, terms, files)

    monkeypatch.setattr(Broker, "submit", dying)
    call = asyncio.create_task(keyed(here, body))
    await asyncio.wait_for(submitted.wait(), 60)
    async with here.worker(echo) as worker:
        if stream:
            events = await keyed_events(there, body)
            answers = ["".join(texts(events, index)) for index in range(3)]
            call_id = events[0].data["id"].removeprefix("cmpl-")
        else:
            whole = (await keyed(there, body)).json
            answers = [choice["text"] for choice in whole["choices"]]
            call_id = whole["id"].removeprefix("cmpl-")
    assert answers == ["one", "two", "three"]
    assert sorted(request.id for request in worker.claimed) == [call_id, f"{call_id}-1", f"{call_id}-2"]
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_a_call_in_the_background_that_is_refused_leaves_nothing_behind(start_gateway: Start) -> None:
    gateway = await start_gateway(max_queued_requests=2)
    reply = await gateway.complete(prompt=["a", "b", "c"], stream=True, background=True)
    assert reply.status == 429

    async def empty() -> bool:
        return await gateway.queued() == 0

    await until(empty)
    assert await count(gateway, "cancelled") == 2


async def test_of_two_callers_at_two_gateways_either_may_leave_with_several_prompts(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second caller's gateway submits a prompt before the first caller's gateway does. The second caller leaves."""
    here, there = await start_gateway(), await start_gateway()
    reached, go_on, leave = asyncio.Event(), asyncio.Event(), asyncio.Event()
    submit = here.gateway.broker.submit

    async def delayed(request_id: str, *args: Any, **kwargs: Any) -> str:
        if request_id.endswith("-1"):
            reached.set()
            await go_on.wait()
        return await submit(request_id, *args, **kwargs)

    monkeypatch.setattr(here.gateway.broker, "submit", delayed)

    async def script(request: GenerationRequest) -> Steps:
        yield (Delta(0, tuple(tokens("a"))),), None
        await leave.wait()
        yield (Delta(0, tuple(tokens("b")), "stop"),), Outcome("stop")

    asks = {**STREAM, "prompt": ["one", "two"]}
    async with here.worker(script) as worker:
        first = asyncio.create_task(keyed_events(here, asks))
        await reached.wait()
        async with there.stream(COMPLETIONS, asks, Idempotency_Key="key") as second:
            await second.take(2)
            go_on.set()
            await reaches(here, "accepted", 2)

            async def is_known() -> bool:
                found = [await here.gateway.broker.listeners_of([request.id]) for request in worker.claimed]
                return all(here.gateway.id in names for one in found for names in one.values())

            await until(is_known)

        async def left() -> bool:
            return there.gateway.router.calls == 0

        await until(left)
        await there.cancellations()
        leave.set()
        events = await first
    assert [texts(events, 0), texts(events, 1)] == [["a", "b"]] * 2
    assert await count(here, "cancelled") == 0


async def test_a_caller_keeps_a_prompt_that_another_gateway_made_up_and_left_before_it_came(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second caller leaves before the first caller's gateway has submitted the prompt."""
    here, there = await start_gateway(), await start_gateway()
    reached, go_on = asyncio.Event(), asyncio.Event()
    submit = here.gateway.broker.submit

    async def delayed(request_id: str, *args: Any, **kwargs: Any) -> str:
        if request_id.endswith("-1"):
            reached.set()
            await go_on.wait()
        return await submit(request_id, *args, **kwargs)

    monkeypatch.setattr(here.gateway.broker, "submit", delayed)
    asks = {**STREAM, "prompt": ["one", "two"]}
    first = asyncio.create_task(keyed_events(here, asks))
    await reached.wait()
    async with there.stream(COMPLETIONS, asks, Idempotency_Key="key"):
        await reaches(here, "accepted", 2)

    async def left() -> bool:
        return there.gateway.router.calls == 0

    await until(left)
    await there.cancellations()
    go_on.set()

    async def script(request: GenerationRequest) -> Steps:
        yield (Delta(0, tuple(tokens("a")), "stop"),), Outcome("stop")

    async with here.worker(script):
        events = await first
    assert [texts(events, 0), texts(events, 1)] == [["a"]] * 2
    assert await count(here, "cancelled") == 0


@pytest.mark.parametrize(
    ("verb", "prompts"),
    [("attach", ["one"]), ("attach", ["one", "two"]), ("submit", ["one", "two"]), ("look_up", ["one", "two"])],
)
async def test_who_leaves_while_it_joins_does_not_keep_the_call_running(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch, verb: str, prompts: list[str]
) -> None:
    """Redis has recorded the second gateway as a listener; that gateway has not received the reply yet."""
    here, there = await start_gateway(), await start_gateway()
    reached, go_on = asyncio.Event(), asyncio.Event()
    holder = resume if verb == "look_up" else there.gateway.broker
    real = getattr(holder, verb)

    async def delayed(*args: Any, **kwargs: Any) -> Any:
        found = await real(*args, **kwargs)
        if verb != "submit" or args[0].endswith("-1"):
            reached.set()
            await go_on.wait()
        return found

    monkeypatch.setattr(holder, verb, delayed)
    asks = {**STREAM, "prompt": prompts}
    async with here.worker(endless(65)) as worker:
        async with here.stream(COMPLETIONS, asks, Idempotency_Key="key") as first:
            await first.take(len(prompts))
            second = asyncio.create_task(keyed_events(there, asks))
            await reached.wait()
            second.cancel()

            async def left() -> bool:
                return there.gateway.router.calls == 0

            await until(left)
            go_on.set()
        for _ in prompts:
            await asyncio.wait_for(worker.cancelled.get(), 60)


# --- deadlines --------------------------------------------------------------------------------------------------------


async def pass_deadline(gateway: RunningGateway, request_id: str) -> None:
    """Move the deadline of a request into the past."""
    broker = gateway.gateway.broker
    assert await broker.client.hset(broker.keys.request(request_id), "deadline", "1") == 0


async def until_deadline(gateway: RunningGateway) -> None:
    """Wait until the deadline of the last request that was queued has passed by the clock of Redis."""
    broker = gateway.gateway.broker
    [(_, fields)] = await broker.client.xrevrange(broker.keys.queue(), count=1)
    deadline = int(await broker.client.hget(broker.keys.request(fields[b"id"].decode()), "deadline") or 0)

    async def has_passed() -> bool:
        return 1000 * await unix_time(broker.client) > deadline + 1

    await until(has_passed)


async def test_a_deadline_that_passes_while_a_request_runs_keeps_what_was_produced(gateway: RunningGateway) -> None:
    async with gateway.worker(endless(tokens("A")[0])) as worker:
        async with gateway.stream(COMPLETIONS, {**STREAM, "timeout": 60}) as stream:
            first = await stream.next()
            await pass_deadline(gateway, worker.claimed[0].id)
            events = [first, *await stream.rest()]
        call = asyncio.create_task(gateway.complete(timeout=60))

        async def runs() -> bool:
            return len(worker.steps) == 2

        await until(runs)
        await pass_deadline(gateway, worker.claimed[1].id)
        reply = await call
    assert "".join(texts(events[:-1])).startswith("A")
    assert events[-1].data["error"]["code"] == "deadline_exceeded"
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    await reaches(gateway, "deadline", 2)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_deadline_that_passes_in_the_queue(gateway: RunningGateway, stream: bool) -> None:
    call = asyncio.create_task(
        keyed_events(gateway, {**STREAM, "timeout": 0.05}) if stream else gateway.complete(timeout=0.05)  # type: ignore[arg-type]
    )
    await reaches(gateway, "accepted", 1)
    await until_deadline(gateway)
    async with gateway.worker(endless(65)) as worker:
        answer: Any = await call
        assert worker.claimed == []
    if stream:
        assert [event.data["error"]["code"] for event in answer] == ["deadline_exceeded"]
    else:
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    assert await count(gateway, "deadline") == 1


async def test_a_deadline_holds_without_any_worker(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "OVERDUE_S", 0.1)
    reply = await gateway.complete(timeout=0.1)
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    assert await gateway.queued() == 0
    assert await gateway.gateway.broker.read_totals() == {"accepted": 1, "deadline": 1}
    await gateway.cancellations()
    assert await count(gateway, "cancelled") == 0


async def test_a_deadline_holds_while_redis_is_away(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gets its answer in time. The request gets its outcome when Redis answers again."""
    monkeypatch.setattr(buffer, "OVERDUE_S", 0.1)
    broker = gateway.gateway.broker
    real, calls = broker.expire, 0

    async def away(request_id: str) -> str:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise RedisConnectionError("away")
        return await real(request_id)

    monkeypatch.setattr(broker, "expire", away)
    reply = await gateway.complete(timeout=0.1)
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    await reaches(gateway, "deadline", 1)
    assert await broker.read_totals() == {"accepted": 1, "deadline": 1}


async def test_a_deadline_holds_when_the_worker_has_died(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer, "OVERDUE_S", 0.1)
    broker = gateway.gateway.broker
    call = asyncio.create_task(gateway.complete(timeout=1.5))
    await reaches(gateway, "accepted", 1)
    await broker.create_groups()
    [delivery] = await QueueReader(broker.client, MODEL, "dead").read(1, 0)
    assert await broker.claim(delivery, "dead", new_id()) is not None
    assert (await call).error["code"] == "deadline_exceeded"
    assert await broker.read_totals() == {"accepted": 1, "deadline": 1}
    async with gateway.worker(emit(tokens("A"))) as worker:
        assert (await gateway.complete()).status == 200
        assert len(worker.claimed) == 1


async def test_a_deadline_in_the_background_without_a_worker_counts_when_one_comes(gateway: RunningGateway) -> None:
    async with gateway.stream(COMPLETIONS, {**STREAM, "timeout": 0.05, "background": True}):
        await reaches(gateway, "accepted", 1)

    async def nobody() -> bool:
        return gateway.gateway.router.calls == 0

    await until(nobody)
    await until_deadline(gateway)
    assert await gateway.queued() == 1
    async with gateway.worker(endless(65)) as worker:
        await reaches(gateway, "deadline", 1)
        assert worker.claimed == []
    assert await gateway.gateway.broker.read_totals() == {"accepted": 1, "deadline": 1}
    assert await gateway.queued() == 0


async def _deadline_s(gateway: RunningGateway) -> float:
    """Return the seconds that the last request may take from its creation; 0 if it has no deadline."""
    broker = gateway.gateway.broker
    [(_, fields)] = await broker.client.xrevrange(broker.keys.queue(), count=1)
    key = broker.keys.request(fields[b"id"].decode())
    deadline, created = map(int, await broker.client.hmget(key, "deadline", "created"))
    return (deadline - created) / 1000 if deadline else 0


@pytest.mark.parametrize(
    ("body", "header", "expected"),
    [
        ({}, None, 50),
        ({"timeout": 7.5}, None, 7.5),
        ({}, "2.25", 2.25),
        ({"timeout": 100}, "2", 100),
        ({"timeout": None}, None, 50),
    ],
)
async def test_where_deadlines_come_from(start_gateway: Start, body: Any, header: Any, expected: float) -> None:
    gateway = await start_gateway(default_timeout_s=50, max_timeout_s=100)
    call = asyncio.create_task(gateway.post(COMPLETIONS, {**BODY, **body}, X_Request_Timeout=header))
    await reaches(gateway, "accepted", 1)
    assert await _deadline_s(gateway) == expected
    call.cancel()


async def test_deadlines_that_are_none(start_gateway: Start) -> None:
    gateway = await start_gateway(max_timeout_s=100)
    for value in (0, -1, 100.5, 1e308, "1", True, [], {}):
        reply = await gateway.complete(timeout=value)
        assert (reply.status, reply.error["param"]) == (400, "timeout"), value
    for text in ("0", "-1", "100.5", "x", "nan", "inf", "1e1", "0x1", "1_0", "1, 2"):
        reply = await gateway.post(COMPLETIONS, BODY, X_Request_Timeout=text)
        assert (reply.status, reply.error["param"]) == (400, "X-Request-Timeout"), text
        assert text in reply.error["message"]
    assert "--max-timeout-s" in reply.error["message"]


# --- classes, rates, ports --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "queue"),
    [
        ("interactive", "interactive"),
        ("standard", "standard"),
        ("batch", "batch"),
        (None, "standard"),
        (-1, "interactive"),
        (0, "standard"),
        (2**40, "batch"),
    ],
)
async def test_a_request_waits_in_the_queue_of_its_class(
    gateway: RunningGateway, given: str | int | None, queue: str
) -> None:
    call = asyncio.create_task(gateway.complete(priority=given))
    await reaches(gateway, "accepted", 1)
    broker = gateway.gateway.broker
    assert await broker.client.xlen(broker.keys.queue(queue)) == 1
    async with gateway.worker(emit(tokens("abc"))):
        assert (await call).status == 200


async def test_retry_after_follows_what_the_lane_did_through_any_gateway(start_gateway: Start) -> None:
    here, there = await start_gateway(max_queued_requests=1), await start_gateway()
    rate = here.gateway.worker_registry.rate = ServiceRate()
    rate.sample(asyncio.get_running_loop().time() - 20, {})
    async with there.worker(emit(tokens("a"))):
        assert [(await there.complete()).status for _ in range(4)] == [200] * 4

    async def measured() -> bool:
        return 45 <= rate.retry_after_s(100) <= 58  # a tenth of 100 requests, at 4 requests in 20 s

    await until(measured)
    waiting = asyncio.create_task(here.complete())
    await reaches(here, "accepted", 5)
    reply = await here.complete()
    assert (reply.status, reply.headers["retry-after"]) == (429, "1")
    waiting.cancel()


async def test_several_gateways_share_a_port(start_gateway: Start) -> None:
    first = await start_gateway(reuse_port=True)
    second = await start_gateway(reuse_port=True, port=first.port)
    second.gateway.draining = True

    async def both() -> bool:
        states = [(await first.get("/readyz")).json["problems"] for _ in range(8)]
        return len({"this gateway is shutting down" in problems for problems in states}) == 2

    await until(both)
    with pytest.raises(OSError, match=re.escape(str(first.port))):
        await start_gateway(port=first.port)


async def test_terms_change_nothing_of_what_is_generated(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("a"))) as worker:
        await gateway.complete(seed=1)
        await gateway.complete(seed=1, priority="batch", timeout=9)
    plain, other = worker.claimed
    assert plain.sampling == other.sampling
