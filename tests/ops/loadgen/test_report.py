"""The report of the load generator: tables, words, drawings and the HTML page."""

from __future__ import annotations

import re
from html import unescape
from xml.etree import ElementTree

import pytest

from quire.ops.loadgen import table, words
from quire.ops.loadgen.html_report import page
from quire.ops.loadgen.result import as_json
from quire.ops.loadgen.settings import BenchSettings
from quire.ops.loadgen.svg import Series, SvgMark, plot
from tests.support.loadgen import NASTY, finished_run

# --- table ------------------------------------------------------------------------------------------------------------
# The result on the terminal.


def test_the_text_is_for_people() -> None:
    run = finished_run(BenchSettings(against="http://x", slo="ttft=2s"))
    lines = table.render(run).splitlines()
    assert lines[0].startswith("a: 2 output tokens/s, 1 requests/s; first token after 100 ms (p50), 100 ms (p99); then")
    assert lines[1].startswith("b: 1 output tokens/s, 0.5 requests/s; first token after 200 ms (p50)")
    assert "  goodput: 50.0 % of the requests, 1 requests/s, met the limits: TTFT at most 2 s" in lines
    assert any(line.startswith("client: timers were late by 1 ms (p50)") for line in lines)
    assert "_ms" not in "\n".join(lines)


# --- words ------------------------------------------------------------------------------------------------------------
# Figures as people read them.


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.5476181999080814, "0.548"), (3.14159, "3.14"), (42.4242, "42.4"), (1234.56, "1,235"), (7.0, "7"), (0.0, "0")],
)
def test_numbers_are_rounded(value: float, said: str) -> None:
    assert words.number(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.00671, "0.01 ms"), (8.214, "8.21 ms"), (99.999, "100 ms"), (2000.0, "2 s"), (12_345.0, "12.3 s")],
)
def test_times_have_a_unit(value: float, said: str) -> None:
    assert words.milliseconds(value) == said


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


def test_points_without_lines_and_an_empty_plot() -> None:
    dots = ElementTree.fromstring(plot("t", "s", "ms", [Series("a", [(1, 1), (2, 2)])], lines=False))
    assert len([element for element in dots.iter() if element.tag.endswith("circle")]) == 2
    assert "NaN" not in plot("t", "s", "ms", [])


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
