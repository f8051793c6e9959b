"""The requests of a run, before they are sent."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from quire.ops.cli.server_url import parse_url
from quire.ops.loadgen.plan import make_plan
from quire.ops.loadgen.prompts import IdPrompts
from quire.ops.loadgen.runner import Run
from quire.ops.loadgen.server import MeasuredServer
from quire.ops.loadgen.settings import BenchSettings


def new_run(context: int | None = None, **settings: object) -> Run:
    """A run against two servers."""
    plan = make_plan(BenchSettings(**{"against": "http://b:1", **settings}))  # type: ignore[arg-type]
    servers = [
        MeasuredServer("--url", parse_url(f"http://{name}:1"), name, "", context, "completions", {}, name)
        for name in ("a", "b")
    ]
    return Run(plan, servers, IdPrompts(1000, 0, 0), context)


@pytest.mark.parametrize(
    ("given", "kept"), [((30, 40), (30, 40)), ((90, 40), (60, 40)), ((10, 400), (10, 90)), ((90, 90), (50, 50))]
)
def test_lengths_are_cut_to_the_context(given: tuple[int, int], kept: tuple[int, int]) -> None:
    assert new_run(context=100).fit(*given) == kept
    assert new_run().fit(*given) == given


def test_both_servers_get_the_same_requests_and_each_block_others() -> None:
    run = new_run(requests=20, rounds=2, rate="5")
    first, second = ([(work.at_s, json.loads(work.body)["prompt"]) for work in run.works(s, 0)] for s in run.servers)
    assert first == second
    assert len(first) == 10
    assert [work.at_s for work in run.works(run.servers[0], 1)] != [at_s for at_s, _ in first]
    warm = [json.loads(work.body)["prompt"] for work in islice(run.works(run.servers[0], 0, warmup=True), 10)]
    assert warm != [prompt for _, prompt in first]


def test_cut_requests_are_counted_once() -> None:
    run = new_run(context=100, requests=8, rounds=2)
    assert len(list(run.works(run.servers[0], 0))) == 4
    cut = run.cut_lengths
    assert 0 < cut <= 4
    list(run.works(run.servers[1], 0))
    assert run.cut_lengths == cut, "the second server gets the same requests"
