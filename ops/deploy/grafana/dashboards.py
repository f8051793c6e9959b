"""Writes the dashboards to `ops/deploy/grafana/dashboards/*.json`: `python -m quire.ops.deploy.grafana.dashboards`.

Each has the choice of a data source, and of models and instances where its queries have them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard

from quire.ops.deploy.grafana import latency, overview, queue, redis, slo, workers
from quire.ops.deploy.grafana.panels import DATASOURCE, Board

FOLDER = Path(__file__).with_name("dashboards")
TAG = "quire"
ALL = dashboard.VariableOption(text="All", value="$__all")


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
    )
    if board.models:
        builder.with_variable(_choice("model", "Model", "label_values(quire_lane_accepted_total, model)"))
    if board.instances:
        builder.with_variable(_choice("instance", "Instance", board.instances))
    number = 0
    for title, panels in board.rows.items():
        number += 1
        builder.with_row(builders.Row(title).id(number))
        for panel in panels:
            number += 1
            built = panel.build()
            built.id_val = number
            builder.with_panel(panel)
    return builder.build()


def render(board: Board) -> str:
    """Return the JSON that Grafana reads."""
    return json.dumps(build(board), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


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
