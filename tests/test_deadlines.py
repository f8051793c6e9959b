"""Calls with deadlines at an engine and the real scripts, in simulated time: what is met with admission and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from quire.shared.protocol.pace import Pace
from quire.worker.queue.estimates import EstimateErrors, Started
from tests.support.deadline_simulation import (
    ALONE_S,
    ANSWER,
    PROMPT,
    STEP_S,
    Call,
    Result,
    Simulation,
    capacity,
    poisson,
)
from tests.support.fair_model import Share
from tests.support.redis_server import RedisServer, running_redis

FLOOD, LATE = Share("acme/flood"), Share("zoo/late")
ROWS = 8


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


def serve(server: RedisServer, calls: list[Call], is_on: bool, noise: float = 0.3) -> Result:
    with closing(Simulation(server, ROWS, is_on, noise)) as simulation:
        return simulation.run(calls)


@pytest.mark.slow
def test_at_overload_more_calls_are_met_and_fewer_are_computed_for_nothing(redis_server: RedisServer) -> None:
    calls = poisson(1.5 * capacity(ROWS), 40, seed=1, timeouts=(2, 4), is_exact=True)
    with_it, without = (serve(redis_server, calls, is_on) for is_on in (True, False))
    assert with_it["met"] >= 1.3 * without["met"]
    # Hardly any work is wasted, and most of what cannot be met is told at once.
    assert with_it["late"] <= 0.05 * with_it["met"]
    assert with_it["refused"] >= 3 * with_it["dropped"]
    assert all(error.wait_ms + error.service_ms > 0 for error in with_it.refusals)
    # Lengths that only the model decides are met less often, but never worse than without.
    unknown = [Call(one.at, one.prompt, one.answer, one.timeout_s) for one in calls]
    assert serve(redis_server, unknown, True)["met"] >= 1.1 * without["met"]


@pytest.mark.slow
def test_below_the_capacity_nothing_changes(redis_server: RedisServer) -> None:
    calls = poisson(0.7 * capacity(ROWS), 30, seed=2, timeouts=(3, 6), is_exact=True)
    with_it, without = (serve(redis_server, calls, is_on) for is_on in (True, False))
    assert (with_it["refused"], with_it["dropped"]) == (0, 0)
    assert with_it.counts == without.counts


@pytest.mark.slow
def test_a_flood_of_one_tenant_takes_no_deadline_of_another(redis_server: RedisServer) -> None:
    calls = poisson(3 * capacity(ROWS), 40, seed=3, share=FLOOD, timeouts=(15, 20), is_exact=True)
    calls += poisson(0.2 * capacity(ROWS), 40, seed=4, share=LATE, timeouts=(3, 4), is_exact=True)
    result = serve(redis_server, calls, True)
    late = {what: count for (tenant, what), count in result.counts.items() if tenant == LATE.tenant}
    assert late["met"] >= 0.97 * sum(late.values())
    assert result.counts[FLOOD.tenant, "refused"] > 0


def test_the_pace_is_what_steps_and_ends_take(redis_server: RedisServer) -> None:
    with closing(Simulation(redis_server, ROWS)) as simulation:
        assert simulation.engine.pace.read().request_us == 0
        simulation.run([Call(0, PROMPT, ANSWER, 10**6) for _ in range(10 * ROWS)])
        learnt = simulation.engine.pace.read()
        assert learnt.token_us == pytest.approx(1.08e6 * STEP_S, rel=0.1)
        assert learnt.request_us == pytest.approx(1e6 / capacity(ROWS), rel=0.1)
        assert (learnt.rows, learnt.answer, learnt.charge) == (ROWS, ANSWER, PROMPT + 2 * ANSWER)
        # A worker that has not been full for a minute knows no more how fast a queue gets shorter.
        simulation.now += 61
        assert simulation.engine.pace.read().request_us == 0
        simulation.run([Call(0, PROMPT, ANSWER, ALONE_S)])
        assert simulation.result.refusals == []


@pytest.mark.parametrize(("actual_s", "factor"), [(1.0, 1.0), (1.5, 1.5), (0.8, 0.8), (100.0, 4.0)])
def test_the_pace_is_corrected_by_how_long_requests_run(actual_s: float, factor: float) -> None:
    pace, errors = Pace(prompt_us=1000, token_us=9000), EstimateErrors()
    assert errors.corrected(pace) == pace
    for _ in range(500):
        errors.note(Started(0.0, 100, pace), 100, pace, now=actual_s)
    assert errors.corrected(pace).token_us == pytest.approx(9000 * factor, rel=0.01)
    assert errors.ratios.count == 500
    # Half of the requests take twice as long: the pace covers those.
    for index in range(1000):
        errors.note(Started(0.0, 100, pace), 100, pace, now=1.0 + index % 2)
    assert errors.corrected(pace).token_us == pytest.approx(18_000, rel=0.05)
    # What is unknown teaches nothing.
    errors.note(Started(0.0, 100, Pace()), 100, Pace(), now=1.0)
    assert errors.ratios.count == 1500
