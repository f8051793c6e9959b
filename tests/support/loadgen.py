"""Results of `quire bench` without a server: records of requests, and a finished run."""

from __future__ import annotations

from array import array

from quire.ops.cli.server_url import parse_url
from quire.ops.loadgen.client import RequestRecord
from quire.ops.loadgen.plan import make_plan
from quire.ops.loadgen.prompts import IdPrompts
from quire.ops.loadgen.runner import Block, Run
from quire.ops.loadgen.server import MeasuredServer
from quire.ops.loadgen.settings import BenchSettings


def record(sent: float, *chunks: float, ended: float, tokens: int, error: str = "", message: str = "") -> RequestRecord:
    return RequestRecord(
        0,
        10,
        tokens,
        due=sent,
        sent=sent,
        ended=ended,
        last=chunks[-1] if chunks else 0.0,
        chunks=array("d", chunks),
        prompt_tokens=10,
        completion_tokens=tokens if chunks else None,
        error=error,
        message=message,
    )


NASTY = "</title><script>alert('1')</script>&\"x"


def finished_run(settings: BenchSettings, model: str = "m") -> Run:
    """Two servers, of which the second takes twice as long; and one error."""
    plan = make_plan(settings)
    servers = [
        MeasuredServer("--url", parse_url(f"http://host-{name}:1"), model, "quire", 100, "completions", {}, name)
        for name in ("a", "b")
    ]
    run = Run(plan, servers, IdPrompts(1000, 0, 0), 100, started=100.0)
    run.lag_s.append(0.001)
    for index in range(plan.rounds):
        for server, factor in ((0, 1.0), (1, 2.0)):
            start = 100.0 + 10 * index + 5 * server
            block = Block(server, index, start, start + factor)
            block.records = [
                record(start, start + 0.1 * factor, start + 0.2 * factor, ended=start + 0.3 * factor, tokens=2),
                record(start, ended=start + 0.1, tokens=2, error="status 500", message=NASTY),
            ]
            run.blocks.append(block)
    return run
