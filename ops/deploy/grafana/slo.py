"""Service level objectives: whether they are met, and how fast the error budget is used up.

The rules are in ops/deploy/prometheus/rules/slo.yml."""

from __future__ import annotations

from quire.ops.deploy.grafana.panels import Board, Line, Panel, Thresholds, series, stat

# Share of calls that may fail, and of first tokens that may be late: as in the rules.
FAILED_BUDGET, LATE_BUDGET = 0.001, 0.01
# Burn rates of a budget for 30 days at which an alert opens a ticket, or pages.
SLOW, FAST = 3.0, 14.4


def board() -> Board:
    return Board(
        uid="quire-slo",
        title="Quire: SLO burn",
        about="99.9 % of calls answered and 99 % of first tokens within 2 s, over 30 days; a burn rate of 1 uses the "
        "budget up exactly.",
        rows={"Availability": _availability(), "Time to first token": _first_token()},
    )


def _availability() -> list[Panel]:
    return _promise(
        "Calls",
        "failed",
        "quire:calls_failed:ratio_rate",
        FAILED_BUDGET,
        "Calls that ended with `error` or `quarantined`, or were refused for a full queue, a silent Redis or a defect",
        "see the runbook at QuireAvailabilityBurnFast",
    )


def _first_token() -> list[Panel]:
    return _promise(
        "First tokens",
        "late",
        "quire:first_tokens_late:ratio_rate",
        LATE_BUDGET,
        "First tokens that took longer than 2 s, of streamed calls",
        "see the runbook at QuireFirstTokenBurnFast",
    )


def _promise(title: str, word: str, ratio: str, budget: float, what: str, remedy: str) -> list[Panel]:
    return [
        stat(
            f"{title}: share {word}, 1 h",
            "percentunit",
            f"{what}: their share over an hour, of which {budget:.1%} are allowed; above it {remedy}.",
            Line(f"{ratio}1h", word),
            Thresholds(budget, FAST * budget),
            width=6,
        ),
        stat(
            f"{title}: share {word}, 3 d",
            "percentunit",
            f"{what}: their share over three days; above {budget:.1%} the promise of the month is at risk: {remedy}.",
            Line(f"{ratio}3d", word),
            Thresholds(0.5 * budget, budget),
            width=6,
        ),
        stat(
            f"{title}: burn rate, 1 h",
            "short",
            f"Rate at which the budget is used up, as a multiple of the allowed rate; from {FAST:g} on an alert pages: "
            f"{remedy}.",
            Line(f"{ratio}1h / {budget:g}", "burn"),
            Thresholds(SLOW, FAST),
            width=6,
        ),
        stat(
            f"{title}: budget used in 3 d",
            "percentunit",
            f"Share of the budget of 30 days that the last three used; above 10 % it will not last: {remedy}.",
            Line(f"{ratio}3d / {budget:g} / 10", "used"),
            Thresholds(0.1, 0.5),
            width=6,
        ),
        series(
            f"{title}: burn rate, short windows",
            "short",
            f"{what}: burn rates of the paging alerts; 1 h and 5 m above {FAST:g}, or 6 h and 30 m above 6: {remedy}.",
            *(Line(f"{ratio}{window} / {budget:g}", window) for window in ("5m", "30m", "1h", "6h")),
            limits=Thresholds(6, FAST),
            width=12,
        ),
        series(
            f"{title}: burn rate, long windows",
            "short",
            f"{what}: burn rates of the alerts that open a ticket; 1 d and 2 h above {SLOW:g}, or 3 d and 6 h above 1: "
            f"{remedy}.",
            *(Line(f"{ratio}{window} / {budget:g}", window) for window in ("2h", "6h", "1d", "3d")),
            limits=Thresholds(1, SLOW),
            width=12,
        ),
    ]
