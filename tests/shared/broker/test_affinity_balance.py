"""Prefix affinity with 64 workers in simulated time: it shortens prefills, and no worker gets much more than others."""

from __future__ import annotations

import statistics

import pytest

from quire.shared.protocol.broker import Broker
from quire.shared.redis.clients import command_client
from tests.support.affinity_simulation import Simulation
from tests.support.redis_server import RedisServer


@pytest.mark.slow
@pytest.mark.parametrize("hot", [pytest.param(0.5, marks=pytest.mark.soak), 1.0])
async def test_no_worker_of_64_has_more_than_a_little_above_the_mean(redis_server: RedisServer, hot: float) -> None:
    """hot: share of the conversations that begin with the same instructions."""
    first_token_s = {}
    for is_affine in (False, True):
        with redis_server.client() as plain:
            plain.flushall()
        client = command_client(redis_server.url)
        simulation = Simulation(Broker(client, "lane"), workers=64, rows=8, is_affine=is_affine)
        await simulation.begin()
        result = await simulation.run(requests=6000, rate=60, hot=hot)
        await client.aclose()
        first_token_s[is_affine] = statistics.mean(result.first_token_s)
        assert max(result.spread) <= 1.3, result.spread
        if is_affine:
            assert result.placements["holder"] > 2 * result.placements["busy"]
    assert first_token_s[True] <= 0.5 * first_token_s[False]
