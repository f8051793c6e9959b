"""Plots as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

from quire.ops.loadgen.svg import Series, SvgMark, plot


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
