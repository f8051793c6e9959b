"""The table that `make gpu-check` prints at its end."""

from __future__ import annotations

from typing import Any


def of_another_card(report: dict[str, Any]) -> list[str]:
    """Return a line that warns if the floors are for another card than the measured card."""
    name, parts = report.get("environment", {}).get("GPU", ""), report["parts"].values()
    if not name or "H200" in name or not any(part.get("rows") for part in parts):
        return []
    copies = [part["card"]["copy_bytes_per_s"] / 1e12 for part in parts if "card" in part]
    measured = f", with copies of {copies[0]:.1f} TB/s" if copies else ""
    return [f"What is asked for, and the floors, are of an H200 with copies of 4.3 TB/s. This is {name}{measured}."]


def table(report: dict[str, Any]) -> str:
    """Format all results, a line each, with the required figures next to the measured figures."""
    lines = of_another_card(report)
    if fault := report.get("unreliable"):
        lines.insert(0, f"unreliable: {fault}")
    for name, part in report["parts"].items():
        told = part.get("tests") or part.get("why") or ""
        if "unreliable" in part:
            told = f"unreliable: triton {report['environment']['triton']}; {told}".removesuffix("; ")
        lines.append(f"{name:<18}{part['status']:<9}{told}")
        for row in part.get("self_test", ()):
            lines.append(
                f"  {row['model']}, cache in {row['cache']}: {row['cases']} cases in {row['seconds']:.1f} s, "
                f"{len(row['faults'])} kernels wrong"
            )
            lines += [f"    {line}" for line in row["faults"]]
        for row in part.get("kernels", ()):
            if "error" in row:
                lines.append(f"  {row['name']:<40} failed: {row['error'][:100]}")
                continue
            rate = f"{row['tflop_per_s']:>8.1f} TFLOP/s" if row["tflop_per_s"] else f"{row['gb_per_s']:>8.1f} GB/s   "
            lines.append(f"  {row['name']:<40}{row['ms']:>9.3f} ms {rate}{100 * row['share']:>6.0f} %")
        for row in part.get("rows", ()):
            lines.append(
                f"  {row['model']} {row['what']:<40}{row['rate']:>10.1f} {row['unit']:<7} asked for {row['least']:g}, "
                f"floor {row['floor']:g} ({100 * row['rate'] / row['floor']:.0f} %)"
            )
            if row.get("wasted_percent") is not None:
                lines[-1] += f", {row['wasted_percent']:.1f} % of the cache in use wasted"
        for row in part.get("steps", ()):
            waits = "no graph"
            if row["busy_ms"] is not None:
                waits = f"device {row['busy_ms']:.2f}, the rest {row['wait_ms']:.3f}"
            waits += f", of which it waits for the host {row['gap_ms']:.3f}"
            if row.get("mixed_launch_ms") is not None:
                waits += f", launching one with a prompt takes {row['mixed_launch_ms']:.2f}"
            lines.append(
                f"  {row['model']} decode step, {row['sequences']} x {row['context']}: {row['step_ms']:.2f} ms, {waits}"
                + (f"; without {row['replaced']}" if "replaced" in row else "")
            )
        for row in part.get("peers", ()):
            rates = [
                f"{name} {row[name]:.0f}" if isinstance(row[name], float) else f"{name} failed ({row[name]})"
                for name in ("quire", "generate", "generate_batch")
                if name in row
            ]
            lines.append(f"  {row['model']} {row['what']}, output tokens/s: {', '.join(rates)}")
        for row in part.get("graphs", ()):
            lines.append(
                f"  {row['model']} {row['count']} CUDA graphs: captured in {row['seconds']:.1f} s, {row['gib']:.2f} GiB"
            )
        for row in part.get("invariance", ()):
            lines.append(f"  batch-invariant, {row['what']}: {row['ratio']:.2f} times as long (asked for 1.6 at most)")
        if "ready_s" in part:
            lines.append(
                f"  stack ready after {part['ready_s']:.1f} s (asked for: 45), checkpoint written in "
                f"{part['written_s']:.0f} s"
            )
            for case in part["cases"]:
                lines.append(
                    f"  stack {case['case']}: {case['output_tokens_per_s']:.0f} tok/s, TTFT {case['ttft_ms']:.0f} ms, "
                    f"ITL {case['itl_ms']:.1f} ms (p99 {case['itl_p99_ms']:.1f})"
                )
    return "\n".join(lines)
