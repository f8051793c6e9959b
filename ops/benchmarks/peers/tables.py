"""Markdown tables of a comparison: medians over the rounds, their spread, and the ratios of each round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from quire.ops.benchmarks.stack.load import CASES

QUIRE = "quire"
TITLES = {QUIRE: "Quire", "llamacpp": "llama.cpp", "vllm": "vLLM"}
# Each row's name, its field in a run, and True if a larger value is better.
MEASURES = (
    ("output tokens/s", "output_tokens_per_s", True),
    ("median TTFT, ms", "ttft_ms", False),
    ("median TPOT, ms", "tpot_ms", False),
)
# Ratios are given for throughput only: the other measures follow from it or are traded against it.
RATIO = "output_tokens_per_s"


def tables(measurements: Sequence[dict[str, Any]]) -> str:
    """Return one section per label: a line about the machine, the table, and the servers with their flags."""
    labels = list(dict.fromkeys(measurement["label"] for measurement in measurements))
    return "\n\n".join(
        _section(label, [measurement for measurement in measurements if measurement["label"] == label])
        for label in labels
    )


def _section(label: str, measurements: Sequence[dict[str, Any]]) -> str:
    cases = [case for measurement in measurements for case in measurement["cases"]]
    servers = list(dict.fromkeys(server["name"] for case in cases for server in case["servers"]))
    base = next((name for name in servers if name.split()[0] == QUIRE), "")
    peers = [name for name in servers if name != base]
    head = ["case", "rounds", "measure", *map(_title, servers)]
    head += [f"{_title(base)} / {_title(name)}" for name in peers] if base else []
    rows = [head, ["---"] * len(head)]
    for name in (name for name in CASES if any(case["case"] == name for case in cases)):
        rounds = _rounds([case for case in cases if case["case"] == name])
        for shown, field, _ in MEASURES:
            row = [f"`{name}`", str(len(rounds)), shown] if field == RATIO else ["", "", shown]
            row += [
                _spread([results[server][field] for results in rounds if server in results], _number)
                for server in servers
            ]
            if base:
                row += [_ratio(rounds, base, peer) if field == RATIO else "" for peer in peers]
            rows.append(row)
    lines = [f"**{label}**", "", *_facts(measurements), "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join([*lines, *_servers(cases)])


def _rounds(cases: Iterable[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """Return the results of each round, by server. Rounds of different measurements are different rounds."""
    results: list[dict[str, dict[str, Any]]] = []
    for case in cases:
        rounds: dict[int, dict[str, dict[str, Any]]] = {}
        for run in case["runs"]:
            rounds.setdefault(run["round"], {})[run["server"]] = run
        results += rounds.values()
    return results


def _ratio(rounds: Sequence[dict[str, dict[str, Any]]], base: str, peer: str) -> str:
    """Return the throughput of `base`, the first side of Quire, divided by the peer's, in each round."""
    return _spread(
        [results[base][RATIO] / results[peer][RATIO] for results in rounds if base in results and peer in results],
        "{:.2f}".format,
    )


def _spread(values: Sequence[float], shown: Any) -> str:
    if not values:
        return ""
    middle = shown(median(values))
    return f"{middle} ({shown(min(values))} to {shown(max(values))})" if len(values) > 1 else str(middle)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _facts(measurements: Sequence[dict[str, Any]]) -> list[str]:
    """Return the machine, the dates and the model, and by how much servers disturbed each other."""
    machines = {
        f"{machine['processor']}, {machine['cores']} cores ({_instructions(machine['flags'])})"
        for machine in (measurement["machine"] for measurement in measurements)
    }
    dates = sorted({measurement["when"][:10] for measurement in measurements})
    models = sorted({measurement["model"] for measurement in measurements})
    others = [
        run["others_cores"] for measurement in measurements for case in measurement["cases"] for run in case["runs"]
    ]
    return [
        f"{'; '.join(sorted(machines))}. {' to '.join({dates[0]: 1, dates[-1]: 1})}, model {', '.join(models)}.",
        f"Idle servers used at most {100 * max(others, default=0.0):.1f} % of a core while another one was measured.",
    ]


def _instructions(flags: Sequence[str]) -> str:
    """Return the instructions that make a difference for matrix products."""
    names = {"amx_int8": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512_vnni": "AVX-512 VNNI", "avx512f": "AVX-512"}
    names |= {"avx_vnni": "AVX VNNI", "avx2": "AVX2"}
    return ", ".join(name for flag, name in names.items() if flag in flags) or "no AVX2"


def _servers(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table with one row per server and set of flags: cases, seconds to ready, memory after each case."""
    servers: dict[tuple[str, str, str, str], list[tuple[str, Any, Any]]] = {}
    for case in cases:
        for server in case["servers"]:
            environ = " ".join(f"{name}={value}" for name, value in server.get("environ", {}).items())
            flags = " ".join(part for part in (environ, server.get("flags", server.get("url", ""))) if part)
            key = (server["name"], server.get("version", ""), server.get("format", ""), flags)
            servers.setdefault(key, []).append((case["case"], server.get("ready_s"), server.get("memory_mib")))
    lines = ["| server | formats | cases | command | ready, s | memory after a case, MiB |", f"|{' --- |' * 6}"]
    for (name, version, kind, flags), uses in servers.items():
        ready = [seconds for _, seconds, _ in uses if seconds is not None]
        memory = ", ".join(f"`{case}` {mib:,}" for case, _, mib in uses if mib is not None)
        names = ", ".join(f"`{case}`" for case in dict.fromkeys(case for case, _, _ in uses))
        server = f"{_title(name)} {version}".rstrip()
        lines.append(f"| {server} | {kind} | {names} | `{flags}` | {_spread(ready, '{:.1f}'.format)} | {memory} |")
    return lines


def _title(name: str) -> str:
    """Return the name of a server for a table: of the program, and of its settings if a comparison has several."""
    program, space, settings = name.partition(" ")
    return f"{TITLES.get(program, program)}{space}{settings}"
