"""The tables of peers in docs/benchmarks.md are those of the committed results."""

from __future__ import annotations

from pathlib import Path

from quire.ops.benchmarks.peers import results
from quire.ops.benchmarks.peers.document import PAGE, with_tables
from tests.ops.benchmarks.peers.test_tables import one


def test_the_tables_of_the_page_are_those_of_the_results() -> None:
    text = PAGE.read_text()
    assert with_tables(text) == text, "run python -m quire.ops.benchmarks.peers.document"


def test_the_text_around_the_tables_stays(tmp_path: Path) -> None:
    for name in "ba":
        results.write(tmp_path / f"{name}.json", [one(name, "c1", {"quire": [1.0]})])
    text = with_tables("before\n<!-- peers -->\nold\n<!-- /peers -->\nafter\n", tmp_path)
    assert text.startswith("before\n<!-- peers -->\n\n**a**\n")
    assert text.endswith("\n\n<!-- /peers -->\nafter\n")
    assert "old" not in text
    assert text.index("**a**") < text.index("**b**")
