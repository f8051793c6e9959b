"""The file of a comparison: JSON with all runs and everything that they depend on.

A file holds several measurements (`--append`), such as one per case. Measurements with equal labels make one table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.ops.benchmarks.peers.machine import machine
from quire.shared.config.command_line import CommandError

SCHEMA = "quire-peers/1"


def measurement(label: str, model: str, rounds: int, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one measurement with the facts about this machine. label: heading of the table that it belongs to."""
    return {
        "label": label,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "model": model,
        "rounds": rounds,
        "cases": cases,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """Return the measurements of a file. Raise CommandError for another file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] == SCHEMA:
            return list(content["measurements"])
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        pass
    raise CommandError(f"{path} is no result of a comparison (schema {SCHEMA}); give another --json file")


def write(path: Path, measurements: Sequence[dict[str, Any]]) -> None:
    """Write the file, with one line per run. Raise CommandError."""
    text = json.dumps({"schema": SCHEMA, "measurements": list(measurements)}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}; give another --json file") from error
