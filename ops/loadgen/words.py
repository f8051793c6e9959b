"""Figures for people: rounded, with units, and limits as sentences. The JSON has the exact values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.ops.loadgen.measures import Summary
from quire.ops.loadgen.plan import Plan

LATENCIES = {
    "ttft": "time to the first token",
    "tpot": "time per token after the first",
    "itl": "gap between two chunks",
    "e2e": "time to the end",
}


def number(value: float) -> str:
    """Return a number with three significant digits, and whole numbers in full: `0.548`, `1.50`, `12.3`, `1,235`."""
    rounded = float(f"{value:.3g}") if abs(value) < 1000 else value
    size = abs(rounded)
    if rounded == int(rounded) or size >= 100:
        return f"{rounded:,.0f}"
    return f"{rounded:.1f}" if size >= 10 else f"{rounded:.2f}" if size >= 1 else f"{rounded:.3g}"


def milliseconds(value: float) -> str:
    """Return a time in milliseconds with its unit: `0.07 ms`, `8.21 ms`, `120 ms`, `2.50 s`."""
    if value >= 1000:
        return f"{number(value / 1000)} s"
    return f"{number(value)} ms" if value >= 1 else f"{value:.2f} ms"


def limits(slo: Mapping[str, float]) -> str:
    """Return the limits in seconds as text: `TTFT at most 2 s and TPOT at most 100 ms`."""
    return enumeration([f"{name.upper()} at most {milliseconds(1000 * limit)}" for name, limit in slo.items()])


def enumeration(parts: Sequence[str]) -> str:
    """Return an enumeration: `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 request`, `2 requests`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def load(plan: Plan) -> str:
    """Return the load, in one line."""
    much = counted(plan.requests, "request") if plan.requests is not None else f"{plan.duration_s:g} s"
    rounds = f", {plan.rounds} blocks each" if plan.rounds > 1 else ""
    return f"{plan.shape.name}, {much}{rounds}, {plan.load}, seed {plan.seed}"


def headline(name: str, side: Summary) -> str:
    """Return the main figures of one server as a sentence."""
    if not side.completed:
        return f"{name}: none of {counted(side.requests, 'request')} completed."
    text = f"{name}: {number(side.output_tokens_per_s)} output tokens/s, {number(side.requests_per_s)} requests/s"
    if side.ttft_ms:
        text += f"; first token after {milliseconds(side.ttft_ms.p50)} (p50), {milliseconds(side.ttft_ms.p99)} (p99)"
    if side.tpot_ms:
        text += f"; then {milliseconds(side.tpot_ms.p50)} per token (p50)"
    if side.failed:
        text += f"; {counted(side.failed, 'request')} failed"
    return text + "."


def goodput(side: Summary, slo: Mapping[str, float]) -> str:
    """Return the requests that met the limits, as text; empty without limits."""
    if side.good is None or side.good_share is None or side.good_per_s is None:
        return ""
    return (
        f"{100 * side.good_share:.1f} % of the requests, {number(side.good_per_s)} requests/s, met the limits: "
        f"{limits(slo)}"
    )


def lateness(figures: Mapping[str, float]) -> list[str]:
    """Return the lateness of the client itself, as sentences."""
    said = []
    for key, what in (("lag", "timers were late by"), ("slip", "requests left later than planned by")):
        if f"{key}_p50_ms" in figures:
            p50, p99 = (milliseconds(figures[f"{key}_{share}_ms"]) for share in ("p50", "p99"))
            said.append(f"{what} {p50} (p50), {p99} (p99)")
    return said


def facts(result: Mapping[str, Any], slo: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return facts about a run, by name: the load, the date, the machine and lateness of the client."""
    load, machine = result["load"], result["environment"]
    context = load["context"]
    listed = [
        ("when", result["when"]),
        ("shape of the load", load["shape"]),
        ("arrivals", load["arrivals"]),
        ("prompts", load["prompts"]),
        ("context", "" if context is None else counted(context, "token")),
        ("requests cut to the context", number(load["cut_lengths"]) if load["cut_lengths"] else ""),
        ("limits of a good request", limits(slo)),
        ("client", enumeration(lateness(result["client"]))),
        ("machine of the client", f"{machine['processor']}, {counted(machine['cores'] or 1, 'core')}"),
        ("system", f"{machine['system']}, Python {machine['python']}"),
    ]
    return [(name, text) for name, text in listed if text]


def settings(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the flags and values of the settings that are set."""
    shown = []
    for name, value in given.items():
        if value is None or value == "":
            continue
        text = ("no", "yes")[value] if isinstance(value, bool) else number(value) if isinstance(value, float) else value
        shown.append(("--" + name.replace("_", "-"), str(text)))
    return shown
