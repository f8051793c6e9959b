"""The order of the servers and the seeds of the rounds."""

from __future__ import annotations

from collections import Counter

from quire.ops.benchmarks.peers.rounds import Side, case_seed, rotated
from quire.ops.benchmarks.stack.load import CASES

SIDES = [Side(name, None) for name in "abc"]


def test_each_server_is_first_and_last_equally_often() -> None:
    orders = [[side.name for side in rotated(SIDES, index)] for index in range(6)]
    assert orders[:4] == [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"], ["a", "c", "b"]]
    assert Counter(order[0] for order in orders) == Counter(order[-1] for order in orders) == {"a": 2, "b": 2, "c": 2}


def test_each_case_and_round_has_a_seed_of_its_own() -> None:
    seeds = {case_seed(7, case, index) for case in CASES.values() for index in range(4)}
    assert len(seeds) == 4 * len(CASES)
    assert case_seed(7, CASES["c1"], 0) in seeds
    assert case_seed(8, CASES["c1"], 0) not in seeds
