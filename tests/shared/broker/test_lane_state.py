from __future__ import annotations

from redis.asyncio import Redis

from quire.shared.broker import Broker
from quire.shared.broker.lane_state import read_lane
from quire.shared.messages import OUTCOMES
from tests.support.broker_calls import KEYS, start, step, submit, take


async def test_a_lane_that_nothing_was_sent_to_is_empty(broker: Broker) -> None:
    state = await read_lane(broker)
    assert (state.accepted, state.running, state.dead) == (0, 0, 0)
    assert state.ended == dict.fromkeys(OUTCOMES, 0)
    assert set(state.waiting.values()) == set(state.tokens.values()) == set(state.oldest_s.values()) == {0}


async def test_accepted_is_the_sum_of_the_ended_waiting_running_and_parked(broker: Broker) -> None:
    ended = await start(broker, "ended")
    await broker.commit_step("w", [step(ended, 0, (1,), "stop")])
    await start(broker, "running")
    await submit(broker, "parked")
    await broker.park("parked")
    await submit(broker, "waiting", cost=7)
    state = await read_lane(broker)
    assert state.accepted == 4
    assert (state.ended["stop"], state.waiting["standard"], state.running, state.parked) == (1, 1, 1, 1)
    assert state.tokens == {"interactive": 0, "standard": 7, "batch": 0}


async def test_the_oldest_entry_is_the_first_that_no_worker_has_read(broker: Broker, client: Redis) -> None:
    seconds, _ = await client.time()
    age_s = 100
    await client.xadd(KEYS.queue("batch"), {"id": "old", "cost": 1}, id=f"{1000 * (seconds - age_s)}-0")
    assert age_s <= (await read_lane(broker)).oldest_s["batch"] < age_s + 10
    await take(broker)  # creates the group and reads the entry
    assert (await read_lane(broker)).oldest_s["batch"] == 0


async def test_requests_in_lines_are_counted_as_waiting(broker: Broker, client: Redis) -> None:
    await start(broker, "running")
    for index in range(2):
        await submit(broker, f"waiting{index}", cost=7)
    assert await client.xlen(KEYS.queue("waiting:standard")) == 2
    state = await read_lane(broker)
    assert (state.accepted, state.waiting["standard"], state.running) == (3, 2, 1)
    assert state.tenants == {"interactive": 0, "standard": 1, "batch": 0}
    seconds, _ = await client.time()
    await client.delete(KEYS.queue("waiting:batch"))
    await client.xadd(KEYS.queue("waiting:batch"), {"id": "old", "cost": 1}, id=f"{1000 * (seconds - 100)}-0")
    assert 100 <= (await read_lane(broker)).oldest_s["batch"] < 110


async def test_a_request_that_waited_alone_keeps_its_age(broker: Broker, client: Redis) -> None:
    await submit(broker, "first")
    [(entry, _)] = await client.xrange(KEYS.queue())
    await submit(broker, "second")
    assert entry in [one for one, _ in await client.xrange(KEYS.queue("waiting:standard"))]
