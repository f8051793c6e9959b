"""The files of a model: names, configuration, the Hub, and what gateways register."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from quire.gateway.model.served_model import load_model
from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.adapter_names import (
    Announcement,
    InvalidAdapter,
    check_adapter_name,
    check_adapter_path,
    parse_adapters,
)
from quire.shared.model.config import context_length, longer_context, longest_context
from quire.shared.model.files import MAX_FILE_BYTES, ModelError, read_json
from quire.shared.model.hub import HubError, find_folder
from quire.shared.model.hub_client import download
from quire.shared.model.naming import InvalidModelName, served_name
from quire.shared.protocol.messages.manifest import FILE_LIMITS
from quire.shared.protocol.registered_files import manifest_of, read_files
from quire.shared.text.tokenizer import load_tokenizer
from quire.worker.models.choice import choose_model
from tests.support.transformers_checkpoints import make_kind

# --- files ------------------------------------------------------------------------------------------------------------


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


# --- naming -----------------------------------------------------------------------------------------------------------


def test_the_name_is_the_given_one_then_the_folders_then_the_hubs(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert served_name(str(folder), "other") == "other"
    assert served_name(str(folder)) == "my-model"
    assert served_name("owner/model") == "owner/model"
    (tmp_path / "my-model.Q4_K_M.gguf").write_text("")
    assert served_name(str(tmp_path / "my-model.Q4_K_M.gguf")) == "my-model.Q4_K_M"


@pytest.mark.parametrize("name", ["a{b}", "a b", "ä", "x" * 257, "a\n"])
def test_a_name_that_keys_cannot_hold_is_refused_with_the_setting(name: str) -> None:
    with pytest.raises(InvalidModelName, match=r"--served-model-name"):
        served_name("owner/model", name)


# --- adapter names ----------------------------------------------------------------------------------------------------
# Names and paths of adapters: hostile ones are refused wherever they come from.


@pytest.mark.parametrize("name", ["", "-a", "a b", "a@b", "a,b", "a=b", "a\n", "ä", "a" * 129, 3, None])
def test_another_name_is_refused(name: Any) -> None:
    with pytest.raises(InvalidAdapter, match="cannot be the name of an adapter: use 1 to 128"):
        check_adapter_name(name)


@pytest.mark.parametrize("path", ["", "/etc", "..", "a/../../b", "a\\b", "a\0b", "a\nb", "a" * 513, 3, None])
def test_a_path_that_could_leave_the_folder_is_refused(path: Any) -> None:
    with pytest.raises(InvalidAdapter, match="give one relative to --lora-dir"):
        check_adapter_path(path)


def test_the_setting_names_folders() -> None:
    assert parse_adapters("a=/x/y, b=z=1,", "m") == {"a": Path("/x/y"), "b": Path("z=1")}
    assert parse_adapters("", "m") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/x/y", "--lora '/x/y' is not NAME=FOLDER"),
        ("a=", "--lora 'a=' is not NAME=FOLDER"),
        ("a=x,a=y", "another adapter has the name 'a'"),
        ("m=x", "the model has the name 'm'"),
        ("a b=x", "--lora: 'a b' cannot be the name"),
    ],
)
def test_a_wrong_setting_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidAdapter, match=message):
        parse_adapters(text, "m")


def test_an_announcement_survives_its_encoding() -> None:
    one = Announcement("a", "x/y", "123")
    assert Announcement.decode("a", one.encode()) == one


@pytest.mark.parametrize(
    "data", ["", "[]", "{}", '{"path": "../x", "stamp": "1"}', '{"path": "x", "stamp": 3}', "[" * 9999]
)
def test_a_corrupt_announcement_is_refused(data: str) -> None:
    with pytest.raises(InvalidAdapter):
        Announcement.decode("a", data)


# --- config -----------------------------------------------------------------------------------------------------------
# The longest context of a model, as gateway and worker read it, and what makes it longer.


QWEN = {"max_position_embeddings": 32768, "rope_theta": 1000000.0}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **fields}}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (QWEN, 32768),
        ({"n_positions": 1024}, 1024),
        ({}, None),
        ({"max_position_embeddings": "many"}, None),
        # The card of Qwen2.5 tells users to add the field, and leaves the length as it is.
        (QWEN | rope("yarn", factor=4.0, original_max_position_embeddings=32768), 131072),
        (QWEN | {"rope_scaling": {"type": "yarn", "factor": 2.0}}, 65536),
        (QWEN | {"rope_parameters": {"rope_type": "yarn", "factor": 2}}, 65536),
        (QWEN | {"rope_parameters": {"rope_type": "default"}}, 32768),
        # DeepSeek-V3 and Qwen3 declare the length that YaRN gives, or more than the original one.
        ({"max_position_embeddings": 163840} | rope("yarn", factor=40, original_max_position_embeddings=4096), 163840),
        ({"max_position_embeddings": 40960} | rope("yarn", factor=4.0, original_max_position_embeddings=32768), 131072),
        ({"max_position_embeddings": 40960} | rope("yarn", factor=1.0, original_max_position_embeddings=32768), 40960),
        (QWEN | rope("yarn", factor=None, original_max_position_embeddings=8192), 32768),
        (QWEN | rope("yarn", factor="4", original_max_position_embeddings=8192), 32768),
        (QWEN | rope("linear", factor=4.0), 32768),
        (QWEN | rope("llama3", factor=8.0, original_max_position_embeddings=8192), 32768),
        (QWEN | rope("dynamic", factor=4.0), 32768),
        ({"max_position_embeddings": 131072, "original_max_position_embeddings": 4096} | rope("longrope"), 4096),
        ({"max_position_embeddings": 131072} | rope("longrope", original_max_position_embeddings=4096), 4096),
        (
            {
                "max_position_embeddings": 8192,
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            65536,
        ),
    ],
)
def test_the_longest_context(config: dict[str, Any], length: int | None) -> None:
    assert context_length(config) == length
    if "longrope" not in str(config):
        assert longest_context(config) == length


def test_longrope_has_a_longer_context_for_workers_that_are_asked_for_it() -> None:
    config = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096} | rope("longrope")
    assert (context_length(config), longest_context(config)) == (4096, 131072)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (QWEN, "set max_position_embeddings of config.json to 100000, or rope_scaling to "),
        (QWEN, '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'),
        ({"n_positions": 1024}, "set n_positions of config.json to 100000"),
        (QWEN | rope("linear", factor=2.0), "set max_position_embeddings of config.json to 100000, if"),
        (QWEN | rope("yarn", factor=2.0), "set factor in rope_scaling of config.json to 4"),
        (QWEN | {"rope_parameters": rope("yarn")["rope_scaling"]}, "set factor in rope_parameters of config.json to 4"),
    ],
)
def test_the_field_that_makes_room_for_a_longer_context(config: dict[str, Any], said: str) -> None:
    assert said in longer_context(config, 100_000)


@pytest.mark.parametrize("config", [{}, QWEN | rope("longrope"), QWEN | rope("dynamic", factor=2.0)])
def test_no_field_makes_room_where_frequencies_depend_on_the_context(config: dict[str, Any]) -> None:
    assert longer_context(config, 100_000) == ""


@pytest.mark.parametrize("kind", ["llama-yarn-beyond", "llama-yarn", "gpt2", "phi3"])
def test_gateway_and_worker_read_the_same_context(kind: str, tmp_path: Path) -> None:
    folder = make_kind(tmp_path / kind, kind)
    assert load_model(str(folder), kind).max_model_len == choose_model(folder).max_position_embeddings == 256


def test_gateway_and_worker_read_the_same_context_where_a_model_card_adds_yarn(tmp_path: Path) -> None:
    folder = make_kind(tmp_path / "llama", "llama-gelu")
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(str(folder), "llama").max_model_len == choose_model(folder).max_position_embeddings == 1024


# --- hub --------------------------------------------------------------------------------------------------------------


def test_a_model_is_downloaded_with_the_wanted_files_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert download("owner/model", ["*.json"], ["*.bin"]) == tmp_path
    assert asked == {"name": "owner/model", "allow_patterns": ["*.json"], "ignore_patterns": ["*.bin"]}


def of_http(kind: type[Exception]) -> Exception:
    return kind.__new__(kind)  # the real constructor wants a whole HTTP response


@pytest.mark.parametrize(
    ("error", "reason", "remedy"),
    [
        (of_http(errors.RepositoryNotFoundError), "is unknown or private", "check the spelling"),
        (of_http(errors.GatedRepoError), "needs permission", "accept its licence"),
        (errors.HFValidationError("bad"), "is malformed", "give a folder"),
        (errors.LocalEntryNotFoundError("gone"), "is neither downloaded nor reachable", "HF_HUB_OFFLINE"),
        (errors.OfflineModeIsEnabled("off"), "is neither downloaded nor reachable", "HF_HUB_OFFLINE"),
        (OSError("no space left"), "could not be downloaded (OSError: no space left)", "check the network"),
    ],
)
def test_a_failure_names_its_reason_and_the_remedy(
    error: Exception, reason: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(HubError) as caught:
        download("owner/model", ["*.json"])
    assert reason in caught.value.reason
    assert remedy in caught.value.remedy
    assert str(caught.value) == f"{caught.value.reason}; {caught.value.remedy}"
    assert "\n" not in str(caught.value)


def test_a_folder_is_itself_and_is_not_downloaded(tmp_path: Path) -> None:
    assert find_folder(str(tmp_path), ["*.json"]) == tmp_path


@pytest.mark.parametrize("model", ["./missing", "/missing/folder", "~/missing-folder", "a/b/c", ""])
def test_a_path_without_a_folder_is_refused_without_the_network(model: str) -> None:
    with pytest.raises(HubError, match=r"there is no folder '.*'; give a folder with config\.json"):
        find_folder(model, ["*.json"])


def test_a_file_is_refused_but_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(HubError, match="is a file; give a GGUF file, or the folder"):
        find_folder(str(tmp_path / "weights.bin"), ["*.json"])
    (tmp_path / "a.gguf").write_text("")
    assert find_folder(str(tmp_path / "a.gguf"), ["*.json"]) == tmp_path / "a.gguf"
    assert find_folder(str(tmp_path), ["*.json"]) == tmp_path / "a.gguf"


# --- registered files -------------------------------------------------------------------------------------------------
# The files that a worker registers: no weights, no code, and of config.json a few fields.


def test_the_demo_model() -> None:
    files = read_files(PROJECT_ROOT / "models" / "demo")
    assert files.keys() <= FILE_LIMITS.keys()
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"} == files.keys()
    config = json.loads(files["config.json"])
    assert config["vocab_size"] > 0
    assert "num_hidden_layers" not in config
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
