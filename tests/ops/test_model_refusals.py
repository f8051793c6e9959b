"""`quire worker`, `quire gateway` and `quire serve` refuse a folder of another format by name, on one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.test_cli import refusal
from tests.shared.model.test_folder import ADAPTER, MERGE, OTHERS, write
from tests.worker.checkpoints import make_checkpoint


@pytest.mark.parametrize("command", ["worker", "gateway", "serve"])
@pytest.mark.parametrize("kind", OTHERS)
def test_each_command_names_the_format_and_the_way_out(kind: str, command: str, tmp_path: Path) -> None:
    files, parts = OTHERS[kind]
    said = refusal(1, command, str(write(tmp_path / "model", files)))
    for part in parts:
        assert part in said


@pytest.mark.parametrize("command", ["worker", "gateway", "serve"])
def test_each_command_refuses_an_adapter_next_to_its_model(command: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    write(folder, {"adapter_config.json": ADAPTER})
    said = refusal(1, command, str(folder))
    assert f"{folder / 'adapter_config.json'}: this folder holds a model and an adapter (LoRA)" in said
    assert MERGE in said


def test_a_gguf_file_is_named_too(tmp_path: Path) -> None:
    write(tmp_path, {"a.gguf": ""})
    assert "a.gguf is in GGUF, the format of llama.cpp" in refusal(1, "worker", str(tmp_path / "a.gguf"))
