from __future__ import annotations

from pathlib import Path

import pytest

from quire.shared.model.files import ModelError, read_json


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


def test_json_of_another_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ModelError, match="is not a JSON object"):
        read_json(tmp_path / "a.json")
