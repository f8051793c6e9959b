"""`quire models`: what is copied, linked, refused and deleted, and what the list says."""

from __future__ import annotations

import asyncio
import json
import shutil
from functools import partial
from pathlib import Path

import gguf
import pytest

from quire.ops.cli.model_folder import run
from quire.ops.cli.settings import AddModel, ListModels, RemoveModel
from quire.ops.paths import PROJECT_ROOT
from quire.ops.tools.gguf_writer import write_gguf
from quire.shared.config.command_line import CommandError
from quire.shared.protocol.broker.hosts import HostRegistry
from quire.shared.protocol.messages.host_card import HostCard, HostedModel, HostState
from tests.support.registrations import open_registry

DEMO = PROJECT_ROOT / "models" / "demo"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def add(folder: Path, model: Path | str, name: str = "", mode: str = "auto") -> int:
    return run(AddModel(models_dir=str(folder), model=str(model), name=name, mode=mode), {})


def remove(folder: Path, name: str) -> int:
    return run(RemoveModel(models_dir=str(folder), name=name, yes=True, redis_url="redis://127.0.0.1:1/0"), {})


def test_what_is_added_is_copied_without_files_that_no_worker_reads(folder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(DEMO, tmp_path / "source")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / "onnx").mkdir()
    (source / "onnx" / "model.safetensors").write_bytes(b"other")
    assert add(folder, source) == 0
    copied = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"source/config.json", "source/model.safetensors", "source/tokenizer.json"} <= copied
    assert not any("onnx" in name or name.endswith(".bin") for name in copied)
    assert (folder / "source" / "model.safetensors").read_bytes() == (DEMO / "model.safetensors").read_bytes()
    assert add(folder, source, "linked", "link") == 0
    assert (folder / "linked").readlink() == source
    assert {path.name for path in folder.iterdir()} == {"source", "linked"}
    # What a link leads to stays.
    assert remove(folder, "linked") == remove(folder, "source") == 0
    assert list(folder.iterdir()) == []
    assert (source / "model.safetensors").exists()


@pytest.mark.parametrize("mode", ["copy", "link"])
def test_a_split_model_is_added_and_removed_with_all_parts(
    folder: Path, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gguf, "GGUFWriter", partial(gguf.GGUFWriter, split_max_tensors=30))
    write_gguf(DEMO, tmp_path / "story.gguf", "Q8_0")
    parts = sorted(tmp_path.glob("story-*.gguf"))
    assert len(parts) > 1
    assert add(folder, parts[0], mode=mode) == add(folder, parts[0], "other", mode) == 0
    for part in parts:  # as somebody may have put them there
        shutil.copy(part, folder / part.name.replace("story", "loose"))
    run(ListModels(models_dir=str(folder), redis_url="redis://127.0.0.1:1/0", json=True), {})
    rows = json.loads(capsys.readouterr().out.partition("\n")[2].partition("\n")[2])
    size = sum(part.stat().st_size for part in parts)
    assert {row["name"]: (row["bytes"], row["reason"]) for row in rows} == dict.fromkeys(
        ("loose", "other", "story"), (size, None)
    )
    assert remove(folder, "story") == remove(folder, "other") == remove(folder, "loose") == 0
    assert list(folder.iterdir()) == []
    assert all(part.exists() for part in parts)


@pytest.mark.parametrize(
    ("name", "why"),
    [("demo", "has a model 'demo'"), ("../up", "cannot be the name"), (".hidden", "cannot be the name")],
)
def test_names_that_are_taken_or_lead_elsewhere_are_refused(folder: Path, name: str, why: str) -> None:
    (folder / "demo").symlink_to(DEMO)
    with pytest.raises(CommandError, match=why):
        add(folder, DEMO, name)
    assert [path.name for path in folder.iterdir()] == ["demo"]


def test_a_model_that_cannot_be_served_is_not_added(folder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(DEMO, tmp_path / "odd")
    (source / "config.json").write_text(json.dumps({"model_type": "foo", "architectures": ["Foo"]}))
    with pytest.raises(CommandError, match='model_type is "foo"'):
        add(folder, source)
    with pytest.raises(CommandError, match="there is none at"):
        add(folder, tmp_path / "nowhere")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["../models/demo", "demo/", ".", "..", "", "config.json", "dem"])
def test_only_models_of_the_folder_are_removed(folder: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(DEMO, folder / "demo")
    with pytest.raises(CommandError, match="has no model"):
        remove(folder, name)
    assert (folder / "demo" / "model.safetensors").exists()


def test_the_list_has_states_of_running_hosts_and_reasons(
    folder: Path, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("fine", "broken"):
        shutil.copytree(DEMO, folder / name)
    (folder / "pickle").mkdir()
    (folder / "pickle" / "config.json").write_text("{}")
    (folder / "pickle" / "pytorch_model.bin").touch()

    async def say() -> None:
        models = (
            HostedModel("fine", HostState.LOADED, used_ms=1_700_000_000_000),
            HostedModel("broken", HostState.FAILED, "too little memory"),
        )
        async with open_registry(redis_url) as registry:
            await HostRegistry(registry.client).beat("host", HostCard("", models))

    asyncio.run(say())
    assert run(ListModels(models_dir=str(folder), redis_url=redis_url, json=True), {}) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name: row["status"] for name, row in rows.items()} == {
        "fine": "loaded",
        "broken": "failed",
        "pickle": "refused",
    }
    assert rows["fine"]["last_used"] == 1_700_000_000
    assert rows["fine"]["bytes"] == (DEMO / "model.safetensors").stat().st_size
    assert rows["broken"]["reason"] == "too little memory"
    assert "pickle format" in rows["pickle"]["reason"]
    assert run(ListModels(models_dir=str(folder), redis_url=redis_url), {}) == 0
    assert "too little memory" in capsys.readouterr().out
