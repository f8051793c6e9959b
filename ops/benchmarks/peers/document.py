"""`python -m quire.ops.benchmarks.peers.document` writes the tables of peers in docs/benchmarks.md from the results."""

from __future__ import annotations

from pathlib import Path

from quire.ops.benchmarks.peers import results
from quire.ops.benchmarks.peers.tables import tables
from quire.ops.paths import PROJECT_ROOT
from quire.ops.tools import marked_tables

RESULTS = PROJECT_ROOT / "ops" / "benchmarks" / "results" / "peers"
PAGE = PROJECT_ROOT / "docs" / "benchmarks.md"


def with_tables(text: str, folder: Path = RESULTS) -> str:
    """Return `text` with the tables of all result files of `folder` between its markers."""
    return marked_tables.with_tables(text, _tables(folder))


def _tables(folder: Path) -> dict[str, str]:
    measurements = [measurement for path in sorted(folder.glob("*.json")) for measurement in results.read(path)]
    return {"peers": tables(measurements) + "\n"}


if __name__ == "__main__":
    marked_tables.update_page(PAGE.name, _tables(RESULTS))
