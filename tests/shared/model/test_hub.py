from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from quire.shared.model.hub import HubError, download, find_folder


def test_a_model_is_downloaded_with_the_wanted_files_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert download("owner/model", ["*.json"], ["*.bin"]) == tmp_path
    assert asked == {"name": "owner/model", "allow_patterns": ["*.json"], "ignore_patterns": ["*.bin"]}


@pytest.mark.parametrize(
    ("error", "reason", "remedy"),
    [
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
