"""Alert rules and dashboards, checked by promtool, Prometheus and the schema of Grafana."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard

from quire.gateway.settings import GatewaySettings
from quire.ops.cli.settings import ServeSettings
from quire.ops.deploy.grafana.dashboards import DOCS, boards, render
from quire.ops.deploy.grafana.panels import TOKENS_PER_SECOND
from quire.ops.local.ports import free_port
from quire.ops.paths import PROJECT_ROOT
from quire.shared.config.settings import options
from quire.shared.process.processes import dying_with_parent
from quire.worker.replay.commands import WorkerCommandSettings
from tests.support.boards import DASHBOARDS, RULE_TESTS, RULES, alerts, metrics_of, panels, rules, targets
from tests.test_metrics import documented

# --- rules ------------------------------------------------------------------------------------------------------------
# The alert rules: each fires when it should, has tests, and links to its entry in the runbook.


RUNBOOK = (PROJECT_ROOT / "docs" / "runbook.md").read_text()


STACK = yaml.safe_load((PROJECT_ROOT / "docker-compose.yml").read_text())


NEEDS_PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus)"
)


@NEEDS_PROMTOOL
def test_prometheus_accepts_the_rules() -> None:
    checked = subprocess.run(
        ["promtool", "check", "rules", *map(str, RULES)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@NEEDS_PROMTOOL
@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_alerts_fire_when_they_should_and_only_then(path) -> None:
    tested = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_each_alert_has_a_test_that_fires_and_one_that_does_not() -> None:
    tested = {True: set(), False: set()}
    for path in RULE_TESTS:
        for case in (case for group in yaml.safe_load(path.read_text())["tests"] for case in group["alert_rule_test"]):
            tested[bool(case["exp_alerts"])].add(case["alertname"])
    assert tested[True] == tested[False] == set(alerts())


def test_each_alert_has_its_entry_in_the_runbook_and_each_entry_its_alert() -> None:
    headings = re.findall(r"^### (\w+)$", RUNBOOK, re.MULTILINE)
    assert sorted(headings) == sorted(alerts())
    entries = dict(zip(headings, re.split(r"^### \w+$", RUNBOOK, flags=re.MULTILINE)[1:], strict=True))
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook_url"] == "{{ $externalURL }}/user/runbook.md#" + name.lower()
        assert rule["annotations"]["summary"]
        assert f"*{rule['labels']['severity']}*" in entries[name]
        assert re.findall(r"^- \*\*(\w+)\*\*: ", entries[name], re.MULTILINE) == ["Means", "See", "Do"], name


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
@pytest.mark.slow
def test_alerts_and_panels_link_to_what_prometheus_serves(tmp_path: Path) -> None:
    """With the files and flags of the image; no gateway runs, so an alert is raised."""
    dockerfile = (PROJECT_ROOT / "ops/deploy/prometheus/Dockerfile").read_text()
    for source, target in re.findall(r"^COPY (\S+) /etc/prometheus/(\S+)$", dockerfile, re.MULTILINE):
        copy = shutil.copytree if (PROJECT_ROOT / source).is_dir() else shutil.copy
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        copy(PROJECT_ROOT / source, tmp_path / target)
    found = re.search(r"^ENTRYPOINT (\[.*\])$", dockerfile, re.MULTILINE)
    assert found
    flags = [
        flag.replace("/etc/prometheus", str(tmp_path)).replace("/var/lib/quire", str(tmp_path / "data"))
        for flag in json.loads(found[1])[1:]
    ]
    port = free_port()
    (command,) = STACK["services"]["prometheus"]["command"]
    flags += [command.replace("${PROMETHEUS_PORT:-9090}", str(port)), f"--web.listen-address=127.0.0.1:{port}"]
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            dying_with_parent([shutil.which("prometheus") or "", *flags]), stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 60
        while "QuireNoGateway" not in (links := links_of_alerts(url)):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, f"no alert: {links}"
            time.sleep(0.2)
        docs = DOCS.replace("http://127.0.0.1:9090", url)
        links |= {panel["title"]: link["url"] for _, panel in panels() for link in panel["links"]}
        pages = defaultdict(set)
        for link in links.values():
            page, _, anchor = link.replace("${docs:raw}", docs).partition("#")
            pages[page].add(anchor)
        assert set(pages) == {f"{docs}/runbook.md", f"{docs}/how-to/slow-request.md"}
        for page, anchors in pages.items():
            with urllib.request.urlopen(page, timeout=10) as response:
                assert response.headers["Content-Type"].startswith("text/")
                text = response.read().decode().lower()
            assert all(f"\n### {anchor}\n" in text for anchor in anchors if anchor), page
    finally:
        process.terminate()
        process.wait(20)


def links_of_alerts(url: str) -> dict[str, str]:
    """The link of each alert that fires or is about to; none while Prometheus does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/alerts", timeout=10) as response:
            found = json.load(response)["data"]["alerts"]
    except OSError:
        return {}
    return {one["labels"]["alertname"]: one["annotations"]["runbook_url"] for one in found}


