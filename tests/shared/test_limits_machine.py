"""Reservation and settlement in the scripts against a model in plain Python."""

from __future__ import annotations

from datetime import date, timedelta
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import Phase

from quire.shared.protocol.broker.scripts import constants
from tests.support.limits_machine import walk
from tests.support.protocol_driver import Patch
from tests.support.redis_server import RedisServer


def test_the_scripts_count_what_the_model_counts_in_a_few_walks(redis_server: RedisServer) -> None:
    walk(redis_server, 16, 80)


@pytest.mark.slow
def test_the_scripts_count_what_the_model_counts(redis_server: RedisServer) -> None:
    walk(redis_server, 80, 80)


BUGS: dict[str, Patch] = {
    "a request is settled twice": (("    redis.call('HDEL', prefix .. 'reserved', id)\n", ""),),
    "an end is not settled": (("    settle(prefix, id, used, outcome)\n", ""),),
    "a lost hash leaks its reservation": (
        ("    settle(prefix, id, last and whole(string.match(last[1], '^%d+')) or 0, 'error')\n", ""),
    ),
    "a settlement counts on another day": (("if tonumber(now[1]) == day then", "if true then"),),
    "a parked request keeps its reservation": (
        ("    local unpaid = settle(prefix, id, used_tokens(req[10], req[15]), 'parked')\n", "    local unpaid\n"),
    ),
    "a parked request is counted as a request again": (("base and 0 or 1,", "1,"),),
    "the prompt of a parked request is paid twice": (("has_computed and 0 or prompt, price_in", "prompt, price_in"),),
    "a budget is exceeded by the last step": (
        ("last > (whole(state[7]) or last)", "first > (whole(state[7]) or first)"),
    ),
    "a budget is exceeded by tokens that are not emitted": (
        ("if tokens > (whole(state[4])", "if 0 > (whole(state[4])"),
    ),
    "what is computed again after parking is paid twice": (
        ("now, used_tokens(req[4], req[11]), ARGV", "now, used_tokens(req[4]), ARGV"),
    ),
    "a refused request is counted": (
        (
            "    if reached then\n        return reached",
            "    if reached then\n        for _, pair in ipairs(accounts) do\n            "
            "pair[2].open = pair[2].open + 1 "
            "write_spent(root .. 'spent:' .. pair[1][1], pair[2])\n        end\n        return reached",
        ),
    ),
}


# The machine takes as long to find it as to find all others.
RAREST = "what is computed again after parking is paid twice"


@pytest.mark.slow
@pytest.mark.parametrize("bug", [*sorted(BUGS.keys() - {RAREST}), pytest.param(RAREST, marks=pytest.mark.soak)])
def test_the_machine_finds(bug: str, redis_server: RedisServer) -> None:
    with pytest.raises((AssertionError, KeyError)):
        walk(redis_server, 800, 80, BUGS[bug])  # draws change with the constants of the project


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_scripts_count_what_the_model_counts_for_long(redis_server: RedisServer) -> None:
    walk(redis_server, 1000, 150, derandomize=False, phases=(Phase.generate, Phase.shrink))


def test_months_are_those_of_the_calendar(redis_server: RedisServer) -> None:
    source = constants() + (files("quire.shared.protocol") / "scripts" / "_limits.lua").read_text()
    source += "local found = {} for day = 0, tonumber(ARGV[1]) do found[day + 1] = month_of(day) end return found"
    with redis_server.client() as client:
        found: Any = client.eval(source, 0, 40_000)
    first = date(1970, 1, 1)
    expected = [first + timedelta(days=day) for day in range(40_001)]
    assert found == [12 * one.year + one.month - 1 for one in expected]
