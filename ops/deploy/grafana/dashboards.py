"""Writes the dashboards to `ops/deploy/grafana/dashboards/*.json`: `python -m quire.ops.deploy.grafana.dashboards`.

Each has the choice of a data source, and of models and instances where its queries have them. All rows but the first
are collapsed. Alerts that fire are annotations. A panel links to the runbook's entries that name it, and to the page
about `quire trace` if it shows times of requests.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from functools import cache
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard, prometheus

from quire.ops.deploy.grafana import latency, overview, queue, redis, slo, workers
from quire.ops.deploy.grafana.panels import DATASOURCE, WIDTH, Board
from quire.ops.paths import PROJECT_ROOT

FOLDER = Path(__file__).with_name("dashboards")
TAG = "quire"
ALL = dashboard.VariableOption(text="All", value="$__all")
# The Prometheus of docker-compose.yml serves runbook.md and how-to/slow-request.md.
DOCS = "http://127.0.0.1:9090/user"
# Metrics with times of requests, and rules about them.
REQUEST_TIMES = re.compile("first_token|inter_token|call_duration|queue_wait")
SEVERITIES = {"page": "red", "ticket": "yellow"}


def boards() -> list[Board]:
    """Return the boards in the order in which Grafana's list of them is best read."""
    return [module.board() for module in (overview, latency, queue, workers, redis, slo)]


def build(board: Board) -> dashboard.Dashboard:
    """Return a board as Grafana's model of it."""
    builder = (
        builders.Dashboard(board.title)
        .uid(board.uid)
        .description(board.about)
        .tags([TAG])
        .readonly()
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .timezone("browser")
        .refresh("10s")
        .link(
            builders.DashboardLink("Quire")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(builders.ConstantVariable("docs").value(DOCS))
    )
    if board.models:
        builder.with_variable(_choice("model", "Model", "label_values(quire_lane_accepted_total, model)"))
    if board.instances:
        builder.with_variable(_choice("instance", "Instance", board.instances))
    numbers = itertools.count(1)
    for index, (title, panels) in enumerate(board.rows.items()):
        row = builders.Row(title).id(next(numbers))
        for panel, width in zip(panels, _widths(len(panels)), strict=True):
            built = panel.build()
            built.id_val, built.links = next(numbers), _links(built)
            if built.grid_pos and built.grid_pos.w == WIDTH:
                built.grid_pos.w = width
            if index:  # A row that holds its panels is collapsed.
                row.with_panel(panel)
        builder.with_row(row)
        for panel in [] if index else panels:
            builder.with_panel(panel)
    built_board = builder.build()
    built_board.annotations = dashboard.AnnotationContainer([_Firing(*severity) for severity in SEVERITIES.items()])
    return built_board


def render(board: Board) -> str:
    """Return the JSON that Grafana reads."""
    return json.dumps(build(board), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _widths(count: int) -> list[int]:
    """Return the widths of panels of which three fit into a line, such that every line is full."""
    last = {0: [], 1: [WIDTH * 3 // 4] * 4, 2: [WIDTH * 3 // 2] * 2}[count % 3]
    return [WIDTH] * (count - len(last)) + last


class _Firing(dashboard.AnnotationQuery):
    """The alerts of a severity, each from the time that it fires until it ends."""

    def __init__(self, severity: str, color: str) -> None:
        query = f'ALERTS{{alertname=~"Quire.+", alertstate="firing", severity="{severity}"}}'
        super().__init__(f"Alerts: {severity}", DATASOURCE, icon_color=color, expr=query)

    def to_json(self) -> dict[str, object]:
        """Add what annotations of Prometheus have, and Grafana's type of all annotations lacks."""
        return super().to_json() | {"titleFormat": "{{alertname}}", "tagKeys": "job,instance,model,class"}


def _links(panel: dashboard.Panel) -> list[dashboard.DashboardLink]:
    links = {
        f"Runbook: {alert}": f"${{docs:raw}}/runbook.md#{alert.lower()}"
        for alert, entry in _runbook().items()
        if f"*{panel.title}*" in entry
    }
    queries = [target.expr for target in panel.targets or [] if isinstance(target, prometheus.Dataquery)]
    if any(REQUEST_TIMES.search(query) for query in queries):
        links["quire trace: the life of one request"] = "${docs:raw}/how-to/slow-request.md"
    return [dashboard.DashboardLink(title, url=url, target_blank=True) for title, url in links.items()]


@cache
def _runbook() -> dict[str, str]:
    """Return the entry of each alert. Titles of panels are in italics."""
    _, *entries = re.split(r"^### (\w+)$", (PROJECT_ROOT / "docs" / "runbook.md").read_text(), flags=re.MULTILINE)
    return dict(zip(entries[::2], (" ".join(entry.split()) for entry in entries[1::2]), strict=True))


def _choice(name: str, label: str, query: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(ALL)
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for board in boards():
        (FOLDER / f"{board.uid.removeprefix('quire-')}.json").write_text(render(board))
    print(f"{len(boards())} dashboards in {FOLDER}")
    sys.exit(0)