# --- dashboards -------------------------------------------------------------------------------------------------------
# The dashboards fit the program: nothing is out of date, unknown or unexplained.


def test_the_committed_dashboards_are_what_the_program_makes() -> None:
    made = {f"{board.uid.removeprefix('quire-')}.json": render(board) for board in boards()}
    assert made == {path.name: path.read_text() for path in DASHBOARDS}, (
        "run python -m quire.ops.deploy.grafana.dashboards"
    )


def test_grafanas_own_types_read_the_dashboards_and_write_the_same() -> None:
    for path in DASHBOARDS:
        read = json.loads(path.read_text())
        for annotation in read["annotations"]["list"]:  # Grafana's types lack what only Prometheus' annotations have.
            assert annotation.pop("titleFormat") == "{{alertname}}"
            assert annotation.pop("tagKeys").split(",") == ["job", "instance", "model", "class"]
        again = json.dumps(dashboard.Dashboard.from_json(read), cls=JSONEncoder)
        assert json.loads(again) == read


@NEEDS_PROMTOOL
def test_prometheus_parses_each_query(tmp_path: Path) -> None:
    """promtool checks rules, so each query of a panel or annotation becomes a recording rule."""
    queries = {target.expr for target in targets()}
    queries |= {one["expr"] for path in DASHBOARDS for one in json.loads(path.read_text())["annotations"]["list"]}
    records = [
        {"record": f"query:{i}", "expr": query.replace("$__rate_interval", "1m")} for i, query in enumerate(queries)
    ]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": records}]}))
    checked = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_board_opens_with_its_first_row_and_marks_each_alert() -> None:
    for path in DASHBOARDS:
        read = json.loads(path.read_text())
        rows = [panel for panel in read["panels"] if panel["type"] == "row"]
        assert (
            [bool(row["panels"]) for row in rows]
            == [row["collapsed"] for row in rows]
            == [False] + [True] * (len(rows) - 1)
        )
        severities = [re.findall(r'severity="(\w+)"', one["expr"]) for one in read["annotations"]["list"]]
        assert severities == [["page"], ["ticket"]]
    assert {rule["labels"]["severity"] for rule in alerts().values()} == {"page", "ticket"}


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
    """In the title of the panel, and in the legend of each line if there are several."""
    seen = 0
    for board, panel in panels():
        found = {
            target["legendFormat"]: f"p{float(share) * 100:g}"
            for target in panel["targets"]
            for share in re.findall(r"histogram_quantile\(([\d.]+),", target["expr"])
        }
        seen += bool(found)
        if found:
            names = sorted(set(found.values()))
            assert panel["title"].endswith(", " + " ".join(names)), f"{board} / {panel['title']}"
            assert len(names) == 1 or all(name in legend.split() for legend, name in found.items()), panel["title"]
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


def test_panels_fill_each_line_without_overlap_and_have_ids_of_their_own() -> None:
    for path in DASHBOARDS:
        items = [panel for item in json.loads(path.read_text())["panels"] for panel in [item, *item.get("panels", [])]]
        assert len({panel["id"] for panel in items}) == len(items)
        cells: set[tuple[int, int]] = set()
        for place in (panel["gridPos"] for panel in items):
            mine = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert max(x for x, _ in mine) < 24
            assert not mine & cells, path.name
            cells |= mine
        assert len(cells) == 24 * (1 + max(y for _, y in cells)), f"{path.name}: a line of panels has a gap"


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
            if re.match("quire_(lane|queue_(requests|tokens|oldest|tenants)|(live_work|hosted_mod)|retry_after)", name)
        ]
        assert len(re.findall(r"max by \(model", expr)) == len(shared), where


def test_the_runbook_and_the_panels_name_what_exists() -> None:
    headings = {name.lower() for name in re.findall(r"^### (\w+)$", RUNBOOK, re.MULTILINE)}
    assert set(re.findall(r"\]\(#(\w+)\)", RUNBOOK)) <= headings
    flat = " ".join(RUNBOOK.split())
    named = set(re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", flat)) - {"page", "ticket", "Which Redis"}
    assert named
    assert named == {panel["title"] for _, panel in panels() if any("runbook" in one["url"] for one in panel["links"])}
    flags = {item.flag for cls in (GatewaySettings, WorkerCommandSettings, ServeSettings) for item in options(cls)}
    text = flat.replace("redis-check-aof --fix", "") + " ".join(panel["description"] for _, panel in panels())
    assert set(re.findall(r"--[a-z][a-z-]+", text)) <= flags
