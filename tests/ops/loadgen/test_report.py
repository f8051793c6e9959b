"""The report of the load generator: tables, words, drawings and the HTML page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from quire.ops.loadgen.html_report import page
from quire.ops.loadgen.result import as_json
from quire.ops.loadgen.settings import BenchSettings
from quire.ops.loadgen.svg import Series, SvgMark, plot
from tests.support.loadgen import NASTY, finished_run

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
