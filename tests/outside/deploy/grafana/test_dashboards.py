"""The dashboards fit the program: nothing is out of date, unknown or unexplained."""

from __future__ import annotations

import json
import re
from collections import defaultdict

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard

from quire.gateway.settings import GatewaySettings
from quire.ops.cli.settings import ServeSettings
from quire.ops.deploy.grafana.dashboards import boards, render
from quire.ops.deploy.grafana.panels import TOKENS_PER_SECOND
from quire.ops.paths import PROJECT_ROOT
from quire.shared.settings import options
from quire.worker.settings import WorkerSettings
from tests.support.boards import DASHBOARDS, alerts, metrics_of, panels, rules, targets
from tests.test_metrics import documented

RUNBOOK = (PROJECT_ROOT / "docs" / "runbook.md").read_text()


def test_the_committed_dashboards_are_what_the_program_makes() -> None:
    made = {f"{board.uid.removeprefix('quire-')}.json": render(board) for board in boards()}
    assert made == {path.name: path.read_text() for path in DASHBOARDS}, (
        "run python -m quire.ops.deploy.grafana.dashboards"
    )


def test_grafanas_own_types_read_the_dashboards_and_write_the_same() -> None:
    for path in DASHBOARDS:
        read = json.loads(path.read_text())
        again = json.dumps(dashboard.Dashboard.from_json(read), cls=JSONEncoder)
        assert json.loads(again) == read


def test_each_panel_says_what_it_shows_in_which_unit_and_what_to_do() -> None:
    titles = defaultdict(list)
    for board, panel in panels():
        name = f"{board} / {panel['title']}"
        assert panel["fieldConfig"]["defaults"]["unit"], name
        assert re.fullmatch(r"(p9\d|[A-Z1]).{30,}[^.]\.", panel["description"]), name
        assert re.search(r"[;:.] ", panel["description"]), f"{name}: and what to do?"
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert all(legends), name
        assert len(set(legends)) == len(legends), name
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
        titles[board].append(panel["title"])
    for board, names in titles.items():
        assert len(set(names)) == len(names), f"{board}: two panels have the same title"


def test_each_percentile_is_named_where_it_is_read() -> None:
    """In the title of a panel that has one, and in the legend of each line of a panel that has several."""
    seen = 0
    for board, panel in panels():
        found = {
            target["legendFormat"]: f"p{float(share) * 100:g}"
            for target in panel["targets"]
            for share in re.findall(r"histogram_quantile\(([\d.]+),", target["expr"])
        }
        seen += bool(found)
        if len(set(found.values())) == 1:
            assert re.search(rf"\b{min(found.values())}$", panel["title"]), f"{board} / {panel['title']}"
        else:
            assert all(name in legend.split() for legend, name in found.items()), f"{board} / {panel['title']}"
    assert seen > 10


def test_tokens_per_second_have_that_unit_and_are_on_the_first_board() -> None:
    rates = [
        (target.board, target.panel)
        for target in targets()
        if re.search(r"rate\(quire_\w*tokens_total", target.expr)
        and target.panel["fieldConfig"]["defaults"]["unit"] != "percentunit"
    ]
    assert {panel["fieldConfig"]["defaults"]["unit"] for _, panel in rates} == {TOKENS_PER_SECOND} == {"suffix: tok/s"}
    assert {board for board, panel in rates if panel["type"] == "stat"} == {"overview"}


def test_dashboards_do_not_overlap_and_have_ids_of_their_own() -> None:
    for path in DASHBOARDS:
        read = json.loads(path.read_text())
        assert len({panel["id"] for panel in read["panels"]}) == len(read["panels"])
        cells: set[tuple[int, int]] = set()
        for place in (panel["gridPos"] for panel in read["panels"]):
            mine = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert max(x for x, _ in mine) < 24
            assert not mine & cells, path.name
            cells |= mine


def test_queries_use_metrics_and_labels_that_exist() -> None:
    known = documented()
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    exprs = {target.name: target.expr for target in targets()}
    exprs |= {rule.get("alert") or rule["record"]: rule["expr"] for rule in rules()}
    for where, expr in exprs.items():
        found = metrics_of(expr)
        assert found or "up{" in expr, where
        for name, labels in found:
            if name.startswith(("redis_", "process_")):
                continue  # of others; that they are there is tested where the stack runs
            if name.startswith("quire:"):
                assert name in recorded, f"{where}: no rule records {name}"
                continue
            family = name if name in known else re.sub("_(bucket|count|sum)$", "", name)
            assert family in known, f"{where}: {name} is not in docs/metrics.md"
            kind, own = known[family]
            assert (family == name) == (kind != "histogram"), f"{where}: {name} is a {kind}"
            assert labels <= own | {"instance", "le"}, f"{where}: {name} has no {labels - own}"


def test_what_all_gateways_show_of_a_lane_is_never_added_up() -> None:
    exprs = {target.name: target.expr for target in targets()} | {name: rule["expr"] for name, rule in alerts().items()}
    for where, expr in exprs.items():
        shared = [
            name
            for name, _ in metrics_of(expr)
            if re.match("quire_(lane|queue_(requests|tokens|oldest|tenants)|live_workers|retry_after)", name)
        ]
        assert len(re.findall(r"max by \(model", expr)) == len(shared), where


def test_the_runbook_and_the_panels_name_what_exists() -> None:
    headings = {name.lower() for name in re.findall(r"^### (\w+)$", RUNBOOK, re.MULTILINE)}
    assert set(re.findall(r"\]\(#(\w+)\)", RUNBOOK)) <= headings
    flat = " ".join(RUNBOOK.split())
    named = set(re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", flat)) - {"page", "ticket", "Which Redis"}
    assert named
    assert named <= {panel["title"] for _, panel in panels()}
    flags = {item.flag for cls in (GatewaySettings, WorkerSettings, ServeSettings) for item in options(cls)}
    text = flat.replace("redis-check-aof --fix", "") + " ".join(panel["description"] for _, panel in panels())
    assert set(re.findall(r"--[a-z][a-z-]+", text)) <= flags
