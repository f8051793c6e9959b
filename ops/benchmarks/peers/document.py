"""`python -m quire.ops.benchmarks.peers.document` writes the tables of peers in docs/benchmarks.md from the results."""

from __future__ import annotations

import sys
from pathlib import Path

from quire.ops.benchmarks.peers import results
from quire.ops.benchmarks.peers.tables import tables
from quire.ops.paths import PROJECT_ROOT

BEGIN, END = "<!-- peers -->\n", "<!-- /peers -->\n"
RESULTS = PROJECT_ROOT / "ops" / "benchmarks" / "results" / "peers"
PAGE = PROJECT_ROOT / "docs" / "benchmarks.md"


def with_tables(text: str, folder: Path = RESULTS) -> str:
    """`text` with the tables of all result files of `folder` between its markers."""
    head, rest = text.split(BEGIN)
    measurements = [one for path in sorted(folder.glob("*.json")) for one in results.read(path)]
    return head + BEGIN + "\n" + tables(measurements) + "\n\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    before = PAGE.read_text()
    PAGE.write_text(with_tables(before))
    print("docs/benchmarks.md: " + ("unchanged" if PAGE.read_text() == before else "tables brought up to date"))
    sys.exit(0)
