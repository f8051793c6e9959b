"""The default pooling comes from the sentence-transformers files of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.model.pooling import read_pooling
from quire.shared.model.files import ModelError

OLD_MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def old(*on: str) -> dict[str, Any]:
    flags = {f"pooling_mode_{mode}": mode in on for mode in OLD_MODES}
    return {"word_embedding_dimension": 64, **flags, "include_prompt": True}


def write(folder: Path, pooling: Any = None, kinds: tuple[str, ...] | None = None, place: str = "1_Pooling") -> Path:
    """Write the configuration of the pooling module and, if `kinds` are given, the list of modules."""
    if pooling is not None:
        (folder / place).mkdir()
        (folder / place / "config.json").write_text(json.dumps(pooling))
    if kinds is not None:
        modules = [
            {"idx": index, "name": str(index), "path": place if kind == "Pooling" else "", "type": f"library.{kind}"}
            for index, kind in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def test_a_plain_decoder_takes_the_last_token(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == "last"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (old("lasttoken"), "last"),
        (old("mean_tokens"), "mean"),
        (old("cls_token"), ""),
        (old("mean_tokens", "max_tokens"), ""),
        (old(), ""),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "weightedmean"}, ""),
        ({"pooling_mode": ["mean", "lasttoken"]}, ""),
    ],
)
@pytest.mark.parametrize("kinds", [None, ("Transformer", "Pooling", "Normalize")], ids=["alone", "listed"])
def test_the_mode_is_that_of_the_file(
    config: dict[str, Any], expected: str, kinds: tuple[str, ...] | None, tmp_path: Path
) -> None:
    assert read_pooling(write(tmp_path, config, kinds)) == expected


def test_the_list_of_modules_names_the_folder(tmp_path: Path) -> None:
    assert read_pooling(write(tmp_path, old("mean_tokens"), ("Transformer", "Pooling"), "pooling")) == "mean"


@pytest.mark.parametrize(
    "kinds", [("Transformer",), ("Transformer", "Pooling", "Dense"), ("Transformer", "Pooling", "Pooling")]
)
def test_other_modules_leave_the_choice_to_the_call(kinds: tuple[str, ...], tmp_path: Path) -> None:
    assert read_pooling(write(tmp_path, old("mean_tokens"), kinds)) == ""


def test_a_list_without_the_file_it_names_leaves_the_choice_to_the_call(tmp_path: Path) -> None:
    assert read_pooling(write(tmp_path, None, ("Transformer", "Pooling"))) == ""


def test_a_file_outside_the_model_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, old("mean_tokens"), None, "outside")
    folder = tmp_path / "model"
    folder.mkdir()
    modules = [{"type": "library.Pooling", "path": "../outside"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert read_pooling(folder) == ""


@pytest.mark.parametrize("content", ["{", "{}", "[1]", '[{"type": "library.Pooling"}]'])
def test_a_broken_list_names_the_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ModelError, match=r"modules\.json"):
        read_pooling(tmp_path)
