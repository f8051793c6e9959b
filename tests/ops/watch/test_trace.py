"""`quire trace`: the phases of a request, in the order in which the scripts of the protocol made them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from quire.ops.watch.trace import Life, read_life, shown
from quire.shared.protocol.broker import Admission, Broker, Claim, QueueBounds, new_id
from quire.shared.protocol.broker.affinity import AffinityVerbs
from quire.shared.protocol.keys import REGISTRY_LANE, RegistryKeys
from quire.shared.protocol.messages import WorkerCard
from quire.shared.redis.clients import command_client
from tests.support.broker_calls import go_stale, step, take
from tests.support.commands import quire, refusal

ID = "0123456789abcdef0123456789abcdef"
TERMS = Admission(gateway="g", cost=30, prompt_tokens=10, bounds=QueueBounds(10, 1000))


@pytest.fixture
async def broker(redis_url: str) -> AsyncIterator[Broker]:
    client = command_client(redis_url, "lane")
    yield Broker(client, "lane")
    await client.aclose()


async def beat(broker: Broker, name: str) -> None:
    card = WorkerCard(name, name, "lane", 100, 8, 100, (), 16, 10, 5, 1, 0, 0)
    await broker.beat(card)


async def life_of(broker: Broker) -> Life:
    life = await read_life(broker, ID)
    assert life is not None
    return life


async def test_the_life_of_a_request_with_a_recovery(broker: Broker) -> None:
    await broker.submit(ID, b"body", TERMS)
    assert "none of lane has sent a heartbeat" in (await life_of(broker)).waits_for
    await beat(broker, "w")
    assert (await life_of(broker)).waits_for == "a free row: 1 requests wait for 1 workers"
    claim = await broker.claim(await take(broker), "w", new_id())
    assert claim is not None
    assert (await life_of(broker)).waits_for == "its first token: w computes the prompt"
    await broker.commit_step("w", [step(claim, 0, (1, 2))])
    assert (await life_of(broker)).waits_for == "its next token from w"
    await go_stale(broker, ID)
    assert "w has not renewed its lease for 1 min" in (await life_of(broker)).waits_for
    second = await take_over_of(broker)
    await broker.commit_step("w2", [step(second, 2, (3,), "stop")])
    life = await life_of(broker)
    assert [(event.event, event.tokens, event.worker) for event in life.events] == [
        ("accepted", 0, ""),
        ("claimed", 0, "w"),
        ("first token", 0, ""),
        ("claimed", 2, "w2"),
        ("ended", 3, ""),
    ]
    times = [event.at_ms for event in life.events]
    assert times == sorted(times)
    assert sum(life.times_ms.values()) == times[-1] - times[0]
    assert life.events[3].note == "recovery: w had stopped renewing its lease"
    assert (life.recoveries, life.steps, life.tokens, life.prompt_tokens, life.max_tokens) == (1, 2, 3, 10, 20)
    assert (life.state, life.outcome, life.waits_for) == ("done", "stop", "")
    assert "It was recovered once" in "\n".join(shown(life))


async def take_over_of(broker: Broker) -> Claim:
    [delivery] = await broker.reclaim("w2", 30_000, 10)
    claim = await broker.claim(delivery, "w2", new_id(), new_id())
    assert claim is not None
    return claim


async def test_the_life_of_a_request_that_is_handed_back_and_parked(broker: Broker) -> None:
    await beat(broker, "w")
    await broker.submit(ID, b"body", TERMS)
    claim = await broker.claim(await take(broker), "w", new_id())
    assert claim is not None
    await broker.commit_step("w", [step(claim, 0, (1,))])
    assert await broker.release([(ID, claim.attempt)]) == 1
    assert "1 requests wait" in (await life_of(broker)).waits_for
    await broker.park(ID, retention_s=3600)
    life = await life_of(broker)
    assert f"`quire parking unpark --id {ID}`; it ends in " in life.waits_for
    await broker.unpark(ID)
    await broker.cancel(ID)
    life = await life_of(broker)
    events = [event.event for event in life.events]
    assert events == ["accepted", "claimed", "first token", "released", "parked", "unparked", "ended"]
    assert life.events[3].note == "its worker stopped, and handed it back"
    assert (life.outcome, life.recoveries) == ("cancelled", 0)


async def test_a_request_that_is_left_to_the_holder_of_its_prefix_says_so(broker: Broker) -> None:
    await beat(broker, "w")
    terms = TERMS._replace(prefixes=("0" * 32,), left_ms=10_000)
    await broker.submit(new_id(), b"body", terms)
    first = await broker.claim(await take(broker), "w", "w-attempt", "w")
    assert first is not None
    assert (await broker.submit(ID, b"body", terms)).is_left
    assert (await life_of(broker)).waits_for == "the worker w, which holds a prefix of it"
    assert await AffinityVerbs(broker.client, "lane").withdraw([ID]) == 1
    await beat(broker, "w2")
    claim = await broker.claim(await take(broker, "w2"), "w2", new_id())
    assert claim is not None
    assert (await life_of(broker)).events[1].note.endswith(", w holds a prefix of it and did not take it in time")


async def test_a_history_stays_small_and_its_newest_events_can_be_read(broker: Broker) -> None:
    await broker.submit(ID, b"body", TERMS)
    for _ in range(60):
        await broker.park(ID, retention_s=3600)
        await broker.unpark(ID)
    history = await broker.client.hget(broker.keys.request(ID), "history")
    assert history is not None
    assert len(history) == 2048
    life = await life_of(broker)
    assert [event.event for event in life.events[-2:]] == ["parked", "unparked"]


async def test_corrupt_fields_do_not_stop_it(broker: Broker) -> None:
    await broker.submit(ID, b"body", TERMS)
    wrong = dict.fromkeys(("created", "history", "emitted", "user", "cost", "affinity", "first_at", "queue"), "\x00x")
    await broker.client.hset(broker.keys.request(ID), mapping=wrong)
    await broker.client.xadd(broker.keys.output(ID), {"item": b"\xff"})
    assert shown(await life_of(broker))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["workers", "load", "parked"])
async def test_an_error_that_redis_answers_is_shown(broker: Broker, redis_url: str, name: str) -> None:
    await broker.submit(ID, b"body", TERMS)
    await broker.park(ID, retention_s=3600)
    await broker.client.set(getattr(broker.keys, name), "of another type")
    said = refusal(1, "trace", ID, "--served-model-name", "lane", "--redis-url", redis_url)
    assert "Redis refused a command: WRONGTYPE" in said


@pytest.mark.slow
async def test_the_command_finds_the_model_of_an_id_as_an_answer_has_it(broker: Broker, redis_url: str) -> None:
    await broker.submit(ID, b"body", TERMS)
    other = ("trace", f"chatcmpl-{ID}", "--redis-url", redis_url)
    said = refusal(1, *other)
    assert f"no model has the request {ID}" in said
    assert "--served-model-name" in said
    client = command_client(redis_url, REGISTRY_LANE)
    await client.zadd(RegistryKeys().models, {"lane": 1} | {f"other-{number}": 2 + number for number in range(9)})
    await client.aclose()
    done = quire(*other, "--json")
    assert json.loads(done.stdout)["model"] == "lane"
    assert "accepted" in quire(*other[:2], "--served-model-name", "lane", *other[2:]).stdout
    assert "is no id of a request; give the id of an answer" in refusal(1, "trace", "x")
    assert "no Redis at redis://127.0.0.1:1" in refusal(1, "trace", ID, "--redis-url", "redis://127.0.0.1:1")
