"""A client resumes a stream at any event and any gateway, and gets the missing events, live to the end."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from quire.gateway.api import resume as joining
from quire.gateway.model.served_model import ServedModel, load_model
from quire.gateway.stream.sse import BEGINNING, EventId
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Script, Steps, emit, endless
from tests.support.gateway.running import MODEL, Event, RunningGateway, chat_body, tokens, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# The text has an emoji of several tokens in the middle, and ends with a prefix of the stop string.
FIRST, SECOND = tokens("a😀b <sto"), tokens("two <s")


def body(path: str, **parameters: Any) -> dict[str, Any]:
    given_ = chat_body() if path == CHAT else {"model": MODEL, "prompt": "Hello"}
    return {**given_, "stream": True, "stream_options": {"include_usage": True}, "stop": "<stop>", **parameters}


def halting(at: int, go_on: asyncio.Event) -> Script:
    """Return a script that emits both choices token by token, the second one shorter, and halts before step `at`."""

    async def script(request: GenerationRequest) -> Steps:
        n = request.sampling.n
        for index, token in enumerate(FIRST):
            if index == at:
                await go_on.wait()
            last = index == len(FIRST) - 1
            deltas = [Delta(0, (token,), "length" if last else None)]
            if n == 2 and index < len(SECOND):
                deltas.append(Delta(1, (SECOND[index],), "length" if index == len(SECOND) - 1 else None))
            yield tuple(deltas), Outcome("length") if last else None

    return script


def stream_path(path: str, event: Event) -> str:
    return f"{path}/{event.data['id']}/stream"


async def resumed(gateway: RunningGateway, path: str, after: EventId | str, by: str = "header") -> list[Event]:
    given_ = {"Last_Event_ID": str(after)} if by == "header" else {}
    query = f"?starting_after={after}" if by == "query" else ""
    async with gateway.stream(path + query, **given_) as stream:
        assert stream.response.status == 200, await stream.response.text()
        return await stream.rest()


async def test_what_cannot_be_had_gives_no_hint_why(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("abc"))):
        events = await gateway.events(CHAT, chat_body(stream=True))
    public = events[0].data["id"]
    bare = public.removeprefix("chatcmpl-")
    wrong = [
        f"{CHAT}/chatcmpl-{'0' * 32}/stream",
        f"{CHAT}/{bare}/stream",
        f"{CHAT}/cmpl-{bare}/stream",
        f"{CHAT}/chatcmpl-{bare.upper()}x/stream",
        f"{CHAT}/{public}-1/stream",
        f"{CHAT}/chatcmpl-{'%C3%A9' * 16}/stream",
        f"{CHAT}/{public}%0a/stream",
        f"{COMPLETIONS}/{public}/stream",
        f"{COMPLETIONS}/cmpl-{bare}/stream",
    ]
    replies = [await gateway.get(path) for path in wrong]
    keys = gateway.gateway.broker.keys
    await gateway.gateway.broker.client.delete(keys.request(bare), keys.output(bare))
    replies.append(await gateway.get(f"{CHAT}/{public}/stream"))
    assert {reply.status for reply in replies} == {404}
    assert len({reply.body for reply in replies}) == 1
    assert replies[0].error["code"] == "not_found"


WRONG = ("", "x", "-1", "01", "1.0", "1.", "1.1.1", "1e3", "\u0663", "9" * 11, "4", "3.3", "3.99", "1000000000.1")


async def test_an_event_id_that_is_none_or_not_there_is_named(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("abc"))):
        events = await gateway.events(COMPLETIONS, {**body(COMPLETIONS), "stream_options": None})
    assert events[-1].id == EventId(3, 2)
    path = stream_path(COMPLETIONS, events[0])
    for wrong in WRONG:
        for query, headers in ((f"?starting_after={wrong}", {}), ("", {"Last_Event_ID": wrong})):
            async with gateway.stream(path + query, **headers) as stream:
                assert stream.response.status == 400, wrong
                error = (await stream.response.json())["error"]
            assert error["code"] == "invalid_event_id"
            assert wrong in error["message"] or not wrong.isascii()
            if wrong in ("4", "1000000000.1"):
                assert "its last one is 3." in error["message"]
    async with gateway.stream(f"{path}?starting_after=1&starting_after=2") as stream:
        assert "2 values" in (await stream.response.json())["error"]["message"]
    # A gateway that ignored a misspelt parameter would send the whole stream again.
    async with gateway.stream(f"{path}?start_after=1") as stream:
        error = (await stream.response.json())["error"]
    assert (stream.response.status, error["code"], error["param"]) == (400, "unknown_parameter", "start_after")


async def test_a_place_that_a_running_stream_has_not_reached_is_refused_after_a_while(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request keeps running for its client on another gateway."""
    monkeypatch.setattr("quire.gateway.api.resume.LOST_TAIL_S", 0.3)
    gateway, there = await start_gateway(), await start_gateway()
    go_on = asyncio.Event()
    async with gateway.worker(halting(3, go_on)), gateway.stream(COMPLETIONS, body(COMPLETIONS)) as stream:
        begun = [await stream.next()]
        target = stream_path(COMPLETIONS, begun[0])

        async def logged() -> bool:
            broker = gateway.gateway.broker
            key = broker.keys.request(begun[0].data["id"].removeprefix("cmpl-"))
            return await broker.client.hget(key, "emitted") == b"3"

        await until(logged)
        for place in ("3.1", "4", "1000000000.1"):
            async with there.stream(target, Last_Event_ID=place) as other:
                assert other.response.status == 400
                assert place in (await other.response.json())["error"]["message"]
        await there.cancellations()
        go_on.set()
        assert (await stream.rest())[-1].data == "[DONE]"


