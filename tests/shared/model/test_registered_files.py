"""The files that a worker registers: no weights, no code, and of config.json a few fields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.ops.paths import PROJECT_ROOT
from quire.shared.messages.manifest import FILE_LIMITS
from quire.shared.model.files import ModelError
from quire.shared.model.registered_files import manifest_of, read_files


def test_the_demo_model() -> None:
    files = read_files(PROJECT_ROOT / "models" / "demo")
    assert files.keys() <= FILE_LIMITS.keys()
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"} == files.keys()
    config = json.loads(files["config.json"])
    assert config["vocab_size"] > 0
    assert "architectures" not in config
    manifest = manifest_of("demo", (), files)
    assert [entry.name for entry in manifest.files] == sorted(files)


def test_a_file_above_its_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 5, "x": 1}}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "modeling.py").write_text("raise SystemExit")
    files = read_files(tmp_path)
    assert json.loads(files["config.json"]) == {"text_config": {"vocab_size": 5}}
    assert "modeling.py" not in files
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * (FILE_LIMITS["chat_template.jinja"] + 1))
    with pytest.raises(ModelError, match=r"chat_template\.jinja has 1048577 bytes"):
        read_files(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        read_files(tmp_path)
