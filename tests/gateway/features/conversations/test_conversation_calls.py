"""/v1/conversations through the OpenAI SDK: their items, and the responses that continue them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from quire.shared.protocol.keys import LaneKeys
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from tests.gateway.api.test_conversation import answering
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Script, endless
from tests.support.gateway.response_calls import TOOL, WHOLE, prompt
from tests.support.gateway.running import MODEL, RunningGateway, tokens, until

KEYS = LaneKeys(MODEL)
LONG = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day. " * 5}]
RULE = {"type": "compaction", "compact_threshold": 40}


def held(text: str, go_on: asyncio.Event, reason: str = "stop") -> Script:
    """Return a script that emits a text, and ends when the event is set. reason: of the end."""

    async def script(request: GenerationRequest) -> AsyncIterator[tuple[tuple[Delta, ...], Outcome | None]]:
        yield (Delta(0, tuple(tokens(text))),), None
        await go_on.wait()
        yield (Delta(0, (2,), reason),), Outcome(reason)

    return script


def texts(items: Any) -> list[tuple[str, str]]:
    return [(item.role, item.content[0].text) for item in items]


async def listed(client: Any, conversation: Any) -> list[Any]:
    return [item async for item in client.conversations.items.list(conversation.id, order="asc", limit=2)]


async def test_a_conversation_is_created_changed_and_deleted(gateway: RunningGateway, client: Any) -> None:
    items = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    conversation = await client.conversations.create(items=items, metadata={"a": "b"})
    assert (conversation.object, conversation.metadata) == ("conversation", {"a": "b"})
    assert conversation.id.startswith("conv_")
    assert await client.conversations.retrieve(conversation.id) == conversation
    changed = await client.conversations.update(conversation.id, metadata={"c": "d"})
    assert changed.metadata == (await client.conversations.retrieve(conversation.id)).metadata == {"c": "d"}
    added = await client.conversations.items.create(
        conversation.id, items=[{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "And you?"}]
    )
    assert texts(added.data) == [("assistant", "Hi"), ("user", "And you?")]
    all_items = await listed(client, conversation)
    assert texts(all_items) == [("developer", "Be kind."), ("user", "Hello"), *texts(added.data)]
    one = await client.conversations.items.retrieve(all_items[1].id, conversation_id=conversation.id)
    wrong = await gateway.get(f"/v1/conversations/{conversation.id}/items/{one.id}?include=all")
    assert (wrong.status, wrong.error["param"]) == (400, "include")
    assert one == all_items[1]
    after = await client.conversations.items.delete(one.id, conversation_id=conversation.id)
    assert after.id == conversation.id
    assert texts(await listed(client, conversation)) == [("developer", "Be kind."), *texts(added.data)]
    deleted = await client.conversations.delete(conversation.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (conversation.id, "conversation.deleted", True)
    for call in (client.conversations.retrieve(conversation.id), client.conversations.items.list(conversation.id)):
        with pytest.raises(openai.NotFoundError):
            await call
    held_bytes = await gateway.gateway.broker.client.hgetall(KEYS.held)
    assert {name: value for name, value in held_bytes.items() if name} == {}


@pytest.mark.parametrize("form", [str, lambda name: {"id": name}], ids=["id", "object"])
async def test_responses_continue_a_conversation(gateway: RunningGateway, client: Any, form: Any) -> None:
    conversation = await client.conversations.create(items=[{"role": "developer", "content": "Be kind."}])
    asked = {"model": MODEL, "conversation": form(conversation.id), "tools": [TOOL]}
    async with gateway.worker(answering(WHOLE)) as worker:
        first = await client.responses.create(input="Hello", **asked)
        assert first.conversation.id == conversation.id
        assert first.previous_response_id is None
        [call, other] = [item for item in first.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"} for item in (call, other)
        ]
        async with client.responses.stream(input=results, store=False, **asked) as stream:
            second = await stream.get_final_response()
    seen = prompt(worker.claimed[1])
    assert seen.startswith(prompt(worker.claimed[0]).split("<|im_start|>assistant")[0])
    assert "Köln" in seen
    assert seen.count("sunny") == 2
    items = await listed(client, conversation)
    assert [item.type for item in items] == [
        "message",
        "message",
        *[item.type for item in first.output],
        "function_call_output",
        "function_call_output",
        *[item.type for item in second.output],
    ]
    assert [item.id for item in items][2:6] == [item.id for item in first.output]
    with pytest.raises(openai.NotFoundError):  # it was not stored
        await client.responses.retrieve(second.id)


async def test_a_conversation_has_one_response_at_a_time(gateway: RunningGateway, client: Any) -> None:
    """Its items are added at the end, also if the response was deleted then, and exactly once for all readers."""
    conversation = await client.conversations.create()
    asked = {"model": MODEL, "input": "Hello", "conversation": conversation.id}
    go_on = asyncio.Event()
    async with gateway.worker(held("Hi", go_on)) as worker:
        running = await client.responses.create(background=True, **asked)
        for call in (
            client.responses.create(**asked),
            client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "x"}]),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await call
            assert (refused.value.code, refused.value.param) == ("conversation_locked", "conversation")
        assert await listed(client, conversation) == []
        await client.conversations.update(conversation.id, metadata={"still": "mine"})
        assert len(worker.claimed) == 1
        assert await gateway.gateway.broker.answered_conversations() == []  # there is nothing to read yet
        go_on.set()
        await until(lambda: _has_status(client, running.id, "completed"))
        await client.responses.delete(running.id)
        pages = await asyncio.gather(*(listed(client, conversation) for _ in range(8)))
    assert [texts(items) for items in pages] == [[("user", "Hello"), ("assistant", "Hi")]] * 8
    assert (await client.conversations.retrieve(conversation.id)).metadata == {"still": "mine"}


async def test_one_of_several_responses_at_once_gets_the_conversation(start_gateway: Start, folder: Any) -> None:
    """All gateways read the conversation before the first one has submitted: the submission decides."""
    gateways = [await start_gateway(model=str(folder)) for _ in range(2)]
    go_on = asyncio.Event()
    async with gateways[0].worker(held("Hi", go_on)) as worker, gateways[0].openai() as client:
        for _ in range(3):
            conversation: Any = await client.conversations.create()
            body = {"model": MODEL, "input": "Hello", "conversation": conversation.id, "background": True}
            replies = await asyncio.gather(*(gateways[at % 2].post("/v1/responses", body) for at in range(8)))
            assert sorted(reply.status for reply in replies) == [200] + [400] * 7
            refused = [reply.error["code"] for reply in replies if reply.status == 400]
            assert refused == ["conversation_locked"] * 7
        assert await gateways[0].accepted() == 3
        go_on.set()
        await until(lambda: _ended(client, conversation))
        assert len(worker.claimed) == 3


async def _ended(client: Any, conversation: Any) -> bool:
    return len(await listed(client, conversation)) == 2


async def _has_status(client: Any, name: str, status: str) -> bool:
    return bool((await client.responses.retrieve(name)).status == status)


@pytest.mark.parametrize("end", ["cancelled", "failed", "deleted", "left"])
async def test_a_response_without_an_answer_adds_nothing(gateway: RunningGateway, client: Any, end: str) -> None:
    conversation = await client.conversations.create()
    asked = {"model": MODEL, "input": "Hello", "conversation": conversation.id}
    go_on = asyncio.Event()
    async with gateway.worker(held("Hi", go_on, "error") if end == "failed" else endless(tokens("x")[0])):
        if end == "left":
            stream = await client.responses.create(stream=True, **asked)
            await anext(aiter(stream))
            await stream.close()
        else:
            response = await client.responses.create(background=True, **asked)
        if end == "cancelled":
            await client.responses.cancel(response.id)
        elif end == "deleted":
            await client.responses.delete(response.id)
        elif end == "failed":
            go_on.set()

        async def is_free() -> bool:
            items = [{"role": "user", "content": "Again"}]
            reply = await gateway.post(f"/v1/conversations/{conversation.id}/items", {"items": items})
            assert reply.status == 200 or reply.error["code"] == "conversation_locked"
            return reply.status == 200

        await until(is_free)
    assert texts(await listed(client, conversation)) == [("user", "Again")]


async def test_a_repeated_idempotency_key_is_one_turn(gateway: RunningGateway, client: Any) -> None:
    conversation = await client.conversations.create()
    asked = {"model": MODEL, "input": "Hello", "conversation": conversation.id}
    asked |= {"extra_headers": {"Idempotency-Key": "one"}, "context_management": [RULE]}
    go_on = asyncio.Event()
    async with gateway.worker(held("Hi", go_on)) as worker:
        first = asyncio.create_task(client.responses.create(**asked))
        await worker.claims(1)
        during = asyncio.create_task(client.responses.create(**asked))
        await asyncio.sleep(0.1)
        go_on.set()
        await client.conversations.items.create(conversation.id, items=LONG) if await first else None
        assert await first == await during == await client.responses.create(**asked)
    assert len(worker.claimed) == 1
    assert len(await listed(client, conversation)) == 4


async def test_a_change_whose_reply_was_lost_is_made_once(
    gateway: RunningGateway, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = await client.conversations.create()
    broker, is_lost = gateway.gateway.broker, True
    write = broker._write_conversation

    async def loses_the_first_reply(**given: Any) -> Any:
        nonlocal is_lost
        is_lost, was_lost = not is_lost, is_lost
        reply = await write(**given)
        if was_lost:
            raise RedisConnectionError("the reply was lost")
        return reply

    monkeypatch.setattr(broker, "_write_conversation", loses_the_first_reply)
    await client.conversations.items.create(conversation.id, items=LONG)
    items = await listed(client, conversation)
    assert len(items) == len(LONG)
    await client.conversations.items.delete(items[0].id, conversation_id=conversation.id)
    assert await listed(client, conversation) == items[1:]


async def test_any_gateway_adds_the_items_of_a_response(start_gateway: Start, folder: Any) -> None:
    """A gateway that nobody asks adds them as well, before Redis forgets the response."""
    one, other = [await start_gateway(model=str(folder)) for _ in range(2)]
    redis = one.gateway.broker.client
    corrupt = [f"{at:032x}" for at in range(8)]
    for name in corrupt:
        await redis.hset(KEYS.kept_conversation(name), mapping={"version": "1", "created": "x", "items": b"x"})
        await redis.sadd(KEYS.answering, name)
    async with one.openai() as here, other.openai() as there, one.worker(answering("Hi")):
        conversation: Any = await here.conversations.create()
        await there.responses.create(model=MODEL, input="Hello", conversation=conversation.id)
        assert texts(await listed(here, conversation)) == [("user", "Hello"), ("assistant", "Hi")]
        await here.responses.create(model=MODEL, input="Bye", conversation=conversation.id)

        async def is_added() -> bool:
            return int(await redis.scard(KEYS.answering)) == len(corrupt)

        await until(is_added)
        assert len(await listed(there, conversation)) == 4
        keys = KEYS.kept_conversation(conversation.id.removeprefix("conv_"))
        assert 0 < await redis.ttl(keys) <= one.settings.response_retention_s


async def test_conversations_take_memory_of_their_key(start_gateway: Start, folder: Any) -> None:
    gateway = await start_gateway(model=str(folder), max_stored_bytes=6000, max_conversation_bytes=1000)
    async with gateway.openai() as client:
        kept = [await client.conversations.create() for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as full:
            await client.conversations.create()
        assert full.value.code == "stored_bytes_full"
        await client.conversations.delete(kept[0].id)
        kept[0] = await client.conversations.create()
        with pytest.raises(openai.BadRequestError, match="max-conversation-bytes"):
            await client.conversations.items.create(kept[1].id, items=[{"role": "user", "content": "x" * 1000}])
        assert int(await gateway.gateway.broker.client.hget(KEYS.held, "") or 0) < 6000
        await client.conversations.delete(kept[0].id)
        # An answer may pass the bounds. Then the conversation can still be changed, unless it takes more memory.
        async with gateway.worker(answering("Hi" * 400)):
            asked = {"model": MODEL, "input": "Hello", "conversation": kept[1].id}
            await client.responses.create(store=False, **asked)
        first, *rest = await listed(client, kept[1])
        await client.conversations.update(kept[1].id, metadata={})
        await client.conversations.items.delete(first.id, conversation_id=kept[1].id)
        assert await listed(client, kept[1]) == rest


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/conversations", {"items": [{"role": "user", "content": "x"}] * 21}, 400, "items"),
        ("/v1/conversations", {"items": [{"type": "item_reference", "id": "x"}]}, 400, "items[0].type"),
        ("/v1/conversations", {"items": [{"type": "web_search_call"}]}, 400, "items[0].type"),
        ("/v1/conversations", {"title": "x"}, 400, "title"),
        ("/v1/conversations/{}/items", {}, 400, "items"),
        ("/v1/conversations/{}", {"metadata": {"a": 1}}, 400, "metadata.a"),
        ("/v1/conversations/conv_" + "0" * 32, {"metadata": {}}, 404, "conversation"),
        ("/v1/responses", {"conversation": "conv_" + "0" * 32}, 404, "conversation"),
        ("/v1/responses", {"conversation": 5}, 400, "conversation"),
        ("/v1/responses", {"conversation": {"id": "{}", "x": 1}}, 400, "conversation.x"),
        ("/v1/responses", {"conversation": "{}", "previous_response_id": "resp_x"}, 400, "conversation"),
    ],
)
async def test_refusals_name_what_is_wrong(
    gateway: RunningGateway, client: Any, path: str, body: Any, status: int, param: str
) -> None:
    conversation = await client.conversations.create()
    body = {"model": MODEL, "input": "Hello", **body} if path == "/v1/responses" else body
    reply = await gateway.post(path.format(conversation.id), body)
    assert (reply.status, reply.error["param"]) == (status, param), reply.error
    assert await gateway.accepted() == 0
