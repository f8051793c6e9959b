"""`quire worker`, `quire gateway` and `quire serve` refuse a folder of another format by name, on one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.shared.model_argument import resolve_model
from tests.shared.model.test_folder import OTHERS, write
from tests.support.commands import refusal
from tests.support.gguf_vocabularies import write_vocabulary


# test_folder.py has all formats in one process.
@pytest.mark.slow
@pytest.mark.parametrize("command", ["worker", "gateway", "serve"])
def test_each_command_names_another_format_and_the_way_out(command: str, tmp_path: Path) -> None:
    files, parts = OTHERS["adapter with a configuration"]
    said = refusal(1, command, str(write(tmp_path / "model", files)))
    for part in parts:
        assert part in said


@pytest.mark.slow
@pytest.mark.parametrize("command", ["worker", "gateway"])
def test_a_damaged_gguf_file_is_refused_in_one_line(command: str, tmp_path: Path) -> None:
    write(tmp_path, {"a.gguf": "GGUF"})
    said = refusal(1, command, str(tmp_path / "a.gguf"))
    assert "a.gguf: the version ends past the end of the file" in said
    assert "download the file again" in said


def test_a_gguf_file_is_itself_and_the_model_of_its_folder(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "blob")
    (tmp_path / "model").mkdir()
    link = tmp_path / "model" / "a.gguf"
    link.symlink_to(tmp_path / "blob")  # as in the cache of the Hugging Face Hub
    assert resolve_model(str(link)) == resolve_model(str(link.parent)) == str(link)
