"""The house style of panels: each has a unit, a legend, and a description that ends with what to do about it.

Queries are PromQL with Grafana's variables. `of(metric)` is the metric at the chosen instances, `lane(...)` at the
chosen models: all gateways show the same of a lane, so that is a maximum over them, never a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import heatmap as heatmap_builders
from grafana_foundation_sdk.builders import prometheus as prometheus_builders
from grafana_foundation_sdk.builders import stat as stat_builders
from grafana_foundation_sdk.builders import timeseries as timeseries_builders
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common, dashboard, heatmap, prometheus

DATASOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
RANGE = "[$__rate_interval]"
TOKENS_PER_SECOND = "suffix: tok/s"
# All labels that metrics of the lane have; a metric without one of them does not mind.
OVER_GATEWAYS = "max by (model, class, outcome)"
# Grafana lays panels out in rows of 24.
WIDTH, HEIGHT = 8, 8
STAT_WIDTH, STAT_HEIGHT = 4, 4

Panel = Builder[dashboard.Panel]


class Line(NamedTuple):
    """A query, and the name of each of its series (`{{label}}` is a label's value)."""

    expr: str
    legend: str


class Thresholds(NamedTuple):
    """Values from which a panel turns yellow and red; with `below`, values under which it does."""

    warn: float
    bad: float
    below: bool = False


class Board(NamedTuple):
    """A dashboard: rows of panels by their titles. `instances`: the query for the choice of instances."""

    uid: str
    title: str
    about: str
    rows: dict[str, list[Panel]]
    instances: str = ""
    models: bool = False


def of(metric: str, *matchers: str) -> str:
    """Return the metric at the chosen instances."""
    return _with(metric, 'instance=~"$instance"', *matchers)


def rate(metric: str, *matchers: str, by: str = "") -> str:
    """Return the events per second of a counter, summed over instances, or by some labels."""
    return f"{_sum(by)} (rate({of(metric, *matchers)}{RANGE}))"


def share(part: str, whole: str) -> str:
    """Return a rate as a share of another; no value where there is nothing to share."""
    return f"{part} / ({whole} > 0)"


def lane(metric: str, *matchers: str, by: str = "") -> str:
    """Return a gauge of the lane, over the chosen models."""
    return f"{_sum(by)} ({OVER_GATEWAYS} ({_of_model(metric, *matchers)}))"


def lane_rate(metric: str, *matchers: str, by: str = "") -> str:
    """Return the events per second of a counter of the lane, over the chosen models."""
    return f"{_sum(by)} ({OVER_GATEWAYS} (rate({_of_model(metric, *matchers)}{RANGE})))"


def quantile(share: float, metric: str, *matchers: str, by: str = "") -> str:
    """Return a quantile of a histogram over all chosen instances, or by some labels."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({of(metric + '_bucket', *matchers)}{RANGE})))"


def quantiles(metric: str, *matchers: str) -> list[Line]:
    return [
        Line(quantile(part, metric, *matchers), name) for part, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    ]


def mean(metric: str, *matchers: str, by: str = "") -> str:
    """Return the mean of what a histogram observed."""
    count = rate(f"{metric}_count", *matchers, by=by)
    return share(rate(f"{metric}_sum", *matchers, by=by), count)


def series(
    title: str,
    unit: str,
    about: str,
    *lines: Line,
    limits: Thresholds | None = None,
    stacked: bool = False,
    width: int = WIDTH,
) -> Panel:
    """Return a panel with lines over time, or areas on top of each other."""
    panel = (
        timeseries_builders.Panel()
        .title(title)
        .description(about)
        .unit(unit)
        .min(0)
        .datasource(DATASOURCE)
        .span(width)
        .height(HEIGHT)
        .line_width(1)
        .fill_opacity(40 if stacked else 10)
        .show_points(common.VisibilityMode.NEVER)
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.TABLE)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
            .sort_by("Max")  # The legend has room for about three lines.
            .sort_desc(True)
        )
        .thresholds(_thresholds(limits))
    )
    if stacked:
        panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL))
    if limits:
        style = common.GraphThresholdsStyleMode.DASHED
        panel.thresholds_style(common_builders.GraphThresholdsStyleConfig().mode(style))
    for query in _targets(lines):
        panel.with_target(query)
    return panel


def stat(
    title: str, unit: str, about: str, line: Line, limits: Thresholds | None = None, width: int = STAT_WIDTH
) -> Panel:
    """Return a panel with one number, and its history as a graph in the background."""
    return (
        stat_builders.Panel()
        .title(title)
        .description(about)
        .unit(unit)
        .datasource(DATASOURCE)
        .span(width)
        .height(STAT_HEIGHT)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(common.BigValueGraphMode.AREA)
        .color_mode(common.BigValueColorMode.VALUE)
        .thresholds(_thresholds(limits))
        .with_target(_targets([line])[0])
    )


def heat(title: str, about: str, metric: str, *matchers: str, width: int = WIDTH) -> Panel:
    """Return a heatmap of durations over time. The metric is a histogram with buckets in seconds."""
    query = f"sum by (le) (increase({of(metric + '_bucket', *matchers)}{RANGE}))"
    target = _targets([Line(query, "{{le}}")])[0].format(prometheus.PromQueryFormat.HEATMAP)
    return (
        heatmap_builders.Panel()
        .title(title)
        .description(about)
        .unit("s")
        .datasource(DATASOURCE)
        .span(width)
        .height(HEIGHT)
        .calculate(False)
        .color(
            heatmap_builders.HeatmapColorOptions()
            .mode(heatmap.HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .scale(heatmap.HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .steps(64)
        )
        .y_axis(heatmap_builders.YAxisConfig().unit("s").axis_placement(common.AxisPlacement.LEFT))
        .cell_values(heatmap_builders.CellValues().unit("short"))
        .filter_values(heatmap_builders.FilterValueRange().le(1e-9))
        .mode(common.TooltipDisplayMode.SINGLE)
        .show_legend()
        .with_target(target)
    )


def _targets(lines: Sequence[Line]) -> list[prometheus_builders.Dataquery]:
    return [
        prometheus_builders.Dataquery()
        .expr(line.expr)
        .legend_format(line.legend)
        .datasource(DATASOURCE)
        .range()
        .editor_mode(prometheus.QueryEditorMode.CODE)
        .ref_id(chr(ord("A") + index))
        for index, line in enumerate(lines)
    ]


def _thresholds(limits: Thresholds | None) -> builders.ThresholdsConfig:
    colors = ("green", "yellow", "red")
    values: tuple[float | None, ...] = (None,)
    if limits:
        values = (None, limits.warn, limits.bad)
        if limits.below:
            colors, values = ("red", "yellow", "green"), (None, limits.bad, limits.warn)
    steps = [dashboard.Threshold(value=value, color=color) for value, color in zip(values, colors, strict=False)]
    return builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)


def _of_model(metric: str, *matchers: str) -> str:
    return _with(metric, 'model=~"$model"', *matchers)


def _with(metric: str, *matchers: str) -> str:
    return f"{metric}{{{','.join(matchers)}}}"


def _sum(by: str) -> str:
    return f"sum by ({by})" if by else "sum"
