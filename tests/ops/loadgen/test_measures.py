"""The measures of `quire bench`: latencies, throughput, goodput, the comparison of two servers, and warnings."""

from __future__ import annotations

import pytest

from quire.ops.loadgen import table
from quire.ops.loadgen.measures import compare, distribution, is_good, percentile, summarise, warnings
from quire.ops.loadgen.plan import parse_slo
from quire.ops.loadgen.runner import Block
from quire.ops.loadgen.settings import BenchSettings
from tests.support.loadgen import finished_run, record


def test_measures_are_those_of_the_definitions() -> None:
    block = Block(0, 0, started=100.0, ended=104.0)
    block.records = [
        record(100.0, 100.1, 100.2, 100.4, ended=100.5, tokens=3),
        record(101.0, 101.3, ended=101.4, tokens=1),
        record(102.0, ended=102.5, tokens=5, error="status 503", message="full"),
        record(103.0, 103.1, ended=104.0, tokens=5, error="cut short"),
    ]
    found = summarise([block], parse_slo("ttft=200ms"))
    assert (found.requests, found.completed, found.failed, found.cut_short) == (4, 2, 1, 1)
    assert found.requests_per_s == pytest.approx(2 / 4)
    assert (found.input_tokens_per_s, found.output_tokens_per_s) == pytest.approx((20 / 4, 4 / 4))
    assert found.ttft_ms is not None
    assert found.tpot_ms is not None
    assert found.itl_ms is not None
    assert found.e2e_ms is not None
    assert found.ttft_ms.mean == pytest.approx(200)
    assert found.tpot_ms.mean == pytest.approx(150)  # of the first only: (0.4 - 0.1) / (3 - 1)
    assert found.itl_ms.max == pytest.approx(200)
    assert found.e2e_ms.max == pytest.approx(500)
    assert (found.good, found.good_share, found.good_per_s) == (1, pytest.approx(1 / 3), pytest.approx(1 / 4))
    [error] = found.errors
    assert (error.kind, error.count, error.first_message) == ("status 503", 1, "full")
    assert found.mean_concurrency == pytest.approx((0.5 + 0.4 + 0.5 + 1.0) / 4)


def test_a_good_request_keeps_to_every_limit() -> None:
    one = record(0.0, 0.1, 0.2, 0.5, ended=0.6, tokens=3)
    for limits, good in (
        ("ttft=100ms,tpot=200ms,itl=301ms,e2e=600ms", True),
        ("ttft=99ms", False),
        ("tpot=199ms", False),
        ("itl=299ms", False),
        ("e2e=599ms,ttft=1s", False),
    ):
        assert is_good(one, parse_slo(limits)) is good
    assert not is_good(record(0.0, ended=0.1, tokens=1, error="timeout"), {})


def test_percentiles_are_linear_between_ranks() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([5.0], 0.99) == 5.0
    assert distribution([]) is None


def test_two_servers_are_compared_with_the_spread_of_the_blocks() -> None:
    run = finished_run(BenchSettings(against="http://x"))
    found = {one.name: one for one in compare(run)}
    throughput, ttft = found["requests/s"], found["TTFT p50 ms"]
    assert (throughput.ratio, throughput.least, throughput.most) == pytest.approx((0.5, 0.5, 0.5))
    assert (ttft.first, ttft.second, ttft.ratio) == pytest.approx((100, 200, 2))
    assert throughput.better == ttft.better == "first"
    assert throughput.blocks == 4
    run.blocks[1].ended -= 1.5  # the second server was faster in one block
    assert {one.name: one for one in compare(run)}["requests/s"].better == ""
    assert "ratio" in table.render(run)


def test_warnings_say_what_cannot_be_believed() -> None:
    run = finished_run(BenchSettings(against="http://x"))
    assert warnings(run) == []
    run.lag_s.append(0.5)
    run.stopped = True
    run.cut_lengths = 3
    run.blocks[0].records[0].completion_tokens = None
    run.blocks[0].records[0].prompt_tokens = 99
    text = "\n".join(warnings(run))
    for part in (
        "was stopped",
        "client was late",
        "3 requests were longer",
        "does not count",
        "counted 129 input tokens",
    ):
        assert part in text


def test_a_queue_that_grows_is_told() -> None:
    run = finished_run(BenchSettings(rate="10", against="http://x"))
    block = Block(0, 0, 0.0, 100.0)
    block.records = [record(i, i + 0.1 * (i + 1), ended=i + 20, tokens=1) for i in range(40)]
    run.blocks = [block]
    assert any("does not keep up" in text for text in warnings(run))
    block.records = [record(i, i + 0.1, ended=i + 20, tokens=1) for i in range(40)]
    assert not any("does not keep up" in text for text in warnings(run))
