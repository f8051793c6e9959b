"""The result as a page."""

from __future__ import annotations

import re
from html import unescape
from xml.etree import ElementTree

from quire.ops.loadgen.html_report import page
from quire.ops.loadgen.result import as_json
from quire.ops.loadgen.settings import BenchSettings
from tests.support.loadgen import NASTY, finished_run


def test_the_page_has_no_script_and_escapes_everything() -> None:
    settings = BenchSettings(against="http://x", model=NASTY)
    run = finished_run(settings, model=NASTY)
    text = page(run, as_json(run, settings))
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "'1'" not in text
    assert "http://host-a:1" not in text.partition("<body>")[0]
    assert not any(word in text for word in ("src=", "href=", "@import", "url("))
    for plot in re.findall(r"<svg.*?</svg>", text):
        ElementTree.fromstring(plot)
    assert text.count("<svg") == text.count("</svg>") == 7
    assert text.count('class="line"') == 10  # five plots of lines, a line for each server


def shown(page: str) -> str:
    """The text of a page as a reader sees it, with the cells of a row on one line; without its plots."""
    text = re.sub(r"(?s)<svg.*?</svg>|<style>.*?</style>", "", page)
    lines = unescape(re.sub(r"<[^>]*>", " ", re.sub(r"</(p|h1|h2|tr)>", "\n", text))).splitlines()
    return "\n".join(" ".join(line.split()) for line in lines)


def test_the_page_is_for_people() -> None:
    settings = BenchSettings(against="http://x", slo="ttft=2s,tpot=150ms", rate="5")
    run = finished_run(settings)
    run.blocks[0].ended += 1 / 7  # figures of sixteen digits
    result = as_json(run, settings)
    text = page(run, result)
    lines = shown(text).splitlines()
    [headline] = [line for line in lines if line.startswith("■ a: ")]
    assert "1.93 output tokens/s, 0.966 requests/s; first token after 100 ms (p50), 100 ms (p99)" in headline
    goodput = [line.split(" met the limits: ") for line in lines if line.startswith("Goodput: ")]
    assert [line[0] for line in goodput] == [
        "Goodput: 50.0 % of the requests, 0.966 requests/s,",
        "Goodput: 0.0 % of the requests, 0 requests/s,",
    ]
    assert {line[1] for line in goodput} == {"TTFT at most 2 s and TPOT at most 150 ms."}
    assert not re.search(r"[{}]|None|null|\d\.\d{4}", shown(text))
    rows = re.findall(r"<tr>(.*?)</tr>", text)
    assert not [row for row in rows if re.search(r'<td class="text"></td>', row)], "rows without a value"
    assert len(re.findall(r"\d", repr(result["servers"][0]["output_tokens_per_s"]))) > 10, "the JSON has all digits"
    curves = re.findall(r"<svg.*?</svg>", text)
    assert [curve.count('<circle class="mark"') for curve in curves] == [6, 6, 6, 0, 0, 0, 0]
    for curve in curves[:3]:
        assert len(re.findall(r">p50 [\d.]+ ms · p95 [\d.]+ ms · p99 [\d.]+ ms<", curve)) == 2
