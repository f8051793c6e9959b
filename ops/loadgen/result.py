"""The result as JSON. Names and meanings of existing fields only change together with the version in `schema`."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict
from typing import Any

from quire.ops.cli.server_url import parse_url
from quire.ops.loadgen.client import RequestRecord
from quire.ops.loadgen.measures import blocks_of, client_figures, compare, summaries, summarise, warnings, was_cut
from quire.ops.loadgen.runner import Run
from quire.ops.loadgen.settings import BenchSettings
from quire.shared.config.settings import options

SCHEMA = "quire-bench/1"


def as_json(run: Run, settings: BenchSettings) -> dict[str, Any]:
    """Return all results, the settings without secrets, and facts about the machine and the servers."""
    return {
        "schema": SCHEMA,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "settings": shown_settings(settings),
        "environment": environment(),
        "load": {
            "shape": run.plan.shape.name,
            "arrivals": run.plan.load,
            "prompts": run.prompts.how,
            "context": run.context,
            "cut_lengths": run.cut_lengths,
            "slo_ms": {name: 1000 * limit for name, limit in run.plan.slo.items()},
        },
        "stopped": run.stopped,
        "client": client_figures(run),
        "servers": [
            {
                "label": server.label,
                "url": server.name,
                "model": server.model,
                "software": server.software,
                "context": server.context,
                **asdict(side),
                "blocks": [asdict(summarise([block], run.plan.slo)) for block in blocks_of(run, number)],
                **({"records": _records(run, number)} if settings.save_requests else {}),
            }
            for number, (server, side) in enumerate(zip(run.servers, summaries(run), strict=True))
        ],
        "comparison": [asdict(comparison) for comparison in compare(run)] if len(run.servers) == 2 else [],
        "warnings": warnings(run),
    }


def shown_settings(settings: BenchSettings) -> dict[str, Any]:
    """Return all settings except secrets; URLs without passwords."""
    shown = {item.name: getattr(settings, item.name) for item in options(BenchSettings) if not item.secret}
    for name in ("url", "against"):
        if shown[name]:
            shown[name] = parse_url(shown[name], f"--{name}").shown
    return shown


def environment() -> dict[str, Any]:
    """Return the machine of the client."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _records(run: Run, server: int) -> list[dict[str, Any]]:
    return [_record(run, block.index, record) for block in blocks_of(run, server) for record in block.records]


def _record(run: Run, block: int, record: RequestRecord) -> dict[str, Any]:
    """Return a request. Times are seconds since the start of the run; those of chunks, since the request was sent."""
    return {
        "block": block,
        "index": record.index,
        "asked_input_tokens": record.input_tokens,
        "asked_output_tokens": record.output_tokens,
        "input_tokens": record.prompt_tokens,
        "output_tokens": record.tokens,
        "due_s": record.due - run.started if record.due else None,
        "sent_s": record.sent - run.started if record.sent else None,
        "ended_s": record.ended - run.started if record.ended else None,
        "chunks_s": [round(at - record.sent, 6) for at in record.chunks],
        "error": "cut short" if was_cut(record) else record.error,
        "message": record.message,
    }
