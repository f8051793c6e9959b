"""The models of a folder: what counts as one, what is wrong with it, and when it has changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quire.ops.paths import PROJECT_ROOT
from quire.shared.protocol.messages import MessageError
from quire.shared.protocol.messages.host_card import HostCard, HostedModel, HostState, by_name
from quire.worker.host.folder import scan

DEMO = PROJECT_ROOT / "models" / "demo"


def test_folders_links_and_gguf_files_are_models_and_faults_have_reasons(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "demo")
    (tmp_path / "linked").symlink_to(DEMO)
    (tmp_path / "file.gguf").write_bytes(b"GGUF")
    (tmp_path / ".adding-other").mkdir()
    (tmp_path / "notes.txt").write_text("no model")
    for name, file in (("pickle", "pytorch_model.bin"), ("lora", "adapter_model.safetensors"), ("bad name", "x")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    (tmp_path / "pickle" / "config.json").write_text(json.dumps({"architectures": ["Foo"]}))
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    found = scan(tmp_path, {})
    assert set(found) == {"demo", "linked", "file", "pickle", "lora", "bad name"}
    size = (DEMO / "model.safetensors").stat().st_size
    assert {(found[name].size, found[name].architecture) for name in ("demo", "linked")} == {(size, "LlamaForCausalLM")}
    assert {name for name, entry in found.items() if entry.fault} == {"pickle", "lora", "bad name"}
    assert "pickle format" in found["pickle"].fault
    assert "adapter" in found["lora"].fault
    assert str(tmp_path) not in "".join(entry.fault for entry in found.values())


def test_an_entry_is_read_again_when_its_files_have_changed(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "a")
    shutil.copytree(DEMO, tmp_path / "b")
    before = scan(tmp_path, {})
    (tmp_path / "b" / "model.safetensors").write_bytes(b"short")
    after = scan(tmp_path, before)
    assert after["a"] is before["a"]
    assert (after["b"].size, before["b"].size > 5) == (5, True)


@pytest.mark.parametrize("name", ["tokenizer.json", "model-00002-of-00002.safetensors", "model.gguf"])
def test_an_entry_that_was_found_during_its_copy_is_read_again(tmp_path: Path, name: str) -> None:
    """The last bytes of a file change neither the folder nor the files before it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_bytes(b"GG")
    before = scan(tmp_path, {})
    with (tmp_path / "a" / name).open("ab") as file:
        file.write(b"UF")
    assert scan(tmp_path, before)["a"] is not before["a"]


def test_the_parts_of_a_split_model_are_one_entry(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for place in (tmp_path, tmp_path / "in"):
        for number, size in ((1, 10), (2, 20)):
            (place / f"model-{number:05}-of-00002.gguf").write_bytes(bytes(size))
    (tmp_path / "other-00002-of-00002.gguf").touch()
    found = scan(tmp_path, {})
    assert {name: entry.size for name, entry in found.items()} == {"in": 30, "model": 30, "other": 0}
    assert found["in"].place == tmp_path / "in" / "model-00001-of-00002.gguf"
    (tmp_path / "model-00002-of-00002.gguf").write_bytes(bytes(25))
    assert scan(tmp_path, found)["model"].size == 35


def test_shards_count_as_the_index_names_them(tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}})
    )
    for name, size in (("model-1", 10), ("model-2", 20), ("consolidated", 500)):
        (folder / f"{name}.safetensors").write_bytes(bytes(size))
    [entry] = scan(tmp_path, {}).values()
    assert (entry.size, entry.fault) == (30, "")


def test_the_cards_of_hosts_come_back_and_damaged_ones_are_refused() -> None:
    a = HostedModel("a", HostState.FAILED, "out of memory", 5)
    one = HostCard("home", (a, HostedModel("b", HostState.NOT_LOADED)))
    two = HostCard("", (HostedModel("a", HostState.LOADING), HostedModel("b", HostState.FAILED, "why")))
    assert HostCard.decode(one.encode()) == one
    assert {name: model.state for name, model in by_name([one, two]).items()} == {"a": "loading", "b": "not_loaded"}
    assert by_name([one])["a"] == a
    for wrong in (HostedModel("{", HostState.LOADED), HostedModel("a", "asleep")):  # type: ignore[arg-type]
        with pytest.raises(MessageError, match="models"):
            HostCard.decode(HostCard("", (wrong,)).encode())
