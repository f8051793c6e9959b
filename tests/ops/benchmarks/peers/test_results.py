"""The file of a comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.ops.benchmarks.peers import results
from quire.shared.command_line import CommandError


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = [results.measurement("label", "m", 3, [{"case": "c1"}])]
    results.write(tmp_path / "new" / "r.json", made)
    assert results.read(tmp_path / "new" / "r.json") == made
    assert made[0]["when"].endswith("Z")


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "quire-bench/1"}', '{"schema": "quire-peers/1"}'])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(CommandError, match=r"r\.json is no result of a comparison"):
        results.read(tmp_path / "r.json")


def test_a_file_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match="give another --json file"):
        results.write(tmp_path / "file" / "r.json", [])
