"""The committed dashboards and rules, and the metrics and labels in their queries."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from quire.ops.paths import PROJECT_ROOT

DASHBOARDS = sorted((PROJECT_ROOT / "ops" / "deploy" / "grafana" / "dashboards").glob("*.json"))
RULES = sorted((PROJECT_ROOT / "ops" / "deploy" / "prometheus" / "rules").glob("*.yml"))
RULE_TESTS = sorted((PROJECT_ROOT / "ops" / "deploy" / "prometheus" / "tests").glob("*.yml"))


@dataclass(frozen=True)
class Target:
    """A query of a panel."""

    board: str
    panel: dict[str, Any]
    expr: str
    legend: str

    @property
    def name(self) -> str:
        return f"{self.board} / {self.panel['title']} / {self.legend}"


def panels() -> list[tuple[str, dict[str, Any]]]:
    """(dashboard, panel) of all panels that show something, also of those in collapsed rows."""
    return [
        (path.stem, panel)
        for path in DASHBOARDS
        for item in json.loads(path.read_text())["panels"]
        for panel in [item, *item.get("panels", [])]
        if panel["type"] != "row"
    ]


def targets() -> list[Target]:
    return [
        Target(board, panel, target["expr"], target["legendFormat"])
        for board, panel in panels()
        for target in panel["targets"]
    ]


@cache
def rules() -> list[dict[str, Any]]:
    """All rules of all groups: what records, and alerts."""
    return [rule for path in RULES for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    found = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in found}) == len(found), "two alerts have the same name"
    return {rule["alert"]: rule for rule in found}


def metrics_of(expr: str) -> list[tuple[str, frozenset[str]]]:
    """The metrics in a query, each with the names of the labels that it is selected by."""
    found = re.findall(r"\b((?:quire|redis|process)_\w+|quire:[\w:]+)(?:\{([^}]*)\})?", expr)
    return [(name, frozenset(re.findall(r"(\w+)(?==|!)", matchers))) for name, matchers in found]
