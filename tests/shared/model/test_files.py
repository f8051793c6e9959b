from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.shared.model.files import MAX_FILE_BYTES, ModelError, read_json
from quire.shared.text.tokenizer import load_tokenizer


def test_an_object_is_read_and_a_missing_file_is_empty_unless_it_is_required(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert read_json(path) == {}
    with pytest.raises(ModelError, match=r"config\.json is missing; a model folder needs"):
        read_json(path, required=True)
    path.write_text('{"a": [1]}')
    assert read_json(path, required=True) == {"a": [1]}


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000])
def test_a_file_that_is_not_json_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"a\.json cannot be read: .*; fetch the model again"):
        read_json(tmp_path / "a.json")


def test_a_pipe_a_device_and_a_huge_file_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    os.mkfifo(path)
    with pytest.raises(ModelError, match="is not a regular file"):
        read_json(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ModelError, match="is not a regular file"):
        read_json(path)
    path.unlink()
    (tmp_path / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(ModelError, match="is not a regular file"):
        load_tokenizer(tmp_path, {})
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ModelError, match="has more than 256 MiB"):
        read_json(path)


def test_json_of_another_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ModelError, match="is not a JSON object"):
        read_json(tmp_path / "a.json")
