"""The result on the terminal."""

from __future__ import annotations

from quire.ops.loadgen import table
from quire.ops.loadgen.settings import BenchSettings
from tests.support.loadgen import finished_run


def test_the_text_is_for_people() -> None:
    run = finished_run(BenchSettings(against="http://x", slo="ttft=2s"))
    lines = table.render(run).splitlines()
    assert lines[0].startswith("a: 2 output tokens/s, 1 requests/s; first token after 100 ms (p50), 100 ms (p99); then")
    assert lines[1].startswith("b: 1 output tokens/s, 0.5 requests/s; first token after 200 ms (p50)")
    assert "  goodput: 50.0 % of the requests, 1 requests/s, met the limits: TTFT at most 2 s" in lines
    assert any(line.startswith("client: timers were late by 1 ms (p50)") for line in lines)
    assert "_ms" not in "\n".join(lines)
