"""The parts of the load generator: shapes, prompts, plan, runner, measures and results."""

from __future__ import annotations

import json
import random
import re
from array import array
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from xml.etree import ElementTree

import pytest

from quire.ops.cli.server_url import parse_url
from quire.ops.loadgen import table
from quire.ops.loadgen.client import EventParser, RequestRecord
from quire.ops.loadgen.html_report import page
from quire.ops.loadgen.measures import compare, is_good, summarise, warnings
from quire.ops.loadgen.plan import make_plan, parse_slo
from quire.ops.loadgen.prompts import IdPrompts
from quire.ops.loadgen.result import SCHEMA, as_json
from quire.ops.loadgen.runner import Block, Run
from quire.ops.loadgen.server import MeasuredServer, load_tokenizer
from quire.ops.loadgen.settings import BenchSettings
from quire.ops.loadgen.shapes import SHAPES, arrivals, lengths
from quire.ops.loadgen.svg import Series, SvgMark, plot
from quire.shared.config.settings import SettingError

# --- loadgen ----------------------------------------------------------------------------------------------------------
# Results of `quire bench` without a server: records of requests, and a finished run.


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


# --- shapes -----------------------------------------------------------------------------------------------------------
# Lengths of prompts and answers, and times of arrivals.


# Mean tokens of prompts and answers as published: the paper's section 6.1, and Azure's traces of 2023.
PUBLISHED = {
    "sharegpt": (161.31, 337.99),
    "alpaca": (19.31, 58.45),
    "azure-chat": (1155, 211),
    "azure-code": (2048, 28),
}


LONGEST = {"sharegpt": (1024, 2048), "alpaca": (1024, 2048), "azure-chat": (14_050, 1000), "azure-code": (7437, 1899)}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(("count", "tolerance"), [(64, 0.04), (1000, 0.01)])
def test_lengths_have_the_published_means(name: str, count: int, tolerance: float) -> None:
    pairs = list(lengths(SHAPES[name], count, "7"))
    assert len(pairs) == count
    for side, published, longest in zip(zip(*pairs, strict=True), PUBLISHED[name], LONGEST[name], strict=True):
        assert mean(side) == pytest.approx(published, rel=tolerance)
        assert min(side) >= 4
        assert max(side) <= longest
        assert stdev(side) > 0.3 * mean(side)


def test_lengths_are_those_of_the_seed_and_go_on_without_end() -> None:
    shape = SHAPES["sharegpt"]
    assert list(lengths(shape, 50, "1")) == list(lengths(shape, 50, "1"))
    assert list(lengths(shape, 50, "1")) != list(lengths(shape, 50, "2"))
    assert mean(answer for _, answer in islice(lengths(shape, None, "1"), 1024)) == pytest.approx(337.99, rel=0.01)


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    times = arrivals(4001, 8.0, burstiness, "3")
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0
    assert times[-1] == pytest.approx(500)
    # A gamma distribution with shape k has a coefficient of variation of 1 / sqrt(k).
    assert stdev(gaps) / mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.1)


# --- prompts ----------------------------------------------------------------------------------------------------------
# Prompts of an exact number of tokens.


def test_token_ids_are_exact_and_share_the_prefix() -> None:
    prompts = IdPrompts(1000, 50, seed=1)
    first, second = (prompts.make(60, random.Random(seed)) for seed in (1, 2))
    assert len(first) == len(second) == 60
    assert first[:50] == second[:50]
    assert first[50:] != second[50:]
    assert all(0 <= token < 1000 for token in first)
    assert len(prompts.make(20, random.Random(1))) == 20


# --- plan -------------------------------------------------------------------------------------------------------------
# The plan of a run, and the settings that are refused.