async def test_a_place_that_redis_has_lost_is_waited_for(start_gateway: Start) -> None:
    """The client has more tokens than the log, until a worker has generated the lost tokens again."""
    gateway, there = await start_gateway(), await start_gateway()
    go_on = asyncio.Event()
    async with gateway.worker(halting(3, go_on)), gateway.stream(COMPLETIONS, body(COMPLETIONS)) as stream:
        first = await stream.next()

        async def resume() -> list[Event]:
            async with there.stream(f"{stream_path(COMPLETIONS, first)}?starting_after=5") as other:
                assert other.response.status == 200, await other.response.text()
                return await other.rest()

        resumed = asyncio.create_task(resume())

        async def has_looked() -> bool:
            return there.gateway.router.stats.log_reads >= 1

        await until(has_looked)
        assert not resumed.done()
        go_on.set()
        whole = [first, *await stream.rest()]
        rest = await resumed
    assert rest == [event for event in whole if event.id > EventId(5)]
    assert rest[-1].data == "[DONE]"


@pytest.mark.slow
async def test_a_place_that_redis_has_lost_is_looked_for_until_the_end_of_the_wait(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway reads the log of a silent request less and less often, but a last time at the end of the wait."""
    monkeypatch.setattr("quire.gateway.api.resume.LOST_TAIL_S", 3.0)
    gateway, there = await start_gateway(), await start_gateway()
    go_on = asyncio.Event()
    async with gateway.worker(halting(3, go_on)), gateway.stream(COMPLETIONS, body(COMPLETIONS)) as stream:
        first = await stream.next()

        async def resume() -> None:
            async with there.stream(f"{stream_path(COMPLETIONS, first)}?starting_after=5") as other:
                assert other.response.status == 200, await other.response.text()
                await other.rest()

        resumed = asyncio.create_task(resume())

        async def is_patient() -> bool:  # the next read of the log is due after the end of the wait
            return any(cursor.silence_s >= 2 for one in there.gateway.router._open for cursor in one.cursors.values())

        await until(is_patient)
        go_on.set()
        await resumed
        await stream.rest()


async def test_the_header_counts_more_than_the_query(gateway: RunningGateway) -> None:
    """A browser that reconnects sends the same query and a new Last-Event-ID header."""
    async with gateway.worker(emit(tokens("abc"))):
        whole = await gateway.events(COMPLETIONS, body(COMPLETIONS))
    target = stream_path(COMPLETIONS, whole[0])
    async with gateway.stream(f"{target}?starting_after=1", Last_Event_ID="2") as stream:
        assert await stream.rest() == whole[2:]


async def test_calls_with_several_prompts_cannot_be_taken_up_again(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("abc"))):
        events = await gateway.events(COMPLETIONS, body(COMPLETIONS, prompt=["a", "b"]))
    reply = await gateway.get(stream_path(COMPLETIONS, events[0]))
    assert (reply.status, reply.error["code"]) == (400, "several_prompts")
    assert "2 prompts" in reply.error["message"]


# --- who cancels, and when --------------------------------------------------------------------------------------------


async def test_a_request_is_cancelled_when_its_last_listener_leaves(gateway: RunningGateway) -> None:
    async with gateway.worker(endless(65)) as worker:
        async with gateway.stream(COMPLETIONS, body(COMPLETIONS)) as first:
            target = stream_path(COMPLETIONS, await first.next())
            second = gateway.stream(target)
            stream = await second.__aenter__()
            await stream.next()
        steps = worker.steps.copy()
        await stream.take(200)  # far more than two steps after the first client left
        assert worker.cancelled.empty(), steps
        await second.__aexit__(None, None, None)
        await asyncio.wait_for(worker.cancelled.get(), 60)


async def test_a_gateway_leaves_alone_what_another_one_has_taken_over(start_gateway: Start) -> None:
    here, there = await start_gateway(), await start_gateway()
    async with here.worker(endless(65)) as worker:
        async with here.stream(COMPLETIONS, body(COMPLETIONS)) as first:
            target = stream_path(COMPLETIONS, await first.next())
            second = there.stream(target)
            stream = await second.__aenter__()
            await stream.next()
            await first.take(3)  # from the log: the worker publishes to the other gateway by now

        async def left() -> bool:
            return here.gateway.router.calls == 0

        await until(left)
        await here.cancellations()
        await stream.take(200)
        assert worker.cancelled.empty()
        await second.__aexit__(None, None, None)
        await asyncio.wait_for(worker.cancelled.get(), 60)


async def test_who_leaves_one_gateway_takes_nothing_from_who_listens_at_another(start_gateway: Start) -> None:
    here, there = await start_gateway(), await start_gateway()
    async with here.worker(endless(65)) as worker:
        async with here.stream(COMPLETIONS, body(COMPLETIONS)) as first:
            target = stream_path(COMPLETIONS, await first.next())
            async with there.stream(target) as stream:
                await stream.next()

            async def left() -> bool:
                return there.gateway.router.calls == 0

            await until(left)
            await there.cancellations()

            async def heard() -> bool:
                """Return whether this gateway receives published items again, and no longer reads the log."""
                repairs, frames = here.gateway.router.stats.repairs, here.gateway.subscription.frames

                async def have_come() -> bool:
                    return here.gateway.subscription.frames > frames + 50

                await until(have_come)
                return here.gateway.router.stats.repairs == repairs

            await until(heard)
            await first.take(200)
            assert worker.cancelled.empty()
        await asyncio.wait_for(worker.cancelled.get(), 60)


async def test_a_gateway_that_died_does_not_count_as_a_listener(gateway: RunningGateway) -> None:
    broker = gateway.gateway.broker
    async with gateway.worker(endless(65)) as worker:
        async with gateway.stream(COMPLETIONS, body(COMPLETIONS)) as first:
            request_id = (await first.next()).data["id"].removeprefix("cmpl-")
            await broker.attach(request_id, "dead")  # without a lease
        await asyncio.wait_for(worker.cancelled.get(), 60)


async def test_who_leaves_while_it_comes_back_does_not_keep_a_request_alive(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first client leaves while the gateway looks up the request for a second client. The second then leaves."""
    look_up, reached, go_on = joining.look_up, asyncio.Event(), asyncio.Event()

    async def delayed(*arguments: Any) -> Any:
        reached.set()
        await go_on.wait()
        return await look_up(*arguments)

    monkeypatch.setattr(joining, "look_up", delayed)

    def calls(count: int) -> Any:
        async def open_() -> bool:
            return gateway.gateway.router.calls == count

        return until(open_)

    async with gateway.worker(endless(65)) as worker:
        async with gateway.stream(COMPLETIONS, body(COMPLETIONS)) as first:
            target = stream_path(COMPLETIONS, await first.next())
            second = asyncio.create_task(gateway.get(target))
            await reached.wait()
        await calls(1)
        await gateway.cancellations()
        assert worker.cancelled.empty()
        second.cancel()
        await asyncio.wait_for(worker.cancelled.get(), 60)
        await calls(0)


async def test_a_wrong_place_named_last_does_not_keep_a_request_alive(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first client leaves while the gateway refuses a second client."""
    monkeypatch.setattr("quire.gateway.api.resume.LOST_TAIL_S", 0.5)
    async with gateway.worker(endless(65)) as worker:
        async with gateway.stream(COMPLETIONS, body(COMPLETIONS)) as first:
            target = stream_path(COMPLETIONS, await first.next())
            call = asyncio.create_task(gateway.get(target + "?starting_after=1000000000"))
            await asyncio.sleep(0)
        assert (await call).status == 400
        await asyncio.wait_for(worker.cancelled.get(), 60)


@pytest.mark.slow
async def test_when_redis_fails_while_a_stream_is_taken_up_nothing_is_cancelled(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = asyncio.Event()
    async with gateway.worker(halting(2, go_on)) as worker:
        async with gateway.stream(COMPLETIONS, body(COMPLETIONS, background=True)) as first:
            target = stream_path(COMPLETIONS, await first.next())
        real = gateway.gateway.broker.attach

        async def unlucky(*arguments: Any) -> None:
            await real(*arguments)
            raise RedisConnectionError("the reply was lost")

        with monkeypatch.context() as patch:
            patch.setattr("quire.gateway.admission.retry.RETRY_S", 0.2)
            patch.setattr(gateway.gateway.broker, "attach", unlucky)
            reply = await gateway.get(target)
        assert (reply.status, reply.error["code"]) == (503, "broker_unavailable")
        go_on.set()
        assert (await resumed(gateway, target, BEGINNING))[-1].data == "[DONE]"
        assert worker.cancelled.empty()


async def test_only_streams_may_run_in_the_background(gateway: RunningGateway) -> None:
    reply = await gateway.chat(background=True)
    assert (reply.status, reply.error["param"]) == (400, "background")


async def test_a_log_that_is_gone_while_its_request_is_done_is_an_error_and_no_wait(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("abc"))):
        whole = await gateway.events(COMPLETIONS, body(COMPLETIONS))
    broker = gateway.gateway.broker
    await broker.client.delete(broker.keys.output(whole[0].data["id"].removeprefix("cmpl-")))
    [event] = await resumed(gateway, stream_path(COMPLETIONS, whole[0]), BEGINNING)
    assert "lost" in event.data["error"]["message"]


# --- ids do not depend on how tokens came -----------------------------------------------------------------------------


@cache
def model(folder: Path) -> ServedModel:
    return load_model(str(folder), MODEL)