def test_limits_are_read_with_their_units() -> None:
    assert parse_slo("ttft=500ms, tpot:50ms e2e=2s") == {"ttft": 0.5, "tpot": 0.05, "e2e": 2.0}
    assert parse_slo("") == {}
    for wrong in ("ttft=500", "ttft", "foo=1s", "ttft=1s,ttft=2s", "ttft=0ms", "ttft=-1s"):
        with pytest.raises(SettingError, match=r"^--slo: .*give ttft"):
            parse_slo(wrong)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rate": "3", "concurrency": 2}, "^--rate and --concurrency are both given"),
        ({"requests": 3, "duration_s": 2.0}, "^--requests and --duration-s are both given"),
        ({"rate": "fast"}, "^--rate: 'fast' is no rate; give"),
        ({"rate": "0"}, "^--rate: '0' is no rate; give"),
        ({"rate": "nan"}, "^--rate: 'nan' is no rate; give"),
        ({"rate": "inf", "duration_s": 1.0}, "^--rate: inf .* give --requests"),
        ({"burstiness": 2.0}, "^--burstiness: 2 .* give --rate"),
        ({"input_tokens": 5}, "^--input-tokens: 5 .* give --shape fixed or prefix"),
        ({"shape": "fixed", "prefix_tokens": 5}, "^--prefix-tokens: 5 .* give --shape prefix"),
        ({"endpoint": "chat", "prompts": "ids"}, "^--prompts: ids .* give"),
        ({"save_requests": True}, "^--save-requests: .* give --json"),
        ({"against_model": "m"}, "^--against-model: 'm' .* give --against"),
        ({"against": "http://x", "requests": 3}, "^--requests: 3 .* give --requests 4 or more, or --rounds 3 or fewer"),
        ({"json": "/no/such/folder/x.json"}, "^--json: .* give"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        make_plan(BenchSettings(**given))


# --- server -----------------------------------------------------------------------------------------------------------
# A server under load: the bodies of its requests, and the tokenizer.


@pytest.mark.parametrize(("text", "said"), [(None, "there is no"), ("{}", "is not one")])
def test_a_wrong_tokenizer_is_refused(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(SettingError, match=rf"^--tokenizer: .*{said}.*; give "):
        load_tokenizer(str(tmp_path))


# --- client -----------------------------------------------------------------------------------------------------------
# Server-sent events as the client of `quire bench` reads them.


def test_events_are_cut_wherever_the_network_cuts_them() -> None:
    text = b": hello\n\nid: 1\ndata: {}\n\ndata:[DONE]\r\n\n"
    for size in range(1, len(text)):
        parser = EventParser()
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert [data for piece in pieces for data in parser.feed(piece)] == [b"{}", b"[DONE]"]


# --- runner -----------------------------------------------------------------------------------------------------------
# The requests of a run, before they are sent.


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


# --- measures ---------------------------------------------------------------------------------------------------------
# The measures of `quire bench`: latencies, throughput, goodput, the comparison of two servers, and warnings.


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


def test_a_queue_that_grows_is_told() -> None:
    run = finished_run(BenchSettings(rate="10", against="http://x"))
    block = Block(0, 0, 0.0, 100.0)
    block.records = [record(i, i + 0.1 * (i + 1), ended=i + 20, tokens=1) for i in range(40)]
    run.blocks = [block]
    assert any("does not keep up" in text for text in warnings(run))
    block.records = [record(i, i + 0.1, ended=i + 20, tokens=1) for i in range(40)]
    assert not any("does not keep up" in text for text in warnings(run))


# --- result -----------------------------------------------------------------------------------------------------------
# The result as JSON.


def test_the_json_has_everything_and_no_secret() -> None:
    settings = BenchSettings(
        against="http://me:word@x", slo="ttft=150ms", json="x.json", save_requests=True, api_key="sk-secret"
    )
    text = json.dumps(as_json(finished_run(settings), settings))
    assert "sk-secret" not in text
    assert "word" not in text
    result = json.loads(text)
    assert result["schema"] == SCHEMA == "quire-bench/1"
    assert set(result) == {
        "schema", "when", "settings", "environment", "load", "stopped", "client", "servers", "comparison", "warnings",
    }  # fmt: skip
    first, second = result["servers"]
    assert (first["good_share"], second["good_share"]) == (0.5, 0.0)
    assert len(first["blocks"]) == 4
    assert len(first["records"]) == 8
    assert first["records"][0]["chunks_s"] == pytest.approx([0.1, 0.2])
    assert first["errors"] == [{"kind": "status 500", "count": 4, "first_message": NASTY}]
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert set(first[name]) == {"mean", "p50", "p90", "p95", "p99", "max"}


# --- report -----------------------------------------------------------------------------------------------------------
# The report of the load generator: tables, words, drawings and the HTML page.

# --- svg --------------------------------------------------------------------------------------------------------------
# Plots as SVG.


def test_a_plot_has_a_line_and_a_tooltip_for_each_series_and_escapes_its_texts() -> None:
    series = [Series("<a>", [(0, 0), (3, 7)]), Series("b", [(0, 1), (4, 2)], [SvgMark("p50", 2, 1.5)])]
    text = plot("times & more", "ms", "share", series)
    root = ElementTree.fromstring(text)
    assert root.get("aria-label") == "times & more"
    lines = [element for element in root.iter() if element.get("class") == "line"]
    assert [line.findtext("title") for line in lines] == ["<a>", "b"]
    assert "p50 2 ms" in text
    ticks = [element.text for element in root.iter() if element.get("class") == "tick"]
    assert "5" in ticks, "the axis of 0 to 4 ends at the next round number"
    assert "10" in ticks


# --- html report ------------------------------------------------------------------------------------------------------
# The result as a page.


def test_the_page_has_no_script_and_escapes_everything() -> None:
    settings = BenchSettings(against="http://x", model=NASTY)
    run = finished_run(settings, model=NASTY)
    text = page(run, as_json(run, settings))
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "'1'" not in text
    assert "http://host-a:1" not in text.partition("<body>")[0]
    assert not any(word in text for word in ("src=", "href=", "@import", "url("))
    for drawing in re.findall(r"<svg.*?</svg>", text):
        ElementTree.fromstring(drawing)
    assert text.count("<svg") == text.count("</svg>") == 7
    assert text.count('class="line"') == 10  # five plots of lines, a line for each server
